"""The service: tokens per second and time to the first token through HTTP, against the engine in this process; and a long load.

    make bench-serving
    python -m benchmarks.serving --part load --minutes 10

speed   N streams of sessions that all start at once, greedy, to the end, and one more that comes after a third of their time:
        through `pmi serve` with one engine replica, and through an engine in this process over a SQLite store of its own with as
        many threads; in turns, as ratios of the same round. Time to the first token is the median over the streams that start at
        once (row 1: of a stream alone), and by itself that of the late one, which is what a client of a busy service sees.
        Processor time is that of all processes (the service's, and the client's part), per token: it says what the network and
        the other processes cost, also where the machine is busy. The client reads raw sockets in one event loop, so that it costs
        little; it runs on the same cores
load    64 streaming sessions on 2 replicas; every now and then a replica is killed with kill -9. Every stream is resumed until it
        is complete. Afterwards two things are checked. What a client was sent, turn by turn, is what the session's history
        holds, to the token. And that history is read by the model alone, in one go: each token that was generated must be the
        likeliest there, or its logit within NEAR of it. Not always the likeliest: rounding hangs on a batch's size, a memory
        carried over thousands of tokens lets it grow, and among millions of tokens some have a runner-up that near; those are
        counted as ties. As a control the second check is made once more, on each session's first turn without one of its tokens:
        it prints how many of those it saw. Not all: a text that repeats itself reads the same without a token
"""

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import tempfile
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.measure import ratio, save
from lm.config import load_model_config
from lm.data.tokenizer import ByteTokenizer
from lm.generation.sampling import Sampling
from lm.machine import free_port
from lm.model import PMI
from lm.model.pretrained import Checkpoint, fingerprint, save_pretrained
from lm.model.proofs import draw_zeros
from serving.engine import Engine, EngineConfig, Request
from serving.sessions.opening import open_store
from serving.sessions.store import LOCAL, Settings
from tests.serving.api.cluster import Cluster

NEAR = 0.25
"""How far below the largest logit the token that was chosen may lie; the control says how many lost tokens that shows."""
MEMORY_EVERY = 10.0
"""Seconds between looks at the memory that the service's processes have for themselves, while both engines are there."""
GREEDY = Sampling(temperature=0)
PROMPT = "The whale and the sea, "
console = Console(width=160)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="small")
    parser.add_argument("--part", choices=["speed", "load"], default="speed")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1, help="of torch, in the engine of either side")
    parser.add_argument("--throughput", action="store_true", help="Ray's throughput mode with HAProxy")
    parser.add_argument("--minutes", type=float, default=1.0)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    model = draw_zeros(PMI(load_model_config(args.preset, ["dropout=0"]))).eval()
    checkpoint = Checkpoint(model, ByteTokenizer(), fingerprint(model))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_pretrained(model, checkpoint.tokenizer, folder / "bench")
        changes = ["engine.lanes=80", "engine.queue=64", f"engine.threads={args.threads}", f"http.throughput={args.throughput}"]
        changes += ["scaling.replicas=1"] if args.part == "speed" else []
        cluster = Cluster(folder, folder / "bench", free_port(), *(part for change in changes for part in ("--set", change)))
        try:
            console.print(f"serving after {cluster.start():.0f} s")
            if args.part == "speed":
                asyncio.run(speed(cluster, checkpoint, folder, args))
            else:
                found = asyncio.run(load(cluster, checkpoint, max(args.streams), args.tokens, 60 * args.minutes))
                console.print({key: value for key, value in found.items() if key != "megabytes"})
                save("serving_load", found)
        finally:
            cluster.kill()


# --- a client that costs little ------------------------------------------------------------------------------------


async def call(url: str, method: str, path: str, body: dict | None = None, headers: dict[str, str] | None = None):
    """Pieces of the answer's body as they arrive, with its status first."""
    target = urlsplit(url)
    data = b"" if body is None else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1", f"Host: {target.netloc}", "Connection: close", f"Content-Length: {len(data)}"]
    lines += ["Content-Type: application/json", *(f"{key}: {value}" for key, value in (headers or {}).items())]
    reader, writer = await asyncio.open_connection(target.hostname, target.port)
    try:
        writer.write("\r\n".join([*lines, "", ""]).encode() + data)
        head = await reader.readuntil(b"\r\n\r\n")
        yield head.split()[1]
        while piece := await reader.read(1 << 16):
            yield piece
    finally:
        writer.close()


async def make(url: str, id: str, **settings: bool) -> None:
    answer = [piece async for piece in call(url, "POST", "/v1/sessions", {"id": id} | settings)]
    assert answer[0] == b"201", answer


async def stream(url: str, id: str, tokens: int) -> float:
    """One turn of a session, streamed; seconds to its first token."""
    body = {"prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "session_id": id, "stream": True}
    began, first, last = time.perf_counter(), 0.0, b""
    async for piece in call(url, "POST", "/v1/completions", body):
        if not first and b"data: " in piece:
            first = time.perf_counter() - began
        last = last[-64:] + piece
    assert b"[DONE]" in last, last
    return first


# --- speed ---------------------------------------------------------------------------------------------------------


async def speed(cluster: Cluster, checkpoint: Checkpoint, folder: Path, args: argparse.Namespace) -> None:
    store = open_store(f"sqlite:///{folder}/own.db")
    mine = checkpoint.identity
    settings = Settings(mine.model, mine.tokenizer, checkpoint.model.config.segment)
    ids = checkpoint.tokenizer.encode(PROMPT)
    number = 0
    table = Table(
        "streams", "engine tok/s", "service tok/s", "ratio (quartiles)", "first token: engine ms", "service ms",
        "over (quartiles)", "over, of the late one", "processor ms per token: engine", "service",
    )  # fmt: skip
    rows = []

    def worked() -> float:
        """Processor seconds so far: of this process, and of all of the service's."""
        return time.process_time() + sum(sum(times[:2]) for times in cluster.times())

    with Engine(checkpoint, EngineConfig(lanes=80), store) as engine:

        async def own(id: str) -> float:
            began, first = time.perf_counter(), 0.0
            async for event in engine.submit(Request(ids, args.tokens, GREEDY, session=id)):
                first = first or (time.perf_counter() - began if event.ids else 0.0)
            return first

        for streams in args.streams:
            total = (streams + 1) * args.tokens
            seconds: dict[str, list[float]] = {"engine": [], "service": []}
            firsts: dict[str, list[float]] = {"engine": [], "service": []}
            late: dict[str, list[float]] = {"engine": [], "service": []}
            middle = {"engine": 0.0, "service": 0.0}
            work: dict[str, list[float]] = {"engine": [], "service": []}
            for round_ in range(-1, args.rounds):
                number += 1
                names = [f"b{number}-{i}" for i in range(streams + 1)]
                for name in names:
                    store.create(LOCAL, name, settings)
                    await make(cluster.url, name)
                order = ["engine", "service"] if round_ % 2 else ["service", "engine"]
                for who in order:
                    before = worked() if who == "service" else time.process_time()
                    began = time.perf_counter()
                    calls = [own(n) if who == "engine" else stream(cluster.url, n, args.tokens) for n in names]
                    *found, last = await asyncio.gather(*calls[:-1], after(middle[who], calls[-1]))
                    took = time.perf_counter() - began
                    middle[who] = took / 3
                    used = (worked() if who == "service" else time.process_time()) - before
                    if round_ >= 0:
                        seconds[who].append(took)
                        firsts[who].append(1000 * statistics.median(found))
                        late[who].append(1000 * last)
                        work[who].append(1000 * used / total)
            found_ratio = ratio(seconds["service"], seconds["engine"])
            over, over_late = milliseconds_over(firsts), milliseconds_over(late)
            rate = {who: total / statistics.median(values) for who, values in seconds.items()}
            first = {who: statistics.median(values) for who, values in firsts.items()}
            cost = {who: statistics.median(values) for who, values in work.items()}
            row = {"streams": streams, "ratio": found_ratio, "tokens_per_second": rate, "first_token_ms": first}
            row |= {"first_token_over_ms": over, "late_first_token_over_ms": over_late}
            rows.append(row | {"processor_ms_per_token": cost})
            table.add_row(
                str(streams), f"{rate['engine']:.0f}", f"{rate['service']:.0f}", str(found_ratio), f"{first['engine']:.0f}",
                f"{first['service']:.0f}", *("{1:+.0f} ({0:+.0f} to {2:+.0f})".format(*x) for x in (over, over_late)),
                f"{cost['engine']:.2f}", f"{cost['service']:.2f}",
            )  # fmt: skip
    store.close()
    console.print(table)
    mode = "throughput" if args.throughput else "default"
    about = {"preset": args.preset, "tokens": args.tokens, "rounds": args.rounds, "threads": args.threads, "mode": mode}
    save(f"serving_{args.preset}_{args.threads}_{mode}", about | {"rows": rows})


async def after(seconds: float, call: Awaitable[float]) -> float:
    """What the call gives, begun so much later."""
    await asyncio.sleep(seconds)
    return await call


def milliseconds_over(found: dict[str, list[float]]) -> list[float]:
    """How much longer it took through the service: quartiles over the rounds."""
    over = [b - a for a, b in zip(found["engine"], found["service"], strict=True)]
    return statistics.quantiles(over, n=4, method="inclusive")


# --- load ----------------------------------------------------------------------------------------------------------


async def load(
    cluster: Cluster, checkpoint: Checkpoint, sessions: int, tokens: int, seconds: float, pause: tuple[float, float] = (10, 30)
) -> dict[str, Any]:
    """Turns of so many tokens in so many sessions, a replica killed after every pause; what was counted (see above)."""
    end = time.monotonic() + seconds
    counts: dict[str, float] = {
        "turns": 0,
        "resumed": 0,
        "refused": 0,
        "kills": 0,
        "tokens": 0,
        "wrong_turns": 0,
        "wrong_tokens": 0,
        "ties": 0,
        "furthest_below": 0.0,
    }
    control: list[float] = []
    megabytes: list[float] = []
    texts: dict[str, list[str]] = {f"l{i}": [] for i in range(sessions)}

    async def turn(id: str, prompt: str) -> str:
        text, last, done = "", "", False
        while not done:
            body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "session_id": id, "stream": True}
            headers = {"Idempotency-Key": f"{id}-{len(texts[id])}"}
            path = f"/v1/streams/{last.rpartition(':')[0]}" if last else "/v1/completions"
            buffer, status = b"", b""
            try:
                parts = call(cluster.url, "GET", path, None, {"Last-Event-ID": last}) if last else call(
                    cluster.url, "POST", path, body, headers
                )  # fmt: skip
                async for piece in parts:
                    if not status:
                        status = piece
                        continue
                    buffer += piece
                    *events, buffer = buffer.split(b"\n\n")
                    for event in events:
                        fields = dict(
                            line.split(": ", 1) for line in event.decode().split("\n") if ": " in line and line[0] in "id"
                        )
                        data = fields.get("data", "")
                        if not data.startswith("{"):
                            continue
                        value = json.loads(data)
                        if "error" in value or not value["choices"]:
                            continue
                        text, last = text + value["choices"][0]["text"], fields["id"]
                        done = done or value["choices"][0]["finish_reason"] is not None
            except (OSError, asyncio.IncompleteReadError):
                pass
            if not done:
                counts["resumed" if last else "refused"] += 1
                await asyncio.sleep(0.5)
        return text

    async def session(id: str, number: int) -> None:
        await make(cluster.url, id, keep_history=True)
        while time.monotonic() < end:
            text = await turn(id, f"{PROMPT}{number} ")
            texts[id].append(text)
            counts["turns"] += 1
            counts["tokens"] += tokens

    async def killer() -> None:
        while time.monotonic() < end - 10:
            await asyncio.sleep(random.uniform(*pause))
            engines = await asyncio.to_thread(cluster.engines)
            if len(engines) == 2 and time.monotonic() < end - 5:
                random.choice(engines).kill()
                counts["kills"] += 1

    async def watch() -> None:
        while time.monotonic() < end:
            await asyncio.sleep(MEMORY_EVERY)
            if len(await asyncio.to_thread(cluster.engines)) == 2:
                megabytes.append(await asyncio.to_thread(memory))

    def memory() -> float:
        total = 0
        for process in cluster.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                total += process.memory_full_info().uss
        return total / 2**20

    await asyncio.gather(killer(), watch(), *(session(f"l{i}", i) for i in range(sessions)))
    with contextlib.closing(open_store(f"sqlite:///{cluster.folder}/sessions.db")) as store:
        for number, (id, found) in enumerate(track(texts.items(), "comparing with the model alone", console=console)):
            prompt = checkpoint.tokenizer.encode(f"{PROMPT}{number} ")
            history = torch.tensor(store.history(LOCAL, id))
            turns = history[1:].view(len(found), len(prompt) + tokens)
            assert turns[:, : len(prompt)].tolist() == [prompt] * len(found), f"{id}: a prompt is not as it was sent"
            kept = [checkpoint.tokenizer.decode(ids) for ids in turns[:, len(prompt) :].tolist()]
            for turn_, (mine, sent) in enumerate(zip(kept, found, strict=True)):
                if mine != sent:
                    counts["wrong_turns"] += 1
                    console.print(f"{id}, turn {turn_}: sent {sent!r}, kept {mine!r}", markup=False)
            below = shortfalls(checkpoint, history)[len(prompt) :]
            below = torch.cat([below, below.new_zeros(len(prompt))]).view(len(found), -1)[:, :tokens]
            counts["ties"] += int(((below > 0) & (below <= NEAR)).sum())
            counts["wrong_tokens"] += int((below > NEAR).sum())
            counts["furthest_below"] = max(counts["furthest_below"], float(below.max()))
            lost = 1 + len(prompt) + random.randrange(tokens // 2)  # in the first turn, with half of it behind
            without = torch.cat([history[:lost], history[lost + 1 : len(prompt) + tokens]])
            control.append(float(shortfalls(checkpoint, without)[lost - 1 :].max()))
    counts |= {"control": len(control), "control_seen": sum(value > NEAR for value in control)}
    half = len(megabytes) // 2
    if half:  # most: a replica that was just started has less
        counts |= {"mb_most_first_half": max(megabytes[:half]), "mb_most_second_half": max(megabytes[half:])}
    return counts | {"sessions": sessions, "seconds": seconds, "megabytes": megabytes}


def shortfalls(checkpoint: Checkpoint, history: torch.Tensor) -> torch.Tensor:
    """By how much the logit of each id but the first lies below the largest one where it was chosen."""
    with torch.inference_mode():
        state, found, at = checkpoint.model.initial_state(1), [], 0
        for piece in history[None, :-1].split(16 * checkpoint.model.config.segment, dim=1):
            hidden, state = checkpoint.model(piece, state)
            logits = checkpoint.model.head.logits(hidden[0])
            logits[:, checkpoint.tokenizer.bos] = -torch.inf
            targets = history[at + 1 : at + 1 + piece.shape[1]]
            found.append(logits.max(-1).values - logits.gather(1, targets[:, None])[:, 0])
            at += piece.shape[1]
    return torch.cat(found)


if __name__ == "__main__":
    main()
