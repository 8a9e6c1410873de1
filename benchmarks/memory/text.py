"""Real text: memory on against memory off and against other people's models, on the same tokens, compared document by document.

    pmi data prepare pg19 --source ... --tokenizer pieces --vocab-size 2048 --out data/pg19-2k
    python -m benchmarks.memory.text --runs runs/memory --seeds 0 1 2 --jobs 2
    python -m benchmarks.memory.text --report            # the table of what is done so far

Every run is `pmi train`, `pmi export` and `pmi eval` (a peer: `benchmarks.memory.peers`), one thread each; what is done stays
done, so the same command goes on where it was ended. Contenders differ in the model only:

on         the configuration
off        the window alone
wide       the window alone, with a feed-forward network that makes it as large as `on`
far        the window alone, with a window that makes its state as large as that of `on`
longer     the window alone, trained for as much processor time as `on` (by the ratio that benchmarks.memory.cost measured)
xl, gpt2, rwkv     see benchmarks.memory.peers

Equal tokens: all but `longer` read the same, in the same order.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.measure import RESULTS, save
from lm.evaluation.compare import outcomes
from lm.evaluation.figures import difference
from lm.evaluation.tally import Outcome

CONTENDERS: dict[str, list[str]] = {
    "on": [],
    "off": ["model.memory=off"],
    "wide": ["model.memory=off", "model.feedforward={feedforward}"],
    "far": ["model.memory=off", "model.window={window}"],
    "longer": ["model.memory=off"],
}
PEERS = ("xl", "gpt2", "rwkv")
MODES = ("reset", "shuffled")
console = Console()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/memory"))
    parser.add_argument("--config", type=Path, default=Path("configs/train/pg19-memory.yaml"))
    parser.add_argument("--data", type=Path, default=Path("data/pg19-2k"))
    parser.add_argument("--split", default="test")
    parser.add_argument("--contenders", nargs="+", choices=[*CONTENDERS, *PEERS], default=[*CONTENDERS, *PEERS])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--feedforward", type=int, default=601, help="of `wide`")
    parser.add_argument("--window", type=int, default=136, help="of `far`")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side, one thread each")
    parser.add_argument("--report", action="store_true", help="only the table of what is done")
    args = parser.parse_args()
    if not args.report:
        wanted = [(name, seed) for seed in args.seeds for name in args.contenders]
        with ThreadPoolExecutor(args.jobs) as pool:
            list(pool.map(lambda one: run(args, *one), wanted))
    report(args)


def folder(args: argparse.Namespace, name: str, seed: int) -> Path:
    return args.runs / f"{args.data.name}-{args.steps}" / f"{name}-{seed}"


def run(args: argparse.Namespace, name: str, seed: int) -> None:
    """Train, export, evaluate; each is left alone where it is done."""
    out = folder(args, name, seed)
    if name in PEERS:
        if not (out / "outcomes.json").exists():
            command(out, "benchmarks.memory.peers", "--peer", name, "--config", args.config, "--data", args.data,
                    "--split", args.split, "--seed", seed, "--steps", args.steps, "--out", out)  # fmt: skip
    else:
        steps = round(args.steps / speed()) if name == "longer" else args.steps
        changes = [f"data={args.data}", f"seed={seed}", f"training.steps={steps}", f"evaluation.interval={steps}"]
        changes += [change.format(feedforward=args.feedforward, window=args.window) for change in CONTENDERS[name]]
        sets = [part for change in changes for part in ("--set", change)]
        if not (out / "model" / "config.json").exists():
            command(out, "lm", "train", "--config", args.config, *sets, "--out", out)
            command(out, "lm", "export", out, "--out", out / "model")
        if not (out / "eval" / "result.json").exists():
            memory = ",".join(("on", *MODES)) if name == "on" else "on"
            command(out, "lm", "eval", "--checkpoint", out / "model", "--data", args.data, "--split", args.split,
                    "--memory", memory, "--out", out / "eval")  # fmt: skip
    console.print(f"{out}: done")


def speed() -> float:
    """Tokens/s of `on` over those of `off`, as benchmarks.memory.cost measured it."""
    path = RESULTS / "memory_cost_pg19-memory.json"
    if not path.is_file():
        sys.exit("`longer` needs the ratio of speeds: run `python -m benchmarks.memory.cost --preset pg19-memory` first")
    return float(json.loads(path.read_text())["ratio"]["median"])


def command(out: Path, module: str, *words: object) -> None:
    out.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (out.parent / f"{out.name}.log").open("ab") as log:
        done = subprocess.run(
            [sys.executable, "-m", module, *map(str, words)], stdout=log, stderr=subprocess.STDOUT, env=environment, check=False
        )
    if done.returncode:
        sys.exit(f"{module} {' '.join(map(str, words))} failed: see {log.name}")


def found(args: argparse.Namespace, name: str, seed: int, mode: str = "on") -> list[Outcome] | None:
    """The documents of a run that is done."""
    out = folder(args, name, seed)
    if name in PEERS:
        path = out / "outcomes.json"
        return [Outcome.from_row(row) for row in json.loads(path.read_text())["outcomes"]] if path.exists() else None
    return outcomes(out / "eval", mode) if (out / "eval" / "result.json").exists() else None


def report(args: argparse.Namespace) -> None:
    """What is done, contender by contender: every seed's loss, and its difference to `off` document by document."""
    table = Table("contender", "parameters", "nats per token, by seed", "against off (95 %, documents in pairs)")
    rows: list[dict[str, Any]] = []
    for name in (*CONTENDERS, *PEERS):
        for mode in ("on", *MODES) if name == "on" else ("on",):
            read = {seed: found(args, name, seed, mode) for seed in args.seeds}
            done = {seed: documents for seed, documents in read.items() if documents is not None}
            if not done:
                continue
            gaps = {}
            for seed, documents in done.items():
                reference = found(args, "off", seed)
                if reference is not None and name != "off":
                    gaps[seed] = gap(documents, reference)
            values = {seed: loss(documents) for seed, documents in done.items()}
            label = name if mode == "on" else f"on, memory {mode}"
            size = parameters(args, name, min(done))
            row = {"contender": label, "parameters": size, "nats_per_token": values, "against_off": gaps}
            if mode != "on":
                row["against_on"] = {s: gap(d, here) for s, d in done.items() if (here := found(args, name, s)) is not None}
            rows.append(row)
            shown = "; ".join(f"{x['nats_per_token']:+.4f} ({x['low']:+.4f} to {x['high']:+.4f})" for x in gaps.values())
            table.add_row(label, f"{size:,}", ", ".join(f"{x:.4f}" for x in values.values()), shown)
    console.print(table)
    about = {"data": args.data.name, "split": args.split, "steps": args.steps, "rows": rows}
    save(f"memory_text_{args.data.name}_{args.steps}", about)


def parameters(args: argparse.Namespace, name: str, seed: int) -> int:
    """Of a run's model."""
    out = folder(args, name, seed)
    if name in PEERS:
        return int(json.loads((out / "outcomes.json").read_text())["parameters"])
    return int(json.loads((out / "eval" / "result.json").read_text())["parameters"])


def loss(documents: Sequence[Outcome]) -> float:
    """Nats per token."""
    return sum(x.nats for x in documents) / sum(x.tokens for x in documents)


def gap(documents: Sequence[Outcome], reference: Sequence[Outcome]) -> dict[str, float]:
    """How much worse, with its interval."""
    measured = difference(documents, reference)
    return {"nats_per_token": measured.nats_per_token, "low": measured.low, "high": measured.high}


if __name__ == "__main__":
    main()
