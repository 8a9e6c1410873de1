"""What DeepSpeed ZeRO costs: step time of each stage over a plain loop's, input and logging, memory over many steps.

    make bench-training                                                     (one process, then two)
    torchrun --standalone --nproc_per_node 2 -m benchmarks.training

`plain` is the trainer with torch alone; on two processes it adds up the gradients of all with one all-reduce of one flat tensor
per step, the least that data parallelism needs. All contenders train `small` in turns in the same processes; a ratio is of the
same round: median and quartiles.
"""

import argparse
import contextlib
import os
import resource
import tempfile
import time
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from benchmarks.measure import Ratio, in_turns, ratio, save
from lm.cli import app
from lm.commands import run
from lm.config import RunConfig
from lm.training.backends import Plain
from lm.training.trainer import Trainer
from lm.training.world import World

BARS = {"zero1": 1.25, "zero3": 1.6}
"""Most that a stage may cost of a plain loop's step."""
STEPS = (100, 1000)
"""Where resident memory is read."""
TEXT = Path(__file__).parents[1] / "lm/data/text/moby-dick.txt"


def experiment(data: Path, lanes: int, backend: str, model: str) -> RunConfig:
    """A run that never ends, saves or evaluates by itself."""
    how = {"backend": "plain"} if backend == "plain" else {"deepspeed": backend}
    training = {"steps": 10**6, "lanes": lanes, "segments": 4, "lr": 1e-4, "warmup": 10, "log_interval": 1, **how}
    return RunConfig.model_validate({"model": model, "data": str(data), "training": training})


class Averaged(Plain):
    """Torch alone, on several processes."""

    def step(self, hold: bool) -> None:
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat)
        for gradient, summed in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
            gradient.copy_(summed.view_as(gradient))
        super().step(hold)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--lanes", type=int, default=8)
    args = parser.parse_args()
    world = World(distributed=True, timeout=600)
    with contextlib.ExitStack() as stack:
        folder = Path(world.from_first(stack.enter_context(tempfile.TemporaryDirectory()) if world.first else None))
        data = folder / "data"
        if world.first:
            command = ["data", "prepare", "text", "--source", str(TEXT), "--tokenizer", "bytes", "--out", str(data)]
            assert run(app, command) == 0
        world.barrier()
        nowhere = Console(file=stack.enter_context(open(os.devnull, "w")))
        # first, while nothing else of this process grows or shrinks
        memory = memory_over_steps(data, folder, world, nowhere) if world.size == 1 else {}
        names = ["plain", "zero0", "zero1", "zero2", "zero3"]
        trainers = {name: Trainer(experiment(data, args.lanes, name, "small"), folder / name, world, nowhere) for name in names}
        if world.size > 1:
            plain = trainers["plain"]
            plain.backend = Averaged(plain.backend.objective, plain.config.training)
        for trainer in trainers.values():
            trainer.backend.train(True)
        seconds = in_turns({name: one_step(trainer) for name, trainer in trainers.items()}, args.rounds, warmup=2)
        ratios = {name: ratio(seconds["plain"], seconds[name]) for name in names}
        if world.first:
            overhead = input_and_logging(trainers["plain"]) / min(seconds["plain"])
            show(world.size, seconds, ratios, overhead, memory)
        world.barrier()
    world.close()


def one_step(trainer: Trainer):
    def step() -> None:
        trainer._one_step()

    return step


def input_and_logging(trainer: Trainer) -> float:
    """Seconds per step that go to reading a batch and to reporting."""
    report, batches = trainer.report, 20
    assert report is not None
    figures = {"loss": 2.0, "tokens": 1, "learning_rate": 0.1, "gradient_norm": 1.0, "memory_norm": 1.0, "tokens_total": 1}
    began = time.perf_counter()
    for number in range(batches):
        trainer.lanes.next_batch(4).mask()
        report.step(number, figures)
    return (time.perf_counter() - began) / batches


def memory_over_steps(data: Path, folder: Path, world: World, nowhere: Console) -> dict[str, dict[str, float]]:
    """Resident megabytes, and their peak so far, after some and after many steps of `tiny` under ZeRO-1."""
    trainer = Trainer(experiment(data, 4, "zero1", "tiny"), folder / "memory", world, nowhere)
    trainer.backend.train(True)
    found: dict[str, dict[str, float]] = {"resident": {}, "peak": {}}
    for number in range(1, STEPS[-1] + 1):
        trainer._one_step()
        if number in STEPS:
            found["resident"][str(number)] = psutil.Process().memory_info().rss / 2**20
            found["peak"][str(number)] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    return found


def show(
    world: int, seconds: dict[str, list[float]], ratios: dict[str, Ratio], overhead: float, memory: dict[str, dict[str, float]]
) -> None:
    """Print and save the figures."""
    table = Table("", "step, ms", "of plain", "bar", title=f"small on {world} process(es)")
    for name, taken in seconds.items():
        bar = BARS.get(name)
        table.add_row(name, f"{1000 * sorted(taken)[len(taken) // 2]:.0f}", str(ratios[name]), "" if bar is None else f"<= {bar}")
    console = Console()
    console.print(table)
    console.print(f"input and logging: {overhead:.2%} of a step (bar: 2 %)")
    for kind, found in memory.items():
        console.print(f"{kind} MB of `tiny`: " + ", ".join(f"{mb:.0f} after {step} steps" for step, mb in found.items()))
    save(f"training_{world}", {"seconds": seconds, "over": "plain", "ratios": ratios, "overhead": overhead, "memory": memory})


if __name__ == "__main__":
    main()
