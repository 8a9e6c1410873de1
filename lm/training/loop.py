"""The plain training loop: one process, carried memory, truncated backpropagation through K segments.

A step reads K segments of every lane. Gradient flows through the memory between them (K >= 2, or the writer never learns) and is
cut at the step's start; state is carried from step to step and restarts where a document does.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lm.config import OptimiserConfig
from lm.errors import UserError
from lm.model import PMI, State


@dataclass(frozen=True)
class Batch:
    """K segments of every lane. Where `mask` is false the target is padding and counts in no loss."""

    tokens: Tensor  # [b, k * t]
    targets: Tensor  # [b, k * t]
    mask: Tensor  # [b, k * t] bool
    starts: Tensor  # [b, k] bool: a document starts with this segment


@dataclass(frozen=True)
class Step:
    """What one optimiser step measured."""

    number: int
    loss: float  # nats per token
    gradient_norm: float
    learning_rate: float
    tokens: int


def learning_rate(config: OptimiserConfig, step: int, steps: int) -> float:
    """Linear warm-up, then a cosine to a tenth of the peak."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    done = (step - config.warmup) / max(1, steps - config.warmup)
    return config.lr * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))


def optimiser_for(model: PMI, config: OptimiserConfig) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.lr, betas=(0.9, 0.95), fused=True)


def train(
    model: PMI,
    batches: Iterator[Batch],
    config: OptimiserConfig,
    steps: int,
    report: Callable[[Step], None] = lambda step: None,
) -> State:
    """Train for `steps` steps; returns the state that the lanes were left with."""
    optimiser = optimiser_for(model, config)
    model.train()
    state: State | None = None
    for number in range(steps):
        batch = next(batches)
        if model.config.memory is not None and batch.starts.shape[1] < 2:
            raise UserError(
                f"{batch.starts.shape[1]} segment per step with memory on: the memory's writer would get no gradient; "
                "take 2 segments or more, or set memory: off"
            )
        rate = learning_rate(config, number, steps)
        for group in optimiser.param_groups:
            group["lr"] = rate
        if state is None:
            state = model.initial_state(batch.tokens.shape[0])
        hidden, after = model(batch.tokens, state.detach(), starts=batch.starts)
        count = int(batch.mask.sum())
        loss = model.head.loss(hidden, batch.targets, batch.mask) / count
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        if not bool(norm.isfinite()):
            raise UserError(f"step {number}: the gradient is not finite; lower the learning rate {config.lr}")
        optimiser.step()
        state = after.detach()
        report(Step(number, float(loss.detach()), float(norm), rate, count))
    assert state is not None
    return state
