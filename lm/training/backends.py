"""What computes a step: plain torch on one process, or DeepSpeed ZeRO on any number. Same objective, same optimiser.

A backend knows weights and moments by the model's own names and whole shapes, however they are sharded: a checkpoint made of
these can be read at any stage of ZeRO and any number of processes.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from lm.config import TrainingConfig
from lm.config_files import configs_folder, read_mapping
from lm.errors import UserError
from lm.training.objective import Objective
from lm.training.optimiser import MOMENTS, GuardedAdamW
from lm.training.world import World, import_deepspeed

OWNED = {
    "train_batch_size": "training.lanes",
    "train_micro_batch_size_per_gpu": "training.micro_batch",
    "gradient_accumulation_steps": "training.lanes and training.micro_batch",
    "gradient_clipping": "training.clip",
    "optimizer": "training.lr, training.weight_decay",
    "scheduler": "training.warmup, training.steps",
    "fp16": "training.precision",
    "bf16": "training.precision",
    "torch_autocast": "training.precision",
    "zero_allow_untested_optimizer": "nothing",
    "zero_force_ds_cpu_optimizer": "nothing",
}
"""Keys of a DeepSpeed file that the run's configuration decides, and the keys that do."""


class Backend(Protocol):
    """What the trainer needs of whatever computes."""

    optimiser: GuardedAdamW

    def forward(self, *inputs: Any) -> Any:
        """The objective's forward."""

    def backward(self, loss: Tensor, share: float) -> None:
        """Add the gradient of `loss * share` to what the step has gathered; over all processes it is summed."""

    def step(self, hold: bool) -> None:
        """Close a micro-batch; at the last one of the step the optimiser runs, unless `hold`. See `applied`, `norm`."""

    def train(self, mode: bool) -> None:
        """Training mode (dropout on), or not."""

    @property
    def norm(self) -> float:
        """The gradient norm of the last step, before clipping."""

    def weights(self) -> Iterator[tuple[str, Callable[[], Tensor]]]:
        """Names of the weights, each with what gathers the whole tensor; all processes must call all of them in order."""

    def moments(self, name: str) -> dict[str, Tensor]:
        """The whole moments of a weight; all processes must call it together."""

    def restore(self, count: int, moments: Callable[[str], dict[str, Tensor]]) -> None:
        """Take over the optimiser's state: steps applied so far, and the moments of each weight by name."""


class Plain:
    """Torch alone."""

    def __init__(self, objective: Objective, config: TrainingConfig) -> None:
        self.objective = objective
        self.optimiser = GuardedAdamW(objective.model, config.optimiser, clip=True)
        self.parameters = {name: p for name, p in objective.model.named_parameters() if p.numel()}
        self.optimiser.prepare(list(self.parameters.values()))
        self.forward = objective.__call__
        self.accumulation, self.micro = 1, 0

    def train(self, mode: bool) -> None:
        self.objective.train(mode)

    def backward(self, loss: Tensor, share: float) -> None:
        (loss * share).backward()

    def step(self, hold: bool) -> None:
        self.micro = (self.micro + 1) % self.accumulation
        if self.micro:
            return
        self.optimiser.hold, self.optimiser.applied = hold, False
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)

    @property
    def norm(self) -> float:
        return self.optimiser.norm

    def weights(self) -> Iterator[tuple[str, Callable[[], Tensor]]]:
        for name, parameter in self.parameters.items():
            yield name, parameter.detach

    def moments(self, name: str) -> dict[str, Tensor]:
        state = self.optimiser.state[self.parameters[name]]
        return {moment: state[moment] for moment in MOMENTS}

    def restore(self, count: int, moments: Callable[[str], dict[str, Tensor]]) -> None:
        self.optimiser.set_count(count)
        for name in self.parameters:
            for moment, value in moments(name).items():
                self.optimiser.state[self.parameters[name]][moment].copy_(value)


class ZeRO:
    """DeepSpeed, at the stage that its file says."""

    def __init__(self, objective: Objective, config: TrainingConfig, world: World, micro_batch: int, accumulation: int) -> None:
        settings = load_deepspeed(config.deepspeed)
        self.stage, self.world, self.accumulation = stage_of(settings), world, accumulation
        settings |= {
            "train_micro_batch_size_per_gpu": micro_batch,
            "gradient_accumulation_steps": accumulation,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": None,
        }
        # without ZeRO the optimiser clips: it then also knows the norm, which the engine does not tell
        settings["gradient_clipping"] = config.clip if self.stage else 0.0
        self.optimiser = GuardedAdamW(objective.model, config.optimiser, clip=not self.stage)
        self.parameters = {name: p for name, p in objective.model.named_parameters() if p.numel()}
        self.engine: Any = import_deepspeed().initialize(
            model=objective, optimizer=self.optimiser, config=settings, dist_init_required=False
        )[0]
        self.optimiser.prepare(self._flat())
        if self.stage in (1, 2):
            self.engine.optimizer._lazy_init_hp_params_optimizer_state()
        self.forward = self.engine.__call__

    def _flat(self) -> list[Tensor]:
        """The tensors that the optimiser itself steps: this process's share of the weights."""
        if self.stage == 3:
            return list(self.engine.optimizer.fp32_partitioned_groups_flat)
        return [p for group in self.optimiser.param_groups for p in group["params"]]

    def train(self, mode: bool) -> None:
        self.engine.train(mode)

    def backward(self, loss: Tensor, share: float) -> None:
        # the engine divides by the accumulation and averages over processes; the loss is a sum over both
        self.engine.backward(loss * (share * self.accumulation * self.world.size))

    def step(self, hold: bool) -> None:
        self.optimiser.hold, self.optimiser.applied = hold, False
        self.engine.step()

    @property
    def norm(self) -> float:
        return self.optimiser.norm if not self.stage else float(self.engine.get_global_grad_norm())

    def weights(self) -> Iterator[tuple[str, Callable[[], Tensor]]]:
        for name, parameter in self.parameters.items():
            yield name, partial(self._whole, parameter)

    def _whole(self, parameter: Tensor) -> Tensor:
        if self.stage < 3:
            return parameter.detach()
        from deepspeed.utils import safe_get_full_fp32_param

        return safe_get_full_fp32_param(parameter).detach()

    def moments(self, name: str) -> dict[str, Tensor]:
        parameter = self.parameters[name]
        if not self.stage:
            return {moment: self.optimiser.state[parameter][moment] for moment in MOMENTS}
        from deepspeed.utils import safe_get_full_optimizer_state

        return {moment: safe_get_full_optimizer_state(parameter, moment) for moment in MOMENTS}

    def restore(self, count: int, moments: Callable[[str], dict[str, Tensor]]) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

        self.optimiser.set_count(count)
        for name, parameter in self.parameters.items():
            for moment, value in moments(name).items():
                if not self.stage:
                    self.optimiser.state[parameter][moment].copy_(value)
                elif self.stage < 3:
                    safe_set_full_optimizer_state(parameter, value, moment)
                else:  # this process's part of the tensor, padded at its end where it does not divide
                    part = parameter.ds_tensor.numel()  # type: ignore[attr-defined]
                    padded = torch.zeros(part * self.world.size)
                    padded[: value.numel()] = value.flatten()
                    own = padded[part * self.world.rank : part * (self.world.rank + 1)]
                    safe_set_local_optimizer_state(parameter, own, moment)


def build(objective: Objective, config: TrainingConfig, world: World, micro_batch: int, accumulation: int) -> Backend:
    """The backend that the configuration names."""
    if config.backend == "plain":
        plain = Plain(objective, config)
        plain.accumulation = accumulation
        return plain
    return ZeRO(objective, config, world, micro_batch, accumulation)


def load_deepspeed(name: str) -> dict[str, Any]:
    """A DeepSpeed file by its name in configs/deepspeed/ or by its path."""
    folder = configs_folder() / "deepspeed"
    path = Path(name) if Path(name).is_file() else folder / f"{name}.json"
    if not path.is_file():
        known = sorted(file.stem for file in folder.glob("*.json"))
        raise UserError(f"training.deepspeed: {name!r} is neither a file nor one of {known}")
    settings = read_mapping(path)
    problems = [f"{path}: {key} is decided by {OWNED[key]}; remove it from this file" for key in settings if key in OWNED]
    if stage_of(settings) not in range(4):
        problems.append(f"{path}: zero_optimization.stage {stage_of(settings)!r} must be 0, 1, 2 or 3")
    if problems:
        raise UserError(problems)
    return settings


def stage_of(settings: dict[str, Any]) -> Any:
    """The stage of ZeRO that DeepSpeed settings ask for."""
    return settings.get("zero_optimization", {}).get("stage", 0)


def split_lanes(lanes: int, micro_batch: int | None, world: int) -> tuple[int, int]:
    """(micro-batch, accumulation) of each process; UserError where the lanes cannot be split so."""
    micro = micro_batch or max(1, lanes // world)
    if lanes % (micro * world):
        fitting = [m for m in range(1, lanes + 1) if lanes % (m * world) == 0]
        advice = f"micro_batch one of {fitting}" if fitting else f"a number of processes that divides {lanes}"
        raise UserError(
            f"training.lanes: {lanes} lanes cannot be split into micro-batches of {micro} on {world} processes "
            f"({lanes} is not a multiple of {micro} x {world}); choose {advice}"
        )
    return micro, math.floor(lanes / (micro * world))
