"""Evaluation against the model's own forward pass, and two Ray workers against one. `make bench-evaluation`

    python -m benchmarks.evaluation --preset small            # bars: 0.9 of forward-only, 1.7 with two workers
    python -m benchmarks.evaluation --preset tiny --part workers --worker-tokens 400000

Forward-only: the same model on calls of about as many tokens, hidden features and summed loss, nothing else: no documents, no
float64, no bookkeeping; in one lane for one document (a carried stream cannot be batched), in many lanes for many.
Contenders in turns in one process; the workers' runs alternate too, behind a first one that starts them. Beside them two bare
processes over one, each running forward-only: what the machine itself gives.
"""

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.measure import in_turns, ratio, save
from lm import machine
from lm.config import ModelConfig, load_model_config
from lm.data.tokenizer import ByteTokenizer
from lm.evaluation.corpus import Corpus, InMemory, Item
from lm.evaluation.job import Job, Options
from lm.evaluation.stream import CALL_TOKENS, Watch, evaluate
from lm.model import PMI
from lm.model.pretrained import Checkpoint
from lm.model.proofs import draw_zeros

TEXT = Path(__file__).parent.parent / "lm/data/text/moby-dick.txt"
BAR, BAR_WORKERS = 0.9, 1.7


def documents(count: int, tokens: int) -> list[Item]:
    """The bundled text in so many documents, of lengths that differ by up to a factor of three."""
    text = np.frombuffer(TEXT.read_bytes(), np.uint8)
    sizes = np.linspace(0.5, 1.5, count) * tokens / count if count > 1 else np.array([tokens])
    ends = np.cumsum(sizes).astype(int)
    pieces = [text[a:b] for a, b in zip([0, *ends[:-1]], ends, strict=True)]
    return [Item(i, str(i), len(piece), 1, len(piece), InMemory(piece)) for i, piece in enumerate(pieces)]


@torch.inference_mode()
def forward_only(model: PMI, tokens: int, lanes: int, segments: int) -> None:
    """As many tokens through the model as fast as it goes."""
    state = model.initial_state(lanes)
    generator = torch.Generator().manual_seed(0)
    call = torch.randint(0, 256, (lanes, segments * model.config.segment), generator=generator)
    for _ in range(max(1, tokens // call.numel())):
        hidden, state = model(call, state)
        model.head.loss(hidden, call)


def contenders(model: PMI, tokens: int) -> tuple[dict[str, Callable[[], None]], dict[str, int]]:
    """What is timed, and the tokens that each reads."""
    t = model.config.segment
    lanes = max(1, CALL_TOKENS // t)
    shapes = {"forward-only, one lane": (1, max(1, CALL_TOKENS // t)), f"forward-only, {lanes} lanes": (lanes, 1)}
    timed: dict[str, Callable[[], None]] = {}
    read: dict[str, int] = {}
    for name, (b, k) in shapes.items():
        timed[name] = lambda b=b, k=k: forward_only(model, tokens, b, k)  # type: ignore[misc]
        read[name] = max(1, tokens // (b * k * t)) * b * k * t
    for name, items in {"one document": documents(1, tokens), "48 documents": documents(48, tokens)}.items():
        timed[f"evaluation, {name}"] = lambda items=items: evaluate(model, items, "on", 256, Watch())  # type: ignore[misc]
        read[f"evaluation, {name}"] = sum(item.length for item in items)
    return timed, read


def bare(config: ModelConfig, calls: int, begin: Connection) -> None:
    """A process of its own that runs forward-only whenever it is told to."""
    machine.keep_pages()
    torch.set_num_threads(1)
    model = PMI(config).eval()
    lanes = max(1, CALL_TOKENS // config.segment)
    while (share := begin.recv()) is not None:
        forward_only(model, calls * lanes * config.segment // share, lanes, 1)
        begin.send(None)


def bare_processes(config: ModelConfig, tokens: int, rounds: int) -> list[float]:
    """Speed of two bare processes over one, round by round."""
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(2)]
    started = [context.Process(target=bare, args=(config, tokens // CALL_TOKENS, there), daemon=True) for _, there in pipes]
    for process in started:
        process.start()

    def seconds(count: int) -> float:
        began = time.perf_counter()
        for here, _ in pipes[:count]:
            here.send(count)
        for here, _ in pipes[:count]:
            here.recv()
        return time.perf_counter() - began

    seconds(2)
    found = [seconds(1) / seconds(2) for _ in range(rounds)]
    for here, _ in pipes:
        here.send(None)
    return found


def workers(model: PMI, tokens: int, rounds: int) -> list[float]:
    """Speed of two Ray workers over one, round by round; workers are warm, and each pass does the same work."""
    from lm.evaluation.cluster import Cluster

    checkpoint, items = Checkpoint(model, ByteTokenizer(), "benchmark"), documents(48, tokens)
    corpus = Corpus("benchmark", items, "", checkpoint.tokenizer, "", [], 0, [])
    one, two = Cluster("local", workers=1), Cluster("local", workers=2)
    found = []
    for number in range(-1, rounds):
        seconds = {}
        for name, cluster in (("one", one), ("two", two)):
            job = Job(checkpoint, corpus, Options(["on"]))
            began = time.perf_counter()
            cluster(job, job.model, job.passes[0], Watch(), [], set())
            seconds[name] = time.perf_counter() - began
        if number >= 0:
            found.append(seconds["one"] / seconds["two"])
    one.close()
    return found


def over_forward(model: PMI, args: argparse.Namespace) -> dict[str, Any]:
    """Evaluation over forward-only, printed as a table."""
    timed, read = contenders(model, args.tokens)
    seconds = in_turns(timed, args.rounds, warmup=1)
    per_token = {name: [x / read[name] for x in taken] for name, taken in seconds.items()}
    one, many = (name for name in timed if name.startswith("forward"))
    over = {one: one, many: many, "evaluation, one document": one, "evaluation, 48 documents": many}
    table = Table("", "tokens/s", "over", "ratio", "bar", title=f"{args.preset}, 1 thread, calls of about {CALL_TOKENS:,} tokens")
    ratios = {name: ratio(per_token[name], per_token[over[name]]) for name in timed}
    for name in timed:
        speed = 1 / statistics.median(per_token[name])
        table.add_row(name, f"{speed:,.0f}", over[name], str(ratios[name]), f">= {BAR}" if name.startswith("evaluation") else "")
    Console().print(table)
    return {"tokens": args.tokens, "over": over, "per_token_seconds": per_token, "ratios": ratios}


def spread(gains: list[float]) -> str:
    """Median, least and most."""
    return f"{statistics.median(gains):.2f} ({min(gains):.2f}-{max(gains):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="small")
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--part", choices=["all", "forward", "workers"], default="all")
    parser.add_argument("--worker-tokens", type=int, default=400_000, help="tokens of the 48 documents that workers share")
    args = parser.parse_args()
    machine.keep_pages()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = draw_zeros(PMI(load_model_config(args.preset, ["vocab_size=257", "cutoffs=[]", "dropout=0"]))).eval()
    found: dict[str, Any] = {"protocol": f"float32, 1 thread each, {args.rounds} rounds in turns"}
    if args.part != "workers":
        found |= over_forward(model, args)
    if args.part != "forward":
        found |= {
            "worker_tokens": args.worker_tokens,
            "two_workers": workers(model, args.worker_tokens, args.rounds),
            "two_bare_processes": bare_processes(model.config, args.worker_tokens // 2, args.rounds),
        }
        told = {name: spread(found[name]) for name in ("two_workers", "two_bare_processes")}
        Console().print(
            f"{args.preset}, two over one, 48 documents of {args.worker_tokens:,} tokens: Ray workers {told['two_workers']}, "
            f"bar >= {BAR_WORKERS}; bare processes {told['two_bare_processes']}", soft_wrap=True,
        )  # fmt: skip
    save(f"evaluation_{args.preset}" + ("" if args.part == "all" else f"_{args.part}"), found)


if __name__ == "__main__":
    main()
