"""The same losses however the work is split: plain torch, ZeRO 0 to 3, one process or two, fp32 and bf16."""

from pathlib import Path

import pytest
import torch

from lm.config import load_run_config
from lm.data.lanes import Lanes
from lm.data.prepared import open_prepared
from lm.model import PMI
from lm.training.loop import Batch, Step, train
from lm.training.trainer import checked_model

from .conftest import Ranks, job, losses, tensors

TOLERANCE = 1e-4
"""Of the loss, over 20 steps in float32."""


def reference(experiment: Path, *set_: str) -> list[float]:
    """Losses of the plain loop, which knows nothing of micro-batches, ranks and checkpoints."""
    config = load_run_config(experiment, set_)
    data = open_prepared(config.data)
    torch.manual_seed(config.seed)
    model = PMI(checked_model(config, data))
    lanes = Lanes(data, "train", lanes=config.training.lanes, segment=model.config.segment, seed=config.seed)

    def batches():
        while True:
            batch = lanes.next_batch(config.training.segments)
            yield Batch(batch.tokens, batch.targets, batch.mask(), batch.starts)

    steps: list[Step] = []
    train(model, batches(), config.training.optimiser, config.training.steps, steps.append)
    return [step.loss for step in steps]


@pytest.fixture(scope="module")
def wanted(experiment: Path) -> list[float]:
    return reference(experiment)


def same(found: list[float | None], wanted: list[float], tolerance: float = TOLERANCE) -> None:
    assert len(found) == len(wanted)
    assert max(abs((a if a is not None else torch.inf) - b) for a, b in zip(found, wanted, strict=True)) < tolerance


@pytest.mark.parametrize("world", [1, 2])
def test_every_stage_of_zero_gives_the_plain_loops_losses_and_every_parameter_gradient(
    experiment: Path, tmp_path: Path, ranks: Ranks, wanted: list[float], world: int
) -> None:
    jobs = [job(experiment, tmp_path / f"zero{stage}", stage=stage) for stage in range(4)]
    if world == 1:
        jobs.append(job(experiment, tmp_path / "plain"))
    ranks(world, *jobs)
    for one in jobs:
        same(losses(Path(one["out"])), wanted)
        moments = tensors(Path(one["out"]), "moments")
        norms = {name: float(x.norm()) for name, x in moments.items() if name.endswith("/exp_avg")}
        assert len(norms) > 30
        assert min(norms.values()) > 1e-6 * sorted(norms.values())[len(norms) // 2], min(norms, key=lambda name: norms[name])


def test_bf16_and_dropout_are_the_same_at_every_stage_and_number_of_processes(
    experiment: Path, tmp_path: Path, ranks: Ranks
) -> None:
    bf16 = ["training.precision=bf16", "model.dropout=0.1", "training.steps=10"]
    one = [job(experiment, tmp_path / "plain", *bf16)]
    one += [job(experiment, tmp_path / f"one{stage}", *bf16, stage=stage) for stage in (1, 2, 3)]
    two = [job(experiment, tmp_path / f"two{stage}", *bf16, stage=stage) for stage in range(4)]
    ranks(1, *one)
    ranks(2, *two)
    wanted = [loss for loss in losses(tmp_path / "plain") if loss is not None]
    for each in [*one, *two]:
        same(losses(Path(each["out"])), wanted, 0.02)
        memory = {name: x for name, x in tensors(Path(each["out"]), "carried").items() if "/memories." in name}
        assert memory
        assert all(x.dtype == torch.float32 for x in memory.values())


def test_activation_checkpointing_and_offload_change_nothing(
    experiment: Path, tmp_path: Path, ranks: Ranks, wanted: list[float]
) -> None:
    again = "training.activation_checkpointing=true"
    jobs = [job(experiment, tmp_path / f"zero{stage}", again, stage=stage) for stage in (1, 2, 3)]
    jobs += [job(experiment, tmp_path / f"offload{n}", f"training.deepspeed=zero{n}-offload", stage=0) for n in (2, 3)]
    ranks(2, *jobs)
    for one in jobs:
        same(losses(Path(one["out"])), wanted)


@pytest.mark.full  # most of a minute of compiling
def test_compiling_changes_no_loss(experiment: Path, tmp_path: Path, ranks: Ranks, wanted: list[float]) -> None:
    jobs = [job(experiment, tmp_path / f"zero{stage}", "training.compile=true", stage=stage) for stage in (1, 3)]
    ranks(1, *jobs)
    for one in jobs:
        same(losses(Path(one["out"])), wanted)


@pytest.mark.full
@pytest.mark.parametrize(
    "model",
    [
        ["model.memory.scope=global", "model.memory.parameters=tied", "model.memory.layers=all"],
        ["model.memory.correction=true", "model.memory.consolidation=probe"],
        ["model.memory.read=long_term"],
        ["model.memory.delta.source=both", "model.cutoffs=[100,200]", "model.cluster_divide=2"],
        ["model.memory=off", "training.segments=1"],
    ],
    ids=" ".join,
)
def test_every_kind_of_memory_is_sharded_alike(experiment: Path, tmp_path: Path, ranks: Ranks, model: list[str]) -> None:
    jobs = [job(experiment, tmp_path / f"zero{stage}", *model, stage=stage) for stage in (1, 2, 3)]
    ranks(2, *jobs)
    wanted = reference(experiment, *model)
    for one in jobs:
        same(losses(Path(one["out"])), wanted)
