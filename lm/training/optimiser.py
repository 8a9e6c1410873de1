"""AdamW that can be held back for one step, and clips by itself where the engine around it does not."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lm.config import OptimiserConfig
from lm.model import PMI

MOMENTS = ("exp_avg", "exp_avg_sq")


class GuardedAdamW(torch.optim.AdamW):
    """AdamW with weight decay on matrices only. `applied` tells whether the last call of `step` changed anything."""

    def __init__(self, model: PMI, config: OptimiserConfig, clip: bool) -> None:
        parameters = [p for p in model.parameters() if p.numel()]
        groups: list[dict[str, Any]] = [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": config.weight_decay},
            {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
        ]
        super().__init__(groups, lr=config.lr, betas=(0.9, 0.95), fused=True)
        self.clip = config.clip if clip else None
        self.hold = self.applied = False
        self.norm = 0.0

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One step, unless it is held back or (where this clips) the gradient's norm is not finite."""
        if self.clip is not None:
            parameters = [p for group in self.param_groups for p in group["params"]]
            self.norm = float(torch.nn.utils.clip_grad_norm_(parameters, self.clip))
        if self.hold or not torch.tensor(self.norm).isfinite():
            return
        super().step(closure)
        self.applied = True

    def set_rate(self, rate: float) -> None:
        """The learning rate of the steps to come."""
        for group in self.param_groups:
            group["lr"] = rate

    def prepare(self, tensors: list[Tensor]) -> None:
        """Give every tensor its state now instead of at the first step, so that it can be saved and restored at any time."""
        for tensor in tensors:
            self.state[tensor] = {"step": torch.zeros((), device=tensor.device)}
            self.state[tensor].update({name: torch.zeros_like(tensor) for name in MOMENTS})

    @property
    def count(self) -> int:
        """Steps that were applied so far."""
        return int(next(iter(self.state.values()))["step"])

    def set_count(self, count: int) -> None:
        """Go on as if `count` steps had been applied."""
        for state in self.state.values():
            state["step"].fill_(count)
