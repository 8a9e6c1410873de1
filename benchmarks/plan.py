"""Is the simulation behind `pmi plan` right? The same arrivals, simulated and for real, side by side.

    python -m benchmarks.plan --preset tiny --seconds 30                              an engine in this process
    python -m benchmarks.plan --preset tiny --seconds 30 --service --checkpoint DIR   `pmi serve`, through HTTP

Figures are measured before and after the run and averaged, for the machine may drift. The load is a share (`--share`) of the
capacity that they give. Real requests resume sessions with tails of all lengths, as the simulated ones do. Reported: p50 and
p95 of the time to the first token, p50 of the time between tokens, and tokens per second, each as simulated over measured; the
target is within 20 %.
"""

import argparse
import asyncio
import json
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.measure import save
from lm.config import load_model_config
from lm.data.tokenizer import ByteTokenizer
from lm.model import PMI
from lm.model.pretrained import Checkpoint, fingerprint, from_pretrained
from lm.model.proofs import draw_zeros
from serving.engine import Engine, EngineConfig, Request
from serving.engine.opening import identity
from serving.planning.figures import Figures
from serving.planning.measure import measure
from serving.planning.plan import capacity
from serving.planning.simulate import Arrival, Cluster, Load, quantile, simulate
from serving.sessions.opening import open_store
from serving.sessions.store import LOCAL, Settings

BASES = 8
"""Sessions that the requests' own are forked from, with tails spread over the segment."""
LONE = 12
"""Requests that come one by one before the run, to tell what HTTP and Ray add."""
Ask = Callable[[Arrival, str], AsyncIterator[int]]
"""Sends one request; yields the number of tokens that came, whenever some do."""


@dataclass
class Seen:
    """What real clients saw."""

    first: list[float] = field(default_factory=list)
    gaps: list[tuple[float, int]] = field(default_factory=list)
    tokens: int = 0
    failed: int = 0
    seconds: float = 0.0
    overhead: float = 0.0
    """Seconds that HTTP and Ray add to a lone request's first token."""


async def drive(arrivals: list[Arrival], ask: Ask, name: str = "run") -> Seen:
    """Send every request at its time; do not wait for one before the next."""
    seen, began = Seen(), time.perf_counter()

    async def one(number: int, arrival: Arrival) -> None:
        await asyncio.sleep(max(0.0, began + arrival.at - time.perf_counter()))
        sent, last = time.perf_counter(), None
        try:
            async for count in ask(arrival, f"{name}-{number}"):
                now = time.perf_counter()
                if last is None:
                    seen.first.append(now - sent)
                elif count:  # several tokens in one event: each waited its share
                    seen.gaps.append(((now - last) / count, count))
                last, seen.tokens = now, seen.tokens + count
        except Exception as error:
            seen.failed += 1
            print(f"request {number}: {type(error).__name__}: {error}", file=sys.stderr)

    await asyncio.gather(*(one(number, arrival) for number, arrival in enumerate(arrivals)))
    seen.seconds = time.perf_counter() - began
    return seen


def with_tails(arrivals: list[Arrival], tails: list[int]) -> list[Arrival]:
    """The same arrivals, each resuming a session forked from base `session % BASES`."""
    return [replace(arrival, tail=tails[arrival.session % BASES]) for arrival in arrivals]


def in_process(args: argparse.Namespace, figures: Figures, arrivals: list[Arrival]) -> tuple[Seen, list[Arrival]]:
    """An engine of this process with sessions in SQLite."""
    torch.manual_seed(0)
    model = draw_zeros(PMI(load_model_config(args.preset, ["dropout=0"]))).eval()
    checkpoint = Checkpoint(model, ByteTokenizer(), fingerprint(model))
    t = model.config.segment
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(f"sqlite:///{folder}/sessions.db")
        own = identity(checkpoint)
        with Engine(checkpoint, EngineConfig(lanes=args.lanes, queue=256, threads=args.threads), store) as engine:
            tails = []
            for base in range(BASES):
                store.create(LOCAL, f"base-{base}", Settings(own.model, own.tokenizer, t))
                prompt = [7] * (2 * t + base * t // BASES)
                engine.submit(Request(prompt=prompt, tokens=1, session=f"base-{base}", text=False)).result()
                tails.append(len(store.get(LOCAL, f"base-{base}").tail))
            arrivals = with_tails(arrivals, tails)
            for number, arrival in enumerate(arrivals):
                store.fork(LOCAL, f"base-{arrival.session % BASES}", f"run-{number}")

            async def ask(arrival: Arrival, session: str) -> AsyncIterator[int]:
                request = Request(prompt=[9] * arrival.prompt, tokens=arrival.output, session=session, text=False)
                async for event in engine.submit(request):
                    yield len(event.ids)

            seen = asyncio.run(drive(arrivals, ask))
        store.close()
    return seen, arrivals


def through_http(args: argparse.Namespace, figures: Figures, arrivals: list[Arrival]) -> tuple[Seen, list[Arrival]]:
    """`pmi serve` on this machine."""
    import httpx

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "serving.cli", "serve", "--checkpoint", str(args.checkpoint), "--port", str(port),
            "--store", f"sqlite:///{folder}/sessions.db", "--replicas", str(args.replicas),
            "--set", f"engine.lanes={args.lanes}", "--set", f"engine.threads={args.threads}", "--set", "http.coalesce=0",
        ]  # fmt: skip
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        url, t = f"http://127.0.0.1:{port}/v1", figures.segment
        try:
            _wait(f"http://127.0.0.1:{port}/health", server)
            with httpx.Client(base_url=url, timeout=120) as client:
                tails = []
                for base in range(BASES):
                    client.post("/sessions", json={"id": f"base-{base}"}).raise_for_status()
                    ids = [7] * (2 * t + base * t // BASES)
                    client.post(f"/sessions/base-{base}/append", json={"ids": ids}).raise_for_status()
                    position = client.get(f"/sessions/base-{base}").raise_for_status().json()["position"]
                    tails.append((position - 1) % t + 1)
                arrivals = with_tails(arrivals, tails)
                for number in range(LONE):
                    client.post("/sessions/base-0/fork", json={"id": f"lone-{number}"}).raise_for_status()
                for number, arrival in enumerate(arrivals):
                    fork = {"id": f"run-{number}"}
                    client.post(f"/sessions/base-{arrival.session % BASES}/fork", json=fork).raise_for_status()

            async def all_() -> Seen:
                limits = httpx.Limits(max_connections=None)
                async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:

                    async def ask(arrival: Arrival, session: str) -> AsyncIterator[int]:
                        body: dict[str, Any] = {
                            "prompt": [9] * arrival.prompt, "max_tokens": arrival.output, "session_id": session, "stream": True
                        }  # fmt: skip
                        async with client.stream("POST", "/completions", json=body) as answer:
                            if answer.status_code != 200:
                                raise RuntimeError(f"{answer.status_code} {(await answer.aread()).decode()[:200]}")
                            last = None
                            async for line in answer.aiter_lines():
                                if line.startswith("id: "):  # RESPONSE:POSITION; the first event has one token
                                    position = int(line.rpartition(":")[2])
                                    yield 1 if last is None else position - last
                                    last = position
                                elif line.startswith("data: {"):
                                    event = json.loads(line[6:])
                                    if "error" in event:
                                        raise RuntimeError(str(event["error"]))

                    lone = [Arrival(4.0 * number, 0, 10, 4, tails[0]) for number in range(LONE)]
                    alone = await drive([replace(arrival, at=arrival.at / 10) for arrival in lone], ask, "lone")
                    expected = simulate(figures, Cluster(1, overhead=0.0), lone)
                    seen = await drive(arrivals, ask)
                    seen.overhead = max(0.0, statistics.median(alone.first) - statistics.median(expected.first_token))
                    return seen

            return asyncio.run(all_()), arrivals
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(60)


def _wait(url: str, server: "subprocess.Popen[bytes]") -> None:
    import httpx

    deadline = time.monotonic() + 180
    while time.monotonic() < deadline and server.poll() is None:
        try:
            if httpx.get(url, timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.5)
    raise SystemExit("`pmi serve` did not start")


def mean(figures: list[Figures]) -> Figures:
    """Of figures measured at different times."""
    seconds = {name: statistics.mean(getattr(x, name) for x in figures) for name in ("read_call", "read_token")}
    steps = {lanes: statistics.mean(x.step[lanes] for x in figures) for lanes in figures[0].step}
    opens = {lanes: [second for x in figures for second in x.open[lanes]] for lanes in figures[0].open}
    return figures[0].model_copy(update={**seconds, "step": steps, "open": opens})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--checkpoint", type=Path, help="a model folder, for --service; its figures are measured by --preset")
    parser.add_argument("--service", action="store_true", help="through HTTP instead of an engine in this process")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--lanes", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--share", type=float, default=0.5, help="of the capacity")
    parser.add_argument("--prompt", type=float, default=20)
    parser.add_argument("--output", type=float, default=40)
    args = parser.parse_args()
    console = Console()
    if args.service and args.checkpoint is None:
        parser.error("--service needs --checkpoint")
    config = from_pretrained(args.checkpoint).model.config if args.checkpoint else load_model_config(args.preset, ["dropout=0"])
    before = measure(args.preset, config, args.lanes, args.threads)
    most = capacity(before, Load(1, args.prompt, args.output, turns=1e9), args.lanes) * (args.replicas if args.service else 1)
    load = Load(args.share * most, args.prompt, args.output, turns=1e9)
    planned = load.arrivals(args.seconds, before.segment, random.Random(0))
    console.print(f"{len(planned)} turns in {args.seconds:g} s: {args.share:.0%} of {most:.3g} turns/s")
    run: Callable[[argparse.Namespace, Figures, list[Arrival]], tuple[Seen, list[Arrival]]]
    run = through_http if args.service else in_process
    seen, arrivals = run(args, before, planned)
    figures = mean([before, measure(args.preset, config, args.lanes, args.threads)])
    cluster = Cluster(args.replicas if args.service else 1, args.lanes, queue=256, overhead=seen.overhead)
    found = simulate(figures, cluster, arrivals)
    rows = {
        "first token p50": (found.first_token_at(0.5), statistics.median(seen.first)),
        "first token p95": (found.first_token_at(0.95), quantile([(x, 1) for x in seen.first], 0.95)),
        "between tokens p50": (found.gap_at(0.5), quantile(seen.gaps, 0.5)),
        "tokens per second": (found.tokens / found.seconds, seen.tokens / seen.seconds),
    }
    kind = "service" if args.service else "engine"
    table = Table("", "simulated", "measured", "simulated / measured", title=f"{args.preset}, {kind}")
    for name, (simulated, measured) in rows.items():
        table.add_row(name, f"{simulated:.4g}", f"{measured:.4g}", f"{simulated / measured:.2f}")
    console.print(table)
    within = all(abs(simulated / measured - 1) <= 0.2 for simulated, measured in rows.values())
    console.print(f"{'within' if within else 'NOT within'} 20 %; {seen.failed} requests failed, {found.refused} would be refused")
    if args.service:
        console.print(f"HTTP and Ray add {1000 * seen.overhead:.0f} ms to a lone request (measured, and put into the simulation)")
    result = {k: {"simulated": s, "measured": m, "ratio": s / m} for k, (s, m) in rows.items()}
    save(
        f"plan_check_{args.preset}_{kind}",
        {"protocol": vars(args) | {"checkpoint": None}, "figures": figures.model_dump(), "within": within, "rows": result},
    )


if __name__ == "__main__":
    main()
