"""How fast data is prepared and read, and what dominates.

python -m benchmarks.data                            # reading, on the bundled text
python -m benchmarks.data --source FOLDER            # and preparing Enwik8 and PG-19 from its enwik8/ and pg19/
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from lm.data.lanes import Lanes
from lm.data.prepare import Request, prepare
from lm.data.prepared import Prepared, open_prepared

BUNDLED = Path(__file__).parents[1] / "lm/data/text/moby-dick.txt"
COPIES = 300
"""Of the bundled text: enough that a map of all of it would be seen in resident memory."""
READING_BAR = 20.0
"""Million tokens per second, one process, batch 16 x 512, from the page cache."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, default=os.environ.get("PMI_TEST_DATA"), help="default: $PMI_TEST_DATA")
    source: Path | None = parser.parse_args().source
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        if source and (source / "enwik8").is_dir():
            prepare_("enwik8", source / "enwik8", work / "enwik8", bar=20)
            reading("Enwik8 (1 document)", work / "enwik8")
        if source and (source / "pg19").is_dir():
            prepare_("pg19", source / "pg19", work / "pg19", bar=240)
            reading("PG-19 (239 documents)", work / "pg19")
        repeated = work / "books"
        (repeated / "train").mkdir(parents=True)
        for copy in range(COPIES):
            shutil.copy(BUNDLED, repeated / "train" / f"{copy:03}.txt")
        prepare(Request("text", work / "text", source=repeated, tokenizer="bytes"))
        reading(f"bundled text x {COPIES} ({COPIES} documents, bytes)", work / "text")
        resident(work / "text")


def prepare_(dataset: str, source: Path, out: Path, bar: float) -> None:
    """Time `pmi data prepare` as the user runs it, step by step."""
    steps: list[tuple[float, str]] = []
    begin = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "lm", "data", "prepare", dataset, "--source", str(source), "--out", str(out)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        word = line.split()[0] if line.split() else ""
        if word in ("reading", "training", "building") or line.startswith("Tokenizing"):
            label = {"Tokenizing": "tokenizing and writing"}.get(word, word)
            if not steps or steps[-1][1] != label:
                steps.append((time.perf_counter(), label))
    if process.wait():
        sys.exit(f"pmi data prepare {dataset} failed")
    end = time.perf_counter()
    print(f"prepare {dataset}: {end - begin:.1f} s (bar: {bar:.0f} s, {(end - begin) / bar:.2f} of it)")
    starts = [begin, *(start for start, _ in steps), end]
    for label, start, stop in zip(["start-up", *(label for _, label in steps)], starts[:-1], starts[1:], strict=True):
        print(f"    {label}: {stop - start:.1f} s, {(stop - start) / (end - begin):.0%}")


def reading(what: str, folder: Path) -> None:
    """Tokens per second of one process, and beside it the least that could be done: copying the same bytes."""
    data = open_prepared(folder)
    print(f"read {what}:")
    for k in (1, 4):
        lanes = Lanes(data, "train", lanes=16, segment=512)
        rate = best_rate(lambda lanes=lanes, k=k: int(lanes.next_batch(k).lengths.sum()))  # type: ignore[misc]
        print(f"    batch 16 x {k} x 512: {rate:,.0f} M tokens/s, {rate / READING_BAR:.1f} of the bar")
    print(f"    numpy slices alone, same shapes: {best_rate(bare(data)):,.0f} M tokens/s")


def bare(data: Prepared) -> Callable[[], int]:
    """16 slices of 512 tokens, copied to int64 twice: no documents, no cursor, no padding."""
    array: Any = np.fromfile(data.folder / data.manifest.splits["train"].shards[0].file, dtype=data.manifest.dtype)
    position = 0

    def step() -> int:
        nonlocal position
        tokens, targets = np.empty((16, 512), np.int64), np.empty((16, 512), np.int64)
        stride = (len(array) - 520) // 16
        for lane in range(16):
            at = lane * stride + position
            tokens[lane] = array[at : at + 512]
            targets[lane] = array[at + 1 : at + 513]
        position = (position + 512) % (stride - 600)
        return tokens.size

    return step


def best_rate(step: Callable[[], int], seconds: float = 1.0, rounds: int = 3) -> float:
    """The best of some rounds (other work on the machine only slows), in million tokens per second."""
    best = 0.0
    for _ in range(rounds):
        begin = time.perf_counter()
        tokens = 0
        while (now := time.perf_counter()) - begin < seconds:
            tokens += step()
        best = max(best, tokens / (now - begin) / 1e6)
    return best


def resident(folder: Path) -> None:
    """How much resident memory grows while a whole corpus is read."""
    status = Path("/proc/self/status")
    if not status.exists():
        return

    def now() -> int:
        return int(status.read_text().split("VmRSS:")[1].split()[0]) // 1024

    data = open_prepared(folder)
    lanes = Lanes(data, "train", lanes=16, segment=512)
    lanes.next_batch()
    before, most = now(), 0
    for _ in range(data.manifest.splits["train"].tokens // (16 * 512)):
        lanes.next_batch()
        most = max(most, now())
    size = data.manifest.splits["train"].tokens * np.dtype(data.manifest.dtype).itemsize >> 20
    print(f"resident memory grew by at most {most - before} MB while {size} MB were read")


if __name__ == "__main__":
    main()
