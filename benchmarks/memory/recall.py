"""Recall of key-value pairs across segments (`pmi recall`): memory on and the window alone, 8 and 32 pairs.

    python -m benchmarks.memory.recall --runs runs/memory/recall --jobs 2

64 keys, 64 values, T = W = 64, one query of each sample, trained at distances of up to 8 segments, asked at up to 64; chance is
1/64. What is done stays done: the same command goes on where it was ended.
"""

import argparse
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.measure import save
from benchmarks.memory.text import command
from lm.config import load_model_config

DISTANCES = "1,8,64"
LEARNED = ["memory.layers=[1]", "memory.fragments=2", "memory.delta.key_width=64", "memory.delta.value_width=64"]
LEARNED += ["memory.delta.gates=hard"]
MEMORY = [*LEARNED, "memory.verbatim.contexts=[1,2,3]"]
"""The memory of configs/model/pg19-memory.yaml, in the last layer; and what of it must learn its keys."""
SETUPS: dict[str, list[str]] = {
    "8 pairs": ["--pairs", "8"],
    "8 pairs, no verbatim tables": ["--pairs", "8"],
    "8 pairs, window alone": ["--pairs", "8", "--memory", "off"],
    "32 pairs": ["--pairs", "32", "--steps", "600"],
    "32 pairs, no verbatim tables": ["--pairs", "32", "--steps", "600"],
    "32 pairs, window alone": ["--pairs", "32", "--memory", "off", "--steps", "600"],
}
console = Console()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/memory/recall"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side, one thread each")
    args = parser.parse_args()
    wanted = [(name, seed) for seed in args.seeds for name in SETUPS]
    with ThreadPoolExecutor(args.jobs) as pool:
        found = list(pool.map(lambda one: run(args.runs, *one), wanted))
    table = Table("setup", "seed", *(f"at {distance}" for distance in DISTANCES.split(",")))
    for row in found:
        cells = (f"{p['accuracy']:.3f} ({p['low']:.3f}-{p['high']:.3f})" for p in row["points"])
        table.add_row(row["setup"], str(row["seed"]), *cells)
    console.print(table)
    save("memory_recall", {"distances": DISTANCES, "memory": MEMORY, "without_tables": LEARNED, "rows": found})


def run(runs: Path, name: str, seed: int) -> dict[str, object]:
    """One setup, to its report."""
    out = runs / f"{name.replace(', ', '-').replace(' ', '-')}-{seed}"
    report = out / "report.json"
    memory = ["memory=off"] if "window" in name else LEARNED if "verbatim" in name else MEMORY
    if not report.exists():
        changes = [] if "window" in name else [part for change in memory for part in ("--set", change)]
        command(out, "lm", "recall", *SETUPS[name], *changes, "--distances", DISTANCES, "--seed", seed, "--out", out)
    about = json.loads(report.read_text())
    if about["request"]["model"] != load_model_config("recall", memory).model_dump(mode="json"):
        sys.exit(f"{out} is of another model: remove it, or name another folder with --runs")
    return {"setup": name, "seed": seed, "points": about["results"]}


if __name__ == "__main__":
    main()
