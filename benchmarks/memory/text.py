"""Real text: memory on against memory off, trained on the same tokens in the same order, compared book by book.

    pmi data prepare pg19 --source ... --tokenizer pieces --vocab-size 2048 --out data/pg19-2k
    python -m benchmarks.memory.text --runs runs/memory --seeds 0 1 2 --jobs 2

Every run is `pmi train`, `pmi export` and `pmi eval`, one thread each; what is done stays done, so the same command goes on where
it was ended. Contenders differ in the model only:

on         configs/train/pg19-memory.yaml
off        the window alone
wide       the window alone, with a feed-forward network that makes it as large as `on`
far        the window alone, with a window that makes its state as large as that of `on`

Equal tokens: all read the same, in the same order.
"""

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.measure import save
from lm.evaluation.compare import compare, outcomes
from lm.evaluation.figures import difference

CONFIG = "configs/train/pg19-memory.yaml"
CONTENDERS = {
    "on": [],
    "off": ["model.memory=off"],
    "wide": ["model.memory=off", "model.feedforward=674"],
    "far": ["model.memory=off", "model.window=144"],
}
console = Console()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/memory"))
    parser.add_argument("--data", type=Path, default=Path("data/pg19-2k"))
    parser.add_argument("--split", default="test")
    parser.add_argument("--contenders", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side, one thread each")
    args = parser.parse_args()
    wanted = [(name, seed) for seed in args.seeds for name in args.contenders]
    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(lambda one: run(args, *one), wanted))
    report(args)


def folder(args: argparse.Namespace, name: str, seed: int) -> Path:
    return args.runs / f"{args.data.name}-{args.steps}" / f"{name}-{seed}"


def run(args: argparse.Namespace, name: str, seed: int) -> None:
    """Train, export, evaluate; each is left alone where it is done."""
    out = folder(args, name, seed)
    changes = [f"data={args.data}", f"seed={seed}", f"training.steps={args.steps}", f"evaluation.interval={args.steps}"]
    sets = [part for change in [*changes, *CONTENDERS[name]] for part in ("--set", change)]
    if not (out / "model" / "config.json").exists():
        command(out, "train", "--config", CONFIG, *sets, "--out", out)
        command(out, "export", out, "--out", out / "model")
    memory = "on,reset,shuffled" if name == "on" else "on"
    if not (out / "eval" / "result.json").exists():
        command(out, "eval", "--checkpoint", out / "model", "--data", args.data, "--split", args.split,
                "--memory", memory, "--out", out / "eval")  # fmt: skip
    console.print(f"{out}: done")


def command(out: Path, *words: object) -> None:
    out.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (out.parent / f"{out.name}.log").open("ab") as log:
        done = subprocess.run(
            [sys.executable, "-m", "lm", *map(str, words)], stdout=log, stderr=subprocess.STDOUT, env=environment, check=False
        )
    if done.returncode:
        sys.exit(f"{' '.join(map(str, words))} failed: see {log.name}")


def report(args: argparse.Namespace) -> None:
    """What is done, contender by contender: the mean over seeds, and the differences to `off` book by book."""
    table = Table("contender", "seeds", "nats per token, by seed", "against off (95 %, books in pairs)")
    rows = []
    for name in CONTENDERS:
        seeds = [seed for seed in args.seeds if (folder(args, name, seed) / "eval" / "result.json").exists()]
        if not seeds:
            continue
        passes = [json.loads((folder(args, name, seed) / "eval" / "result.json").read_text())["passes"]["on"] for seed in seeds]
        values = [found["nats_per_token"] for found in passes]
        paired = [seed for seed in seeds if (folder(args, "off", seed) / "eval" / "result.json").exists()]
        gaps = [compare(folder(args, name, seed) / "eval", folder(args, "off", seed) / "eval")["difference"] for seed in paired]
        row = {"contender": name, "seeds": seeds, "nats_per_token": values, "against_off": gaps}
        if name == "on":
            for mode in ("reset", "shuffled"):
                row[mode] = [_against_on(folder(args, name, seed) / "eval", mode) for seed in seeds]
        rows.append(row)
        shown = "; ".join(f"{gap['nats_per_token']:+.4f} ({gap['low']:+.4f} to {gap['high']:+.4f})" for gap in gaps)
        table.add_row(name, str(len(seeds)), ", ".join(f"{x:.4f}" for x in values), shown)
    console.print(table)
    about = {"data": args.data.name, "split": args.split, "steps": args.steps, "rows": rows}
    save(f"memory_text_{args.data.name}_{args.steps}", about)


def _against_on(evaluation: Path, mode: str) -> dict[str, object]:
    gap = difference(outcomes(evaluation, mode), outcomes(evaluation, "on"))
    return {"nats_per_token": gap.nats_per_token, "low": gap.low, "high": gap.high}


if __name__ == "__main__":
    main()
