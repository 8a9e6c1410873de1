"""A million tokens in one session: does the loss drift, does the memory grow, does bfloat16 hold?

    python -m benchmarks.memory.stability --checkpoint runs/memory/pg19-2k-1200/on-0/model --data data/pg19-2k

Test books, one behind the other, are read as one session with nothing reset; and again with each book read from a fresh state.
Books differ in how hard they are, so what counts is how much worse each stretch is in the session than in its book alone: flat
is stable. Both in float32, the session in bfloat16 too. The memory's size is the root mean square of its elements.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from benchmarks.measure import save
from lm import machine
from lm.evaluation.corpus import open_corpus
from lm.model import PMI
from lm.model.pretrained import from_pretrained
from lm.model.state import tensors

STRETCHES = 10
CALL = 32
"""Segments of a call."""
console = Console()


@dataclass(frozen=True)
class Reading:
    """What reading the text once came to."""

    nats: np.ndarray
    """Per segment."""
    sizes: np.ndarray
    """Root mean square after each call: of the memories, and of the verbatim tables [calls, 2]."""
    finite: bool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--split", default="test")
    parser.add_argument("--tokens", type=int, default=1_000_000)
    args = parser.parse_args()
    machine.keep_pages()
    torch.set_num_threads(1)
    checkpoint = from_pretrained(args.checkpoint)
    segment = checkpoint.model.config.segment
    tokens, starts = text(args, checkpoint.tokenizer, segment)
    first = torch.zeros_like(starts)
    first[0] = True
    model = checkpoint.model.eval()
    readings = {
        "books alone, float32": read(model, tokens, starts),
        "session, float32": read(model, tokens, first),
        "session, bfloat16": read(model.compute_in(torch.bfloat16), tokens, first),
    }
    rows = [
        {
            "reading": name,
            "nats_per_token": [float(part.mean() / segment) for part in np.array_split(reading.nats, STRETCHES)],
            "memory_rms": [float(part[:, 0].mean()) for part in np.array_split(reading.sizes, STRETCHES)],
            "tables_rms": [float(part[:, 1].mean()) for part in np.array_split(reading.sizes, STRETCHES)],
            "finite": reading.finite,
        }
        for name, reading in readings.items()
    ]
    about = {"tokens": len(tokens) - 1, "books": int(starts.sum()), "rows": rows}
    save("memory_stability", about)
    show(about)


def text(args: argparse.Namespace, tokenizer, segment: int) -> tuple[Tensor, Tensor]:
    """BOS and the tokens of the first books, each cut to whole segments; and the segments that begin a book."""
    parts, starts, wanted = [np.array([tokenizer.bos])], [], args.tokens // segment
    for item in open_corpus(args.data, args.split, tokenizer, None).items:
        count = min(item.length // segment, wanted - len(starts))
        parts.append(item.read(0, count * segment))
        starts += [i == 0 for i in range(count)]
    if len(starts) < wanted:
        raise SystemExit(f"{args.data}: {args.split} has {len(starts) * segment:,} tokens in whole segments, not {args.tokens:,}")
    return torch.from_numpy(np.concatenate(parts).astype(np.int64)), torch.tensor(starts)


@torch.inference_mode()
def read(model: PMI, tokens: Tensor, starts: Tensor) -> Reading:
    """The nats of every segment; where one is marked, a document begins: memory is the initial one, the window empty."""
    segment, bos = model.config.segment, int(tokens[0])
    inputs = tokens[:-1].view(-1, segment).clone()
    inputs[starts, 0] = bos
    targets, state = tokens[1:].view(-1, segment), model.initial_state(1)
    # made before the large blocks that come and go: what stays in between would keep the allocator from using those again
    nats, sizes = np.zeros(len(inputs)), np.zeros((-(-len(inputs) // CALL), 2))
    for at in track(range(0, len(inputs), CALL), "reading", console=console):
        here = slice(at, at + CALL)
        hidden, state = model(inputs[here].reshape(1, -1), state, starts=starts[here][None])
        losses = torch.nn.functional.cross_entropy(
            model.head.logits(hidden[0]).double(), targets[here].flatten(), reduction="none"
        )
        nats[here] = losses.view(-1, segment).sum(1).numpy()
        for level, tree in enumerate((state.memories, state.verbatim)):
            if parts := [x.flatten() for x in tensors(tree) if x.numel()]:
                sizes[at // CALL, level] = float(torch.cat(parts).square().mean().sqrt())
    return Reading(nats, sizes, bool(np.isfinite(nats).all() and np.isfinite(sizes).all()))


def show(about: dict) -> None:
    table = Table("reading", *(f"stretch {i + 1}" for i in range(STRETCHES)), title=f"{about['tokens']:,} tokens, nats per token")
    alone = about["rows"][0]["nats_per_token"]
    for row in about["rows"]:
        table.add_row(row["reading"], *(f"{x:.4f}" for x in row["nats_per_token"]))
    for row in about["rows"][1:]:
        gaps = (f"{x - y:+.4f}" for x, y in zip(row["nats_per_token"], alone, strict=True))
        table.add_row(f"{row['reading']}: above the books alone", *gaps)
        table.add_row(f"{row['reading']}: memory's size", *(f"{x:.3f}" for x in row["memory_rms"]))
        table.add_row(f"{row['reading']}: tables' size", *(f"{x:.3f}" for x in row["tables_rms"]))
    console.print(table)
    console.print("all numbers finite" if all(row["finite"] for row in about["rows"]) else "NOT all numbers are finite")


if __name__ == "__main__":
    main()
