"""The commands `pmi train`, `pmi export` and `pmi plot`."""

import os
from pathlib import Path
from typing import Annotated

import typer

from lm.commands import Commands, Device, stderr, stdout
from lm.errors import UserError, collecting, noting

Run = Annotated[Path, typer.Argument(help="A run's folder (the --out of `pmi train`).")]


def mount(app: Commands) -> None:
    """Add the commands to `app`."""
    app.command(
        epilog="Example: pmi train --config configs/train/enwik8-small.yaml --out runs/x --set training.lr=3e-4     "
        "(on two processes: deepspeed --num_accelerators 2 --module lm train ..., or torchrun --nproc_per_node 2 -m lm train ...)"
    )(train)
    app.command(epilog="Example: pmi export runs/x --out runs/x/model")(export)
    app.command(epilog="Example: pmi plot runs/on runs/off --out curves.png")(plot)


def train(
    config: Annotated[Path, typer.Option(help="The experiment, a YAML file as in configs/train/.")],
    out: Annotated[Path, typer.Option(help="The run's folder. Where it has a checkpoint, the run goes on from it.")],
    set_: Annotated[
        list[str], typer.Option("--set", metavar="KEY=VALUE", help="Change a key, e.g. training.lr=3e-4 or model.memory=off.")
    ] = [],  # noqa: B006
    resume: Annotated[bool, typer.Option("--resume", help="Insist on a checkpoint to go on from.")] = False,
    init_from: Annotated[Path | None, typer.Option(help="Start from an exported model's weights (fine-tuning).")] = None,
    metrics_port: Annotated[
        int | None, typer.Option(help="Serve Prometheus metrics of the first process on this port.", min=1, max=65535)
    ] = None,
    device: Device = "auto",
) -> None:
    """Train a model, on one process or under a launcher; run the same command again to go on."""
    from lm.config import load_run_config
    from lm.model.pretrained import resolve_device
    from lm.training.backends import load_deepspeed
    from lm.training.trainer import Trainer
    from lm.training.world import World

    with collecting() as problems:  # complain before processes wait for each other
        with noting(problems):
            target = resolve_device(device)
        with noting(problems):
            settings = load_run_config(config, set_)
            if settings.training.backend == "deepspeed":
                load_deepspeed(settings.training.deepspeed)
    if settings.training.weight_decay >= 0.2 and os.environ.get("RANK", "0") == "0":
        stderr.print(
            f"warning: training.weight_decay {settings.training.weight_decay} is the paper's or near it; "
            "with AdamW, values near 0.1 are usual",
            markup=False,
        )
    world = World(settings.training.backend == "deepspeed", settings.training.timeout, target)
    trainer = None
    try:
        trainer = Trainer(settings, out, world, stdout, resume=resume, init_from=init_from, metrics_port=metrics_port)
        outcome = trainer.run()
    except UserError as error:
        raise UserError(f"rank {world.rank}: {problem}" if world.rank else problem for problem in error.problems) from error
    except RuntimeError as error:
        if world.size == 1 or not _is_lost_peer(error):
            raise
        where = f"behind step {trainer.step}" if trainer else "while starting"
        stderr.print(
            f"rank {world.rank}: another process was lost {where} ({str(error).splitlines()[0]}). "
            "Start all processes again with the same command: the run goes on from its newest whole checkpoint",
            markup=False,
            soft_wrap=True,
        )
        stderr.file.flush()
        os._exit(1)  # the process group cannot be left in order any more
    finally:
        if trainer is not None:
            trainer.close()
    world.close()
    if outcome.signal:
        if world.first:
            stderr.print(f"stopped behind step {outcome.step}, saved. To go on, run the same command again", soft_wrap=True)
        raise typer.Exit(128 + outcome.signal)


def export(
    run: Run,
    out: Annotated[Path, typer.Option(help="The model folder to write.")],
    step: Annotated[int | None, typer.Option(help="Which checkpoint (default: the newest whole one).", min=1)] = None,
    best: Annotated[bool, typer.Option("--best", help="The checkpoint with the best validation.")] = False,
) -> None:
    """Write the model of a run's checkpoint as a folder that every other command reads."""
    from lm.training.export import export_model

    folder, fingerprint = export_model(run, out, step, best)
    stdout.print(f"{folder} -> {out} ({fingerprint})", markup=False, highlight=False, soft_wrap=True)


def plot(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs to compare.")],
    out: Annotated[Path, typer.Option(help="The PNG to write.")] = Path("curves.png"),
    smooth: Annotated[int, typer.Option(help="Steps that a point of the training curve is the mean of.", min=1)] = 20,
) -> None:
    """Draw the curves of runs: training and validation, by step and by tokens."""
    from lm.training.plot import draw

    draw(runs, out, smooth)
    stdout.print(f"wrote {out}", markup=False, highlight=False)


def _is_lost_peer(error: RuntimeError) -> bool:
    from torch.distributed import DistError

    text = str(error).lower()
    return isinstance(error, DistError) or any(word in text for word in ("gloo", "nccl", "connection", "timed out", "peer"))
