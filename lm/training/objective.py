"""What is differentiated: one module around the model, so that an engine can wrap it. Its forward gives the summed loss."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lm.config import ModelConfig, TrainingConfig
from lm.model import PMI, State
from lm.model.decoder import Block
from lm.training.dropout import LaneDropout


class Objective(nn.Module):
    """The summed loss of whole segments behind a carried state, and the state after them, cut off from the graph."""

    def __init__(self, model: PMI, seed: int, config: TrainingConfig) -> None:
        super().__init__()
        self.model, self.bf16 = model, config.precision == "bf16"
        self.draws = LaneDropout(model.config.dropout, seed)
        model.dropout = self.draws  # type: ignore[assignment]  # the model's one dropout, drawn per lane
        for block in cast(Iterable[Block], model.blocks):
            # the parts between which nothing depends on the data; what chooses by the data stays as it is
            for wanted, change in (config.compile, _compiled), (config.activation_checkpointing, _recomputed):
                if wanted:
                    block.attention.forward = change(block.attention.forward)  # type: ignore[method-assign]
                    block.feedforward = change(block.feedforward)  # type: ignore[method-assign]

    def forward(
        self, tokens: Tensor, targets: Tensor, mask: Tensor, starts: Tensor, state: State, step: int, lanes: Sequence[int]
    ) -> tuple[Tensor, State]:
        """Loss over `tokens [b, k * t]` where `mask`; `lanes` are the global ids of the b lanes."""
        if self.training:
            self.draws.begin(step, lanes, tokens.device)
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=self.bf16):
            hidden, after = self.model(tokens, state.detach(), starts=starts)
            loss = self.model.head.loss(hidden, targets, mask)
        return loss, after.detach()


def blank_state(model: PMI, lanes: int) -> State:
    """A state to be replaced: every lane's first segment starts a document. Made before an engine shards the weights."""
    with torch.no_grad():
        return model.initial_state(lanes)


def flops_per_token(config: ModelConfig, parameters: int) -> float:
    """Estimated floating-point operations of forward and backward per token: 6 per weight, and attention's products."""
    seen = config.window + config.segment / 2
    return 6 * parameters + 12 * config.layers * config.width * seen


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False)


def _recomputed(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        return checkpoint(function, *args, use_reentrant=False) if torch.is_grad_enabled() else function(*args)

    return call
