"""Real text: memory on against memory off and against other people's models, on the same tokens, compared document by document.

    pmi data prepare pg19 --source ... --tokenizer pieces --vocab-size 2048 --out data/pg19-2k
    python -m benchmarks.memory.text --runs runs/memory --seeds 0 1 2 --jobs 2
    python -m benchmarks.memory.text --report            # the table of what is done so far
    python -m benchmarks.memory.text --report --plot docs/images/memory-pg19.png     # and loss by position, as a picture

Every run is `pmi train`, `pmi export` and `pmi eval` (a peer: `benchmarks.memory.peers`), one thread each; what is done stays
done, so the same command goes on where it was ended, and what came to its end is kept, document by document, in
benchmarks/results/memory_text/: the table is made from that, and no run is made twice. Contenders differ in the model only:

on         the configuration
off        the window alone
wide       the window alone, with a feed-forward network that makes it as large as `on`
far        the window alone, with a window that makes its state as large as that of `on` (in float32)
longer     the window alone, trained for as much processor time as `on` (by the ratio that benchmarks.memory.cost measured)
reset      the model of `on`, its memory reset at each segment when it is evaluated
shuffled   the model of `on`, reading the memory that the next book had
xl, gpt2, rwkv     see benchmarks.memory.peers

Equal tokens: all but `longer` read the same, in the same order.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.measure import RESULTS, save
from lm.config import load_run_config
from lm.data.prepared import open_prepared
from lm.evaluation.compare import outcomes
from lm.evaluation.figures import by_position, difference
from lm.evaluation.report import centres
from lm.evaluation.tally import Outcome
from lm.model import PMI
from lm.model.pretrained import from_pretrained
from lm.model.snapshot import sizes
from lm.training.trainer import checked_model

CONTENDERS: dict[str, list[str]] = {
    "on": [],
    "off": ["model.memory=off"],
    "wide": ["model.memory=off", "model.feedforward={feedforward}"],
    "far": ["model.memory=off", "model.window={window}"],
    "longer": ["model.memory=off"],
}
MODES = ("reset", "shuffled")
PEERS = ("xl", "gpt2", "rwkv")
ALL = (*CONTENDERS, *MODES, *PEERS)
LEAST_TOKENS = 1_000
"""Of a point in the picture: at the very first tokens a mean says little."""
IDENTITY = "identity.json"
OUTCOMES = RESULTS / "memory_text"
console = Console()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/memory"))
    parser.add_argument("--config", type=Path, default=Path("configs/train/pg19-memory.yaml"))
    parser.add_argument("--data", type=Path, default=Path("data/pg19-2k"))
    parser.add_argument("--split", default="test")
    parser.add_argument("--contenders", nargs="+", choices=ALL, default=ALL)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="that evaluations compute in")
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side, one thread each")
    parser.add_argument("--report", action="store_true", help="only the table of what is done")
    parser.add_argument("--plot", type=Path, help="draw loss by position in the document, over what is done")
    args = parser.parse_args()
    if not args.report:
        wanted = [(name, seed) for seed in args.seeds for name in args.contenders]
        with ThreadPoolExecutor(args.jobs) as pool:
            list(pool.map(lambda one: run(args, *one), wanted))
    report(args)
    if args.plot is not None:
        plot(args)


def experiment(args: argparse.Namespace) -> str:
    return f"{args.data.name}-{args.steps}"


def kept(args: argparse.Namespace, name: str, seed: int) -> Path:
    """Where the outcome of a run is kept."""
    return OUTCOMES / experiment(args) / f"{name}-{seed}.json"


def settings(args: argparse.Namespace, name: str, seed: int) -> list[str]:
    """What a contender changes in the configuration."""
    if name in (*MODES, *PEERS):
        name = "on" if name in MODES else "off"
    steps = args.steps
    if name == "longer":
        run = load_run_config(args.config, [f"data={args.data}"])
        steps = round(steps / speed(run.model, run.training.precision))
    changes = [f"data={args.data}", f"seed={seed}", f"training.steps={steps}", f"evaluation.interval={steps}"]
    feedforward, window = matched(args) if name in ("wide", "far") else (0, 0)
    return changes + [change.format(feedforward=feedforward, window=window) for change in CONTENDERS[name]]


def matched(args: argparse.Namespace) -> tuple[int, int]:
    """The feed-forward width and the window with which the window alone is as large as the model with memory, or its state."""
    config = checked_model(load_run_config(args.config, [f"data={args.data}"]), open_prepared(args.data))
    models = [PMI(config), PMI(config.model_copy(update={"memory": None}))]
    on, off = (sum(x.numel() for x in model.parameters()) for model in models)
    memory, window = sizes(models[0])
    feedforward = config.feedforward + round((on - off) / (2 * config.width * config.layers))
    return feedforward, config.window + round(config.window * memory / window)


def training(args: argparse.Namespace, name: str, seed: int) -> dict[str, str]:
    """What a run folder is trained on: the prepared data, and the configuration (keys at their defaults left out)."""
    prepared, run = open_prepared(args.data), load_run_config(args.config, settings(args, name, seed))
    config = run.model_dump(mode="json", exclude_defaults=True, exclude={"data", "overrides"})
    config["model"] = checked_model(run, prepared).model_dump(mode="json", exclude_defaults=True)
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:16]
    return {"data": prepared.fingerprint, "configuration": digest}


def identity(args: argparse.Namespace, name: str, seed: int) -> dict[str, str]:
    """What a kept outcome is of: whose, what it was trained on, and how it was read."""
    return {"contender": name, **training(args, name, seed), "split": args.split, "dtype": args.dtype}


def claim(path: Path, wanted: dict[str, str], had: dict[str, Any] | None = None) -> None:
    """End with a message where `path` (or what was read of it) is of something else; a new file says what its folder is of."""
    if had is None and path.exists():
        had = json.loads(path.read_text())
    if had is None and path.parent.exists() and any(path.parent.iterdir()):
        sys.exit(f"{path.parent} does not say what it is of: remove it, or name another folder with --runs")
    if other := [f"{key} {had.get(key)}, now {value}" for key, value in wanted.items() if had and had.get(key) != value]:
        sys.exit(f"{path} is of {'; '.join(other)}: take the data and configuration it was made with, or remove it")
    if had is None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(wanted) + "\n")


def run(args: argparse.Namespace, name: str, seed: int) -> None:
    """Train, export, evaluate, keep the outcome; each is left alone where it is done."""
    path, of = kept(args, name, seed), identity(args, name, seed)
    if path.exists():
        claim(path, of)
        return
    out = args.runs / experiment(args) / f"{name}-{seed}"
    if name in PEERS:
        claim(out / IDENTITY, of)
        if not (out / "outcomes.json").exists():
            command(out, "benchmarks.memory.peers", "--peer", name, "--config", args.config, "--data", args.data,
                    "--split", args.split, "--seed", seed, "--steps", args.steps, "--dtype", args.dtype,
                    "--out", out)  # fmt: skip
        about = json.loads((out / "outcomes.json").read_text())
        parameters, documents = about["parameters"], [Outcome.from_row(row) for row in about["outcomes"]]
    else:
        model = trained(args, "on" if name in MODES else name, seed)
        mode = name if name in MODES else "on"
        if not (out / "eval" / "result.json").exists():
            command(out, "lm", "eval", "--checkpoint", model, "--data", args.data, "--split", args.split,
                    "--memory", mode, "--dtype", args.dtype, "--out", out / "eval")  # fmt: skip
        parameters = sum(x.numel() for x in from_pretrained(model).model.parameters())
        documents = outcomes(out / "eval", mode)
    keep(path, of, parameters, documents)
    console.print(f"{out}: done")


def trained(args: argparse.Namespace, name: str, seed: int) -> Path:
    """The folder of a contender's model, which is trained where it is not there yet."""
    out = args.runs / experiment(args) / f"{name}-{seed}"
    claim(out / IDENTITY, training(args, name, seed))
    sets = [part for change in settings(args, name, seed) for part in ("--set", change)]
    if not (out / "model" / "config.json").exists():
        command(out, "lm", "train", "--config", args.config, *sets, "--out", out)
        command(out, "lm", "export", out, "--out", out / "model")
    return out / "model"


def keep(path: Path, of: dict[str, str], parameters: int, documents: Sequence[Outcome]) -> None:
    """Write a run's outcome and what it is of; blocks only where there is one document, whose interval is drawn from them."""
    rows = [asdict(x if len(documents) == 1 else replace(x, blocks=[])) for x in documents]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**of, "parameters": parameters, "outcomes": rows}, separators=(",", ":")) + "\n")


def speed(preset: str, precision: str) -> float:
    """Tokens/s of `on` over those of `off`, as benchmarks.memory.cost measured it."""
    path = RESULTS / f"memory_cost_{preset}_{precision}.json"
    if not path.is_file():
        wanted = f"python -m benchmarks.memory.cost --preset {preset} --precision {precision}"
        sys.exit(f"`longer` needs the ratio of speeds: run `{wanted}` first")
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


def found(args: argparse.Namespace, name: str, seed: int) -> list[Outcome] | None:
    """The documents of a run that is done; those of another configuration are refused, where the data are at hand to tell."""
    path = kept(args, name, seed)
    if not path.exists():
        return None
    about = json.loads(path.read_text())
    if args.data.exists():
        claim(path, identity(args, name, seed), about)
    return [Outcome.from_row(row) for row in about["outcomes"]]


def report(args: argparse.Namespace) -> None:
    """What is done, contender by contender: every seed's loss, and its difference to `off` document by document."""
    table = Table("contender", "parameters", "nats per token, by seed", "against off (95 %, documents in pairs)", "against on")
    rows: list[dict[str, Any]] = []
    for name in ALL:
        read = {seed: found(args, name, seed) for seed in args.seeds}
        done = {seed: documents for seed, documents in read.items() if documents is not None}
        if not done:
            continue
        gaps: dict[str, dict[int, dict[str, float]]] = {"off": {}, "on": {}}
        for seed, documents in done.items():
            for other in gaps:
                reference = found(args, other, seed)
                if reference is not None and name != other:
                    gaps[other][seed] = gap(documents, reference)
        values = {seed: loss(documents) for seed, documents in done.items()}
        size = int(json.loads(kept(args, name, min(done)).read_text())["parameters"])
        row = {"contender": name, "parameters": size, "nats_per_token": values}
        rows.append(row | {"against_off": gaps["off"], "against_on": gaps["on"]})
        shown = (
            "; ".join(f"{x['nats_per_token']:+.4f} ({x['low']:+.4f} to {x['high']:+.4f})" for x in found_.values())
            for found_ in gaps.values()
        )
        table.add_row(name, f"{size:,}", ", ".join(f"{x:.4f}" for x in values.values()), *shown)
    if not rows:
        sys.exit(f"{OUTCOMES / experiment(args)}: nothing is done yet")
    console.print(table)
    about = {"data": args.data.name, "split": args.split, "steps": args.steps, "rows": rows}
    save(f"memory_text_{args.data.name}_{args.steps}", about)


def plot(args: argparse.Namespace) -> None:
    """Loss by position in the document, all seeds together, and how far each contender is from `off`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    bins, beside = {}, {}
    for name in ALL:
        seeds = [seed for seed in args.seeds if kept(args, name, seed).exists()]
        if seeds:
            bins[name] = _positions(args, name, seeds)
            beside[name] = _positions(args, "off", [seed for seed in seeds if kept(args, "off", seed).exists()])
    figure, (above, below) = pyplot.subplots(2, 1, figsize=(9, 8), sharex=True, height_ratios=[3, 2])
    for number, (name, own) in enumerate(bins.items()):
        style = {
            "marker": "o",
            "markersize": 3,
            "color": f"C{number}",
            "label": name,
            "linestyle": "--" if name in PEERS else "-",
        }
        above.plot(centres(own), [bin_["nats_per_token"] for bin_ in own], **style)
        off = {bin_["first"]: bin_["nats_per_token"] for bin_ in beside[name]}  # of the same seeds
        shared = [bin_ for bin_ in own if bin_["first"] in off]
        below.plot(centres(shared), [bin_["nats_per_token"] - off[bin_["first"]] for bin_ in shared], **style)
    for axis in (above, below):
        axis.set_xscale("log")
        axis.grid(alpha=0.3)
    above.legend(fontsize=8, ncols=2)
    above.set_ylabel("nats per token")
    above.set_title(
        f"{args.data.name}, {args.split}: {args.steps} steps, mean over what is done of {len(args.seeds)} seeds", fontsize=10
    )
    below.set_ylabel("above the window alone (`off`)")
    below.set_xlabel("position in the document (tokens)")
    figure.tight_layout()
    args.plot.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.plot, dpi=110)
    pyplot.close(figure)
    console.print(f"wrote {args.plot}")


def _positions(args: argparse.Namespace, name: str, seeds: list[int]) -> list[dict[str, float]]:
    outcomes = [outcome for seed in seeds for outcome in found(args, name, seed) or []]
    return [bin_ for bin_ in by_position(outcomes) if bin_["tokens"] >= LEAST_TOKENS]


def loss(documents: Sequence[Outcome]) -> float:
    """Nats per token."""
    return sum(x.nats for x in documents) / sum(x.tokens for x in documents)


def gap(documents: Sequence[Outcome], reference: Sequence[Outcome]) -> dict[str, float]:
    """How much worse, with its interval."""
    measured = difference(documents, reference)
    return {"nats_per_token": measured.nats_per_token, "low": measured.low, "high": measured.high}


if __name__ == "__main__":
    main()
