"""Is the simulation behind `pmi plan` right? The same arrivals, simulated and for real, side by side.

    python -m benchmarks.plan --preset tiny --seconds 30                              an engine in this process
    python -m benchmarks.plan --preset tiny --seconds 30 --service --checkpoint DIR   `pmi serve`, through HTTP

Figures are measured before and after the runs and averaged, for the machine may drift; by how much they differ is printed too.
Each load is a share (`--share`) of the capacity that they give. Real requests resume sessions with tails of all lengths, as the
simulated ones do. Reported: p50 and p95 of the time to the first token, p50 of the time between tokens, and tokens per second,
each as simulated over measured, with the standard error of what was measured (from resampling); the target is within 20 %.
"""

import argparse
import asyncio
import itertools
import json
import os
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

import psutil
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
from serving.planning.figures import Figures, pieces
from serving.planning.measure import BASES, lane_counts, measure
from serving.planning.plan import capacity
from serving.planning.simulate import Arrival, Cluster, Load, quantile, simulate
from serving.sessions.opening import open_store
from serving.sessions.store import LOCAL, Settings

LONE = 12
"""Requests that come one by one before the run, to tell what HTTP and Ray add."""
LONG = 16_000
"""Tokens of a stream that is to last: as many as the service allows."""
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


@dataclass(frozen=True)
class Run:
    """A load, and what came of it."""

    share: float
    arrivals: list[Arrival]
    seen: Seen
    others: float
    """Cores that other processes kept busy meanwhile."""


def with_tails(arrivals: list[Arrival], tails: list[int]) -> list[Arrival]:
    """The same arrivals, each resuming a session forked from base `session % BASES`."""
    return [replace(arrival, tail=tails[arrival.session % BASES]) for arrival in arrivals]


def in_process(args: argparse.Namespace, figures: Figures, loads: list[tuple[float, list[Arrival]]]) -> list[Run]:
    """An engine of this process with sessions in SQLite."""
    torch.manual_seed(0)
    model = draw_zeros(PMI(load_model_config(args.preset, ["dropout=0"]))).eval()
    checkpoint = Checkpoint(model, ByteTokenizer(), fingerprint(model))
    t, runs = model.config.segment, []
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(f"sqlite:///{folder}/sessions.db")
        own = checkpoint.identity
        with Engine(checkpoint, EngineConfig(lanes=args.lanes, queue=256, threads=args.threads), store) as engine:
            tails = []
            for base in range(BASES):
                store.create(LOCAL, f"base-{base}", Settings(own.model, own.tokenizer, t))
                prompt = [7] * (2 * t + base * t // BASES)
                engine.submit(Request(prompt=prompt, tokens=1, session=f"base-{base}", text=False)).result()
                tails.append(len(store.get(LOCAL, f"base-{base}").tail))

            async def ask(arrival: Arrival, session: str) -> AsyncIterator[int]:
                request = Request(prompt=[9] * arrival.prompt, tokens=arrival.output, session=session, text=False)
                async for event in engine.submit(request):
                    yield len(event.ids)

            for run, (share, planned) in enumerate(loads):
                arrivals = with_tails(planned, tails)
                for number, arrival in enumerate(arrivals):
                    store.fork(LOCAL, f"base-{arrival.session % BASES}", f"run-{run}-{number}")
                others = Others()
                seen = asyncio.run(drive(arrivals, ask, f"run-{run}"))
                runs.append(Run(share, arrivals, seen, others.cores()))
        store.close()
    return runs


class Service:
    """`pmi serve` on this machine, and a client of it."""

    def __init__(self, args: argparse.Namespace, segment: int) -> None:
        import httpx

        self.segment, self.tails, self._names = segment, [0] * BASES, itertools.count()
        self._folder = tempfile.TemporaryDirectory()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [
            sys.executable, "-m", "serving.cli", "serve", "--checkpoint", str(args.checkpoint), "--port", str(port),
            "--store", f"sqlite:///{self._folder.name}/sessions.db", "--replicas", str(args.replicas),
            "--set", f"engine.lanes={args.lanes}", "--set", f"engine.threads={args.threads}", "--set", "http.coalesce=0",
        ]  # fmt: skip
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        self.url = f"http://127.0.0.1:{port}/v1"
        _wait(f"http://127.0.0.1:{port}/health", self._process)
        self._client = httpx.Client(base_url=self.url, timeout=120)
        for base in range(BASES):
            self._post("/sessions", id=f"base-{base}")
            self._post(f"/sessions/base-{base}/append", ids=[7] * (2 * segment + base * segment // BASES))
            position = self._client.get(f"/sessions/base-{base}").raise_for_status().json()["position"]
            self.tails[base] = (position - 1) % segment + 1

    def _post(self, path: str, **body: Any) -> None:
        self._client.post(path, json=body).raise_for_status()

    def fork(self, base: int, name: str | None = None) -> str:
        """A session of its own."""
        name = name or f"session-{next(self._names)}"
        self._post(f"/sessions/base-{base % BASES}/fork", id=name)
        return name

    async def ask(self, client: Any, prompt: int, tokens: int, session: str) -> AsyncIterator[int]:
        """Sends one request; yields the number of tokens that came."""
        body: dict[str, Any] = {"prompt": [9] * prompt, "max_tokens": tokens, "session_id": session, "stream": True}
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

    def close(self) -> None:
        """End it."""
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(60)
        self._folder.cleanup()


async def calibrated(service: Service, client: Any, figures: Figures, lanes: int) -> Figures:
    """Figures with the steps and the stalls that clients of the service see: its own work shares the engine's interpreter."""
    steps, stalls, tokens = {}, {}, 0

    async def stream(session: str, counted: bool) -> None:
        nonlocal tokens
        async for new in service.ask(client, 1, LONG, session):
            tokens += new if counted else 0

    for count in lane_counts(lanes - 1):
        names, sessions = ([service.fork(number) for number in range(many)] for many in (count, 2 * BASES))
        tasks = [asyncio.create_task(stream(name, number == 0)) for number, name in enumerate(names)]
        await asyncio.sleep(2.0)
        before, began = tokens, time.perf_counter()
        await asyncio.sleep(3.0)
        steps[count] = (time.perf_counter() - began) / (tokens - before)
        before, began = tokens, time.perf_counter()
        for session in sessions:
            await asyncio.sleep(random.random() * 0.05)
            async for _ in service.ask(client, 1, 2, session):
                pass
        reading = 2 * sum(figures.read_seconds(piece) for tail in service.tails for piece in pieces(tail + 1, figures.segment))
        lost = time.perf_counter() - began - (tokens - before) * steps[count] - reading
        stalls[count] = max(0.0, lost / len(sessions))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0.5)
    return figures.model_copy(update={"step": steps, "stall": stalls})


def through_http(
    args: argparse.Namespace, figures: Figures, plan: Callable[[Figures], list[tuple[float, list[Arrival]]]]
) -> tuple[Figures, float, list[Run]]:
    """`pmi serve` on this machine: its figures, seconds that it adds to a lone request, and runs."""
    import httpx

    service, runs = Service(args, figures.segment), []

    async def all_() -> tuple[Figures, float]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=service.url, timeout=300, limits=limits) as client:

            async def ask(arrival: Arrival, session: str) -> AsyncIterator[int]:
                async for count in service.ask(client, arrival.prompt, arrival.output, session):
                    yield count

            own = await calibrated(service, client, figures, args.lanes)
            lone = [Arrival(0.4 * number, number, 10, 4, service.tails[number % BASES]) for number in range(LONE)]
            for number in range(LONE):
                service.fork(number, f"lone-{number}")
            alone = await drive(lone, ask, "lone")
            expected = simulate(own, Cluster(1, overhead=0.0), lone)
            overhead = max(0.0, statistics.median(alone.first) - statistics.median(expected.first_token))
            for run, (share, planned) in enumerate(plan(own)):
                arrivals = with_tails(planned, service.tails)
                for number, arrival in enumerate(arrivals):
                    service.fork(arrival.session, f"run-{run}-{number}")
                others = Others()
                seen = await drive(arrivals, ask, f"run-{run}")
                runs.append(Run(share, arrivals, seen, others.cores()))
            return own, overhead

    try:
        own, overhead = asyncio.run(all_())
    finally:
        service.close()
    return own, overhead, runs


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
    first = figures[0]
    on_average = {
        name: {key: statistics.mean(getattr(x, name)[key] for x in figures) for key in getattr(first, name)}
        for name in ("step", "read", "stall")
    }
    together = {
        name: {key: [second for x in figures for second in getattr(x, name).get(key, [])] for key in getattr(first, name)}
        for name in ("open", "commit")
    }
    return first.model_copy(update={**on_average, **together})


def drift(before: Figures, after: Figures) -> dict[str, float]:
    """After over before, of what decides most: far from 1, something else used the machine, and the runs tell little."""
    opened = [[(x, 1) for times in figures.open.values() for x in times] for figures in (before, after)]
    ratios = {name: quantile(opened[1], share) / quantile(opened[0], share) for name, share in (("p50", 0.5), ("p95", 0.95))}
    steps = statistics.mean(after.step[lanes] / before.step[lanes] for lanes in before.step)
    return {"steps": steps} | {f"opening {name}": ratio for name, ratio in ratios.items()}


def error(values: list[tuple[float, int]], share: float) -> float:
    """Standard error of a measured percentile, from resampling, as a part of it."""
    rng = random.Random(0)
    again = [quantile(rng.choices(values, k=len(values)), share) for _ in range(100)]
    return statistics.stdev(again) / statistics.mean(again)


class Others:
    """Cores that other processes keep busy, this one's children not counted."""

    def __init__(self) -> None:
        self.began = self._now()

    def _now(self) -> tuple[float, float]:
        all_, own = psutil.cpu_times(), os.times()
        return time.monotonic(), sum(all_) - all_.idle - all_.iowait - all_.guest - sum(own[:4])

    def cores(self) -> float:
        """Since the beginning."""
        (then, before), (now, after) = self.began, self._now()
        return (after - before) / (now - then)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--checkpoint", type=Path, help="a model folder, for --service; its figures are measured by --preset")
    parser.add_argument("--service", action="store_true", help="through HTTP instead of an engine in this process")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--lanes", type=int, default=16)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=30, help="of each run")
    parser.add_argument("--share", type=float, nargs="+", default=[0.3, 0.6], help="of the capacity, for one run each")
    parser.add_argument("--prompt", type=float, default=20)
    parser.add_argument("--output", type=float, default=40)
    parser.add_argument("--seed", type=int, default=0, help="of the arrivals")
    parser.add_argument("--rounds", type=int, default=1, help="runs of each share, with a seed each")
    args = parser.parse_args()
    console = Console()
    if args.service and args.checkpoint is None:
        parser.error("--service needs --checkpoint")
    config = from_pretrained(args.checkpoint).model.config if args.checkpoint else load_model_config(args.preset, ["dropout=0"])
    most, overhead, drifted = 0.0, 0.0, dict[str, float]()
    cluster = Cluster(args.replicas if args.service else 1, args.lanes, queue=256)

    def plan(figures: Figures) -> list[tuple[float, list[Arrival]]]:
        """Each load."""
        nonlocal most
        most = capacity(figures, Load(1, args.prompt, args.output, turns=1e9), args.lanes) * (
            args.replicas if args.service else 1
        )
        loads = [(share, Load(share * most, args.prompt, args.output, turns=1e9)) for share in args.share]
        seeds = range(args.seed, args.seed + args.rounds)
        return [(share, x.arrivals(args.seconds, figures.segment, random.Random(seed))) for seed in seeds for share, x in loads]

    figures = measure(args.preset, config, args.lanes, args.threads)
    if args.service:
        figures, overhead, runs = through_http(args, figures, plan)
        console.print(f"HTTP and Ray add {1000 * overhead:.0f} ms to a lone request (measured, and put into the simulation)")
    else:
        runs = in_process(args, figures, plan(figures))
        again = measure(args.preset, config, args.lanes, args.threads)
        drifted = drift(figures, again)
        figures = mean([figures, again])
        console.print(f"figures after over before: {', '.join(f'{name} {ratio:.2f}' for name, ratio in drifted.items())}")
    kind = "service" if args.service else "engine"
    cluster = replace(cluster, overhead=overhead)
    results = [compared(console, f"{args.preset}, {kind}", most, figures, cluster, run) for run in runs]
    save(
        f"plan_check_{args.preset}_{kind}",
        {
            "protocol": vars(args) | {"checkpoint": None},
            "figures": figures.model_dump(exclude={"open", "commit"}),
            "overhead": overhead,
            "drift": drifted,
            "runs": results,
        },
    )


def compared(console: Console, name: str, most: float, figures: Figures, cluster: Cluster, run: Run) -> dict[str, Any]:
    """One run beside its simulation, as a table and as a value."""
    seen, found = run.seen, simulate(figures, cluster, run.arrivals)
    first = [(seconds, 1) for seconds in seen.first]
    rows = {
        "first token p50": (found.first_token_at(0.5), quantile(first, 0.5), error(first, 0.5)),
        "first token p95": (found.first_token_at(0.95), quantile(first, 0.95), error(first, 0.95)),
        "between tokens p50": (found.gap_at(0.5), quantile(seen.gaps, 0.5), error(seen.gaps, 0.5)),
        "tokens per second": (found.tokens / found.seconds, seen.tokens / seen.seconds, 0.0),
    }
    title = f"{name}: {len(run.arrivals)} turns, {run.share:.0%} of {most:.3g} turns/s"
    table = Table("", "simulated", "measured", "its error", "simulated / measured", title=title)
    for row, (simulated, real, part) in rows.items():
        table.add_row(row, f"{simulated:.4g}", f"{real:.4g}", f"{part:.0%}" if part else "", f"{simulated / real:.2f}")
    console.print(table)
    within = all(abs(simulated / real - 1) <= 0.2 for simulated, real, _ in rows.values())
    console.print(
        f"{'within' if within else 'NOT within'} 20 %; {seen.failed} requests failed, {found.refused} would be refused; "
        f"others kept {run.others:.2f} cores busy"
    )
    return {
        "share": run.share, "turns": len(run.arrivals), "within": within, "others": run.others,
        "rows": {k: {"simulated": s, "measured": m, "error": e, "ratio": s / m} for k, (s, m, e) in rows.items()},
    }  # fmt: skip


if __name__ == "__main__":
    main()
