"""Runs trainings one after the other in the same processes, with faults put in where a test asks for them.

    torchrun --nproc_per_node 2 tests/training/ranks.py jobs.json

A job: config (path), set (list), out (path), and optionally
- stop: 8: a signal arrives at the last rank in the step that leads to step 8
- poison: {"step": 3, "rank": 1, "where": "loss" | "gradient", "until": 4}: not finite from a step on, on one rank
- kill: {"step": 4, "at": "weights-1" | "manifest" | "rename" | ..., "rank": 0}: kill -9 at that moment of the save behind a step
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from lm.config import load_run_config
from lm.training import checkpoint
from lm.training.trainer import Trainer
from lm.training.world import World


class PoisonedGradient(torch.autograd.Function):
    """Leaves a value as it is; its gradient is NaN."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * torch.nan


def stop(trainer: Trainer, at: int) -> None:
    """Send this process a SIGTERM in the step that leads to step `at`."""
    one_step = trainer._one_step

    def step() -> int:
        if trainer.step == at - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return one_step()

    trainer._one_step = step


def poison(trainer: Trainer, step: int, rank: int, where: str, until: int) -> None:
    """Make the objective's loss or gradient not finite in steps `step` .. `until` - 1 on one rank."""
    objective = trainer.backend.engine.module if hasattr(trainer.backend, "engine") else trainer.backend.objective
    loss_of = objective.model.head.loss

    def poisoned(*args: Any) -> torch.Tensor:
        loss = loss_of(*args)
        if not (step <= trainer.step < until and trainer.world.rank == rank and objective.training):
            return loss
        return loss * torch.nan if where == "loss" else PoisonedGradient.apply(loss)

    objective.model.head.loss = poisoned


def kill(trainer: Trainer, step: int, rank: int, at: str) -> None:
    """Kill -9 this process at a moment of the save behind `step`."""
    if trainer.world.rank != rank:
        return

    def dying(function: Any, moment: Any, before: bool) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if trainer.step == step and moment(*args) and before:
                os.kill(os.getpid(), signal.SIGKILL)
            result = function(*args, **kwargs)
            if trainer.step == step and moment(*args):
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call

    def half_written(path: Path, tensors: Any) -> Any:
        if trainer.step == step and path.name.startswith(at.removesuffix("-half")):
            path.write_bytes(b"\0" * 100)
            os.kill(os.getpid(), signal.SIGKILL)
        return write(path, tensors)

    write = checkpoint.write_tensors
    if at.endswith("-half"):
        checkpoint.write_tensors = half_written
    elif at == "manifest":
        checkpoint.write_atomically = dying(checkpoint.write_atomically, lambda path, _: path.name == checkpoint.MANIFEST, True)
    elif at == "before rename":
        checkpoint.os.rename = dying(os.rename, lambda a, b: "part" in str(a), True)
    elif at == "after rename":
        checkpoint.os.rename = dying(os.rename, lambda a, b: "part" in str(a), False)
    elif at == "rotation":
        checkpoint.shutil.rmtree = dying(checkpoint.shutil.rmtree, lambda path, **_: str(path).endswith(".old"), True)
    else:
        raise ValueError(at)


def main() -> None:
    for job in json.loads(Path(sys.argv[1]).read_text()):
        config = load_run_config(Path(job["config"]), job["set"])
        world = World(config.training.backend == "deepspeed", 60)
        with open(os.devnull, "w") as nowhere:
            trainer = Trainer(config, Path(job["out"]), world, Console(file=nowhere))
            if "poison" in job:
                poison(trainer, **job["poison"])
            if "kill" in job:
                kill(trainer, **job["kill"])
            if "stop" in job and world.rank == world.size - 1:
                stop(trainer, job["stop"])
            trainer.run()
            trainer.close()
    world.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # threads of a group that outlive the interpreter's end abort the process, once in many runs


if __name__ == "__main__":
    main()
