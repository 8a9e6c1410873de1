"""The engine: what batching gives, what the loop and the journal cost, and how soon a resumed session speaks.

    make bench-engine
    python -m benchmarks.engine --part steps --threads 2

steps    seconds per step in the steady state of 32 lanes at spread positions, all streams consumed in an event loop: the bare
         batched model (same lanes, greedy), the engine, and the engine with 32 SQLite sessions; and the engine with one lane.
         All in turns in one process, as ratios of the same round: median (quartiles). A round is one segment of steps, so that
         each lane writes its memory, and its snapshot, once.
resume   time to the first token (on disk) of a session in SQLite with a tail of half a segment, as on average, at growing
         histories, and with a whole segment, as at worst; in turns with GPT-2 of the same size that reads its history of 8,192
         tokens again
bytes    a stored session against a KV cache
compile  a step's feed-forward networks, the part that torch.compile can fuse whole, compiled over as they are
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.measure import Ratio, in_turns, ratio, save
from benchmarks.peers import gpt2
from lm import machine
from lm.config import load_model_config
from lm.data.tokenizer import ByteTokenizer
from lm.generation.sampling import Sampling
from lm.model import PMI, State
from lm.model.decoder import Block
from lm.model.pretrained import Checkpoint, fingerprint
from lm.model.proofs import draw_zeros
from lm.model.snapshot import sizes
from serving.engine import Engine, EngineConfig, Request
from serving.sessions.opening import open_store
from serving.sessions.store import LOCAL, SessionStore, Settings

LANES = 32
GREEDY = Sampling(temperature=0)
HISTORIES = [1_000, 8_192, 65_536]
RESUMED = [1_000, 8_192, 10_000, 1_000_000]
console = Console()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="small")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=600, help="begin no round of a part after so long (two are made)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--part", choices=["steps", "resume", "bytes", "compile"], action="append")
    parser.add_argument("--longest", type=int, default=RESUMED[-1], help="longest history of `resume`")
    args = parser.parse_args()
    machine.keep_pages()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    model = draw_zeros(PMI(load_model_config(args.preset, ["dropout=0"]))).eval()
    checkpoint = Checkpoint(model, ByteTokenizer(), fingerprint(model))
    if args.dtype == "bfloat16":
        model.compute_in(torch.bfloat16)
    parts = args.part or ["steps", "resume", "bytes", "compile"]
    with tempfile.TemporaryDirectory() as folder:
        store = open_store(f"sqlite:///{folder}/sessions.db")
        if "steps" in parts:
            steps(checkpoint, store, args)
        if "resume" in parts:
            resume(checkpoint, store, args)
        if "bytes" in parts:
            compare_bytes(checkpoint, args)
        if "compile" in parts:
            compiled(checkpoint, args)
        store.close()


# --- steps ---------------------------------------------------------------------------------------------------------


def prompts(segment: int) -> list[list[int]]:
    """Prompts that put the lanes at positions spread evenly over a segment."""
    return [torch.randint(0, 256, (segment + i * segment // LANES,)).tolist() for i in range(LANES)]


def bare_state(model: PMI, texts: list[list[int]]) -> State:
    with torch.inference_mode():
        return State.concatenate([model(torch.tensor([[256, *text]]), model.initial_state(1))[1] for text in texts])


def bare(model: PMI, state: State, count: int) -> tuple[tuple[float, float], State]:
    """Seconds per step, and of processor time, of the batched model alone: read a token per lane, take the likeliest."""
    with torch.inference_mode():
        token = torch.zeros(state.lanes, 1, dtype=torch.long)
        began, worked = time.perf_counter(), time.process_time()
        for _ in range(count):
            hidden, state = model(token, state, donate=True)
            token = model.head.logits(hidden[:, -1]).argmax(-1, keepdim=True)
        return ((time.perf_counter() - began) / count, (time.process_time() - worked) / count), state


async def steady(engine: Engine, requests: list[Request], count: int) -> tuple[float, float]:
    """Seconds per step, and of processor time, over `count` steps with all requests decoding."""

    async def consume(request: Request) -> None:
        async for _ in engine.submit(request):
            pass

    tasks = [asyncio.create_task(consume(request)) for request in requests]
    while len(engine._decoding) < len(requests):
        await asyncio.sleep(0.005)
    first, began, worked = engine.counters.steps, time.perf_counter(), time.process_time()
    while engine.counters.steps < first + count:
        await asyncio.sleep(0.02)
    done = engine.counters.steps - first
    seconds = ((time.perf_counter() - began) / done, (time.process_time() - worked) / done)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    while engine.load != (0, 0) or (engine.journal is not None and engine.journal.holds):
        await asyncio.sleep(0.005)
    return seconds


def steps(checkpoint: Checkpoint, store: SessionStore, args: argparse.Namespace) -> None:
    model, segment = checkpoint.model, checkpoint.model.config.segment
    texts = prompts(segment)
    state = bare_state(model, texts)
    names = ["bare", "engine", "engine, SQLite", "engine, 1 lane"]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    work: dict[str, list[float]] = {name: [] for name in names}
    config = EngineConfig(lanes=LANES, threads=args.threads)
    journal: dict[str, float] = {}
    with Engine(checkpoint, config) as plain, Engine(checkpoint, config, store) as durable:
        began = time.monotonic()
        for number in range(-1, args.rounds):
            if number >= 2 and time.monotonic() - began > args.seconds:
                break
            ids = [f"r{number + 1}-{i}" for i in range(LANES)]
            for id_ in ids:
                store.create(LOCAL, id_, settings(checkpoint))
            free = [Request(text, 10**9, GREEDY) for text in texts]
            kept = [Request(text, 10**9, GREEDY, session=id_) for text, id_ in zip(texts, ids, strict=True)]
            taken, state = bare(model, state, segment)
            row = [taken]
            assert durable.journal is not None
            for engine, requests in ((plain, free), (durable, kept), (plain, free[:1])):
                before = (durable.journal.transactions, durable.journal.snapshots, durable.journal.seconds)
                row.append(asyncio.run(steady(engine, requests, segment)))
                if engine is durable and number >= 0:
                    after = (durable.journal.transactions, durable.journal.snapshots, durable.journal.seconds)
                    for name, a, b in zip(("transactions", "snapshots", "seconds"), before, after, strict=True):
                        journal[name] = journal.get(name, 0) + b - a
            for id_ in ids:
                store.delete(LOCAL, id_)
            if number >= 0:
                for name, (elapsed, worked) in zip(names, row, strict=True):
                    seconds[name].append(elapsed)
                    work[name].append(worked)
    bare_, engine_, durable_, single = seconds.values()
    rows: dict[str, tuple[Ratio, str]] = {
        "tokens/s of 32 lanes over 1 lane": (ratio([x / LANES for x in engine_], single), "at least 8"),
        "engine's step over the bare step": (ratio(bare_, engine_), "below 1.10"),
        "step with SQLite over without": (ratio(engine_, durable_), "below 1.05"),
        "32 lanes over 1, processor time": (ratio([x / LANES for x in work["engine"]], work["engine, 1 lane"]), ""),
        "engine over bare, processor time": (ratio(work["bare"], work["engine"]), ""),
        "SQLite over without, processor time": (ratio(work["engine"], work["engine, SQLite"]), ""),
    }
    table = Table(
        "figure",
        "ratio",
        "wanted",
        title=f"{args.preset}, {args.dtype}, {args.threads} threads, {len(engine_)} rounds of {segment} steps",
    )
    for name, (value, wanted) in rows.items():
        table.add_row(name, str(value), wanted)
    console.print(table)
    milliseconds = {name: 1e3 * statistics.median(values) for name, values in seconds.items()}
    console.print({name: f"{value:.2f} ms/step" for name, value in milliseconds.items()}, journal)
    save(f"engine_steps_{args.preset}_{args.threads}_{args.dtype}", {
        "dtype": args.dtype, "preset": args.preset, "threads": args.threads, "lanes": LANES, "rounds": len(engine_),
        "ms_per_step": milliseconds,
        "ratios": {name: value for name, (value, _) in rows.items()}, "journal": journal,
    })  # fmt: skip


def settings(checkpoint: Checkpoint) -> Settings:
    mine = checkpoint.identity
    return Settings(mine.model, mine.tokenizer, checkpoint.model.config.segment)


# --- resuming ------------------------------------------------------------------------------------------------------


def resume(checkpoint: Checkpoint, store: SessionStore, args: argparse.Namespace) -> None:
    model, segment = checkpoint.model, checkpoint.model.config.segment
    cases = {f"{n:,}": n // segment * segment + segment // 2 for n in RESUMED if n <= args.longest}
    cases["8,192, full tail"] = 8_192 // segment * segment
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    work: dict[str, list[float]] = {name: [] for name in cases}
    peer = gpt2(model.config, positions=8_192 + 1).eval()
    again: list[float] = []
    again_work: list[float] = []
    with Engine(checkpoint, EngineConfig(lanes=2, threads=args.threads), store) as engine, torch.inference_mode():
        for number, count in enumerate(cases.values()):  # BOS is the first of so many ids
            store.create(LOCAL, f"h{number}", settings(checkpoint))
            engine.submit(Request(torch.randint(0, 256, (count - 1,)).tolist(), 0, GREEDY, session=f"h{number}")).result()
        started = time.monotonic()
        for turn in range(-2, args.rounds):
            if turn >= 2 and time.monotonic() - started > args.seconds:
                break
            for number, name in enumerate(cases):  # each time from a fork, so that all rounds find the same session
                store.fork(LOCAL, f"h{number}", f"h{number}-{turn + 2}")
                taken, worked = first_token(engine, f"h{number}-{turn + 2}")
                if turn >= 0:
                    seconds[name].append(taken)
                    work[name].append(worked)
            if turn >= 0:
                began, working = time.perf_counter(), time.process_time()
                peer(torch.randint(0, 256, (1, 8_192)), use_cache=True, logits_to_keep=1)
                again.append(time.perf_counter() - began)
                again_work.append(time.process_time() - working)
        stored = [store.get(LOCAL, f"h{number}").bytes for number in range(len(cases))]
    slow = statistics.median(again)
    rounds = len(next(iter(seconds.values())))
    title = f"{args.preset}, {args.threads} threads, {rounds} rounds; GPT-2 reading 8,192: {slow:.2f} s"
    table = Table("history", "first token, ms", "over the shortest", "GPT-2 over it", "in processor time", "bytes", title=title)
    rows: list[dict[str, Any]] = []
    for (name, values), bytes_ in zip(seconds.items(), stored, strict=True):
        taken_, flat = ratio([0.001] * len(values), values), ratio(next(iter(seconds.values())), values)
        over = slow / (taken_.median / 1e3)
        work_over = statistics.median(again_work) / statistics.median(work[name])
        rows.append({
            "history": name, "ms": taken_, "over_shortest": flat, "gpt2_over": over, "gpt2_over_in_processor_time": work_over,
            "stored_bytes": bytes_,
        })  # fmt: skip
        quartiles = f"{taken_.median:.1f} ({taken_.low:.1f}-{taken_.high:.1f})"
        table.add_row(name, quartiles, str(flat), f"{over:.0f}", f"{work_over:.0f}", f"{bytes_:,}")
    console.print(table)
    longest = f"{max(n for n in RESUMED if n <= args.longest):,}"
    flat = ratio(seconds["10,000"], seconds[longest])
    console.print(f"{longest} over 10,000: {flat} in time, {rows[-2]['stored_bytes'] / rows[-3]['stored_bytes']:.4f} in bytes")
    save(f"engine_resume_{args.preset}", {
        "preset": args.preset, "threads": args.threads, "rounds": rounds, "gpt2_seconds": again, "rows": rows,
        "longest_over_10000": flat,
    })  # fmt: skip


def first_token(engine: Engine, name: str) -> tuple[float, float]:
    """Seconds until it is there, and of processor time."""
    began, worked = time.perf_counter(), time.process_time()
    stream = engine.submit(Request([65], 4, GREEDY, session=name))
    stream.waited(60)
    taken = time.perf_counter() - began, time.process_time() - worked
    stream.result()
    return taken


def compare_bytes(checkpoint: Checkpoint, args: argparse.Namespace) -> None:
    config = checkpoint.model.config
    session = sum(sizes(checkpoint.model))
    per_token = 2 * 4 * config.layers * config.width
    table = Table("history", "session, bytes", "KV cache, bytes", "KV cache over session", title=f"{args.preset}, float32")
    rows = []
    for length in HISTORIES:
        cache = per_token * length
        rows.append({"history": length, "session": session, "cache": cache})
        table.add_row(f"{length:,}", f"{session:,}", f"{cache:,}", f"{cache / session:.1f}")
    console.print(table)
    console.print(f"below {session // per_token + 1} tokens the KV cache is smaller")
    save(f"engine_bytes_{args.preset}", {"preset": args.preset, "rows": rows, "equal_at": session / per_token})


def compiled(checkpoint: Checkpoint, args: argparse.Namespace) -> None:
    blocks = cast(Iterable[Block], checkpoint.model.blocks)
    rows = []
    for lanes in (1, LANES):
        x = torch.randn(lanes, 1, checkpoint.model.config.width)
        ways = {
            name: [way(block.feedforward) for block in blocks]
            for name, way in (("eager", lambda f: f), ("compiled", torch.compile))
        }

        def run(networks: list[Callable[[Tensor], Tensor]], x: Tensor = x) -> Callable[[], None]:
            def all_layers() -> None:
                with torch.inference_mode():
                    for _ in range(200):
                        for network in networks:
                            network(x)

            return all_layers

        seconds = in_turns({name: run(networks) for name, networks in ways.items()}, args.rounds)
        rows.append({"lanes": lanes, "compiled_over_eager": ratio(seconds["eager"], seconds["compiled"])})
        console.print(f"{lanes} lanes: compiled feed-forward networks take {rows[-1]['compiled_over_eager']} of the time")
    save(f"engine_compile_{args.preset}", {"preset": args.preset, "threads": args.threads, "rows": rows})


if __name__ == "__main__":
    main()
