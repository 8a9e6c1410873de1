"""The commands of `lm` (the console script `pmi` mounts them). Heavy imports stay inside commands: --help is quick."""

import json
import math
import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from lm.commands import Commands, Device, Seed, Set, run, stderr, stdout
from lm.data.cli import app as data_app
from lm.errors import UserError, collecting, noting
from lm.evaluation.cli import mount as mount_evaluation
from lm.evaluation.tasks_cli import mount as mount_tasks
from lm.reasoning.cli import mount as mount_reasoning
from lm.training.cli import mount as mount_training

app = Commands(help="A language model with a real memory: train it, evaluate it, serve it.")
model_app = Commands(help="Look at model configurations.")
app.add_typer(data_app, name="data")
app.add_typer(model_app, name="model")
mount_training(app)
mount_evaluation(app)
mount_tasks(app)
mount_reasoning(app)


def _certify_dtype(name: str) -> str:
    from lm.model import certificate

    if name not in certificate.DTYPES:
        raise UserError(f"--dtype {name!r}: must be one of {sorted(certificate.DTYPES)}")
    return name


def _new_file(path: Path | None) -> Path | None:
    """A file that can be written; said before the work that would be lost."""
    if path is not None and path.is_dir():
        raise UserError(f"--json {path}: is a folder; name a file in it, such as {path / 'certificate.json'}")
    if path is not None and not path.parent.is_dir():
        raise UserError(f"--json {path}: there is no folder {path.parent}; make it first")
    if path is not None and not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UserError(f"--json {path}: may not be written; choose another place")
    return path


def _model_folder(path: Path) -> Path:
    from lm.model.pretrained import check_folder

    check_folder(path)
    return path


@model_app.command(
    "show", epilog="Example: pmi model show small --set memory.layers=all     (presets: configs/model/, or a file's path)"
)
def model_show(
    name: Annotated[str, typer.Argument(help="A preset or the path of a YAML/JSON file.")],
    set_: Set = [],  # noqa: B006
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Parameters per part and bytes of a session's snapshot, beside the paper's figures."""
    from lm.config import load_model_config
    from lm.model.summary import summarise

    summary = summarise(name, load_model_config(name, set_))
    if json_:
        stdout.print_json(json.dumps(summary.row()))
        return
    parts = Table("part", "parameters", title=f"{name}: parameters")
    for part, count in summary.parameters.items():
        parts.add_row(part, f"{count:,}")
    parts.add_section()
    parts.add_row("total", f"{summary.total:,}", style="bold")
    stdout.print(_right(parts))
    snapshot = Table("part", "bytes", title="a session's snapshot (float32)")
    snapshot.add_row("memory", f"{summary.memory_bytes:,}")
    snapshot.add_row("window", f"{summary.window_bytes:,}")
    stdout.print(_right(snapshot))
    for note in summary.notes:
        stdout.print(f"- {note}", markup=False, highlight=False)


@app.command(epilog="Example: pmi certify runs/demo/model --json certificate.json")
def certify(
    checkpoint: Annotated[Path, typer.Argument(help="A model folder.", callback=_model_folder)],
    json_: Annotated[Path | None, typer.Option("--json", help="Also write the figures to this file.", callback=_new_file)] = None,
    dtype: Annotated[
        str, typer.Option(help="float32 or bfloat16: the type the decoder computes in.", callback=_certify_dtype)
    ] = "float32",
    segments: Annotated[int, typer.Option(help="Length of the boundedness stream, in segments.", min=8)] = 200,
    seed: Seed = 0,
    device: Device = "auto",
) -> None:
    """Prove that a checkpoint is causal, resumable and alive.

    Prints each figure beside its bound. Exit code 1 if one fails.
    """
    from lm.model import certificate
    from lm.model.pretrained import from_pretrained, resolve_device

    with collecting() as problems:
        with noting(problems):
            target = resolve_device(device)
        with noting(problems):
            loaded = from_pretrained(checkpoint)
    with stderr.status("loading") as status:
        loaded.model.to(target)
        proofs = certificate.certify(loaded.model, dtype, seed, segments, lambda name: status.update(f"proving: {name}"))
    table = Table("proof", "figure", "bound", "", "", title=f"{checkpoint} ({loaded.fingerprint}, {dtype})")
    for proof in proofs:
        verdict = "[green]ok[/]" if proof.passed else "[red]FAILED[/]"
        table.add_row(
            proof.name,
            "-" if math.isnan(proof.figure) else f"{proof.figure:.3g}",
            f"{proof.relation} {proof.bound:.3g}",
            verdict,
            proof.detail,
        )
    stdout.print(table)
    passed = all(proof.passed for proof in proofs)
    if json_ is not None:
        rows = [proof.row() for proof in proofs]
        result = {"checkpoint": str(checkpoint), "fingerprint": loaded.fingerprint, "dtype": dtype, "seed": seed}
        json_.write_text(json.dumps({**result, "passed": passed, "proofs": rows}, indent=2) + "\n")
    if not passed:
        failed = ", ".join(proof.name for proof in proofs if not proof.passed)
        stderr.print(f"not certified: {failed}", style="red")
        raise typer.Exit(1)


@app.command(epilog="Example: pmi demo --out runs/demo")
def demo(
    out: Annotated[Path, typer.Option(help="Where the run goes; the model is left in OUT/model.")] = Path("runs/demo"),
    steps: Annotated[int | None, typer.Option(help="Training steps (default: configs/train/demo.yaml).", min=1)] = None,
    device: Device = "auto",
) -> None:
    """Train a small model on the bundled text and generate from it.

    Takes about two minutes on 2 cores and leaves the model in OUT/model.
    """
    from lm.model.pretrained import resolve_device
    from lm.training import demo as demonstration

    demonstration.run(out, steps, resolve_device(device), stdout)


def _right(table: Table) -> Table:
    table.columns[1].justify = "right"
    return table


def main() -> None:
    """Entry point of `python -m lm`; the `deepspeed` launcher puts --local_rank=N before the command."""
    sys.exit(run(app, [argument for argument in sys.argv[1:] if not argument.startswith("--local_rank=")]))
