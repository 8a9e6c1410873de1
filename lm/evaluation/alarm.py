"""The leak alarm: in a document's first segment `on`, `reset` and `shuffled` read the same initial memory, so they must agree.

Twice: bit for bit on calls of one shape, for lanes that have read something else before; and, for the figures of the run
itself, between the modes that it evaluated (to rounding: their calls have other shapes).
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from lm.evaluation.corpus import Item
from lm.evaluation.stream import fill, losses
from lm.evaluation.tally import Outcome
from lm.evaluation.variants import Mode
from lm.model import PMI
from lm.model.state import map_tensors

CHECKED = 8
"""Documents whose first segments are read again, mode by mode."""
ROUNDING = 1e-4
"""Relative difference of a first segment's nats between modes that is rounding; a thousand times less in float64."""


@dataclass(frozen=True)
class Alarm:
    """What was compared, and every disagreement."""

    documents: int
    """First segments compared bit for bit."""
    across: int
    """First segments of the run compared between its modes."""
    leaks: list[str]

    @property
    def quiet(self) -> bool:
        """Whether nothing leaked."""
        return not self.leaks

    def row(self) -> dict[str, Any]:
        """As JSON."""
        return {**asdict(self), "quiet": self.quiet}


def check(model: PMI, items: Sequence[Item], bos: int, outcomes: dict[Mode, list[Outcome]]) -> Alarm:
    """Compare the first segments; `outcomes` are the run's own, by mode."""
    leaks = []
    chosen = items[:CHECKED] if model.config.memory is not None else []
    for item, donor in zip(chosen, [*items[1:], items[0]], strict=False):
        nats = {mode: _first(model, item, donor, mode, bos) for mode in ("on", "reset", "shuffled")}
        if len(set(nats.values())) > 1:
            leaks.append(f"{item.name}: the first segment's nats differ: {nats}")
    compared = [mode for mode in ("on", "reset", "shuffled") if mode in outcomes]
    across = 0
    bound = ROUNDING if model.dtype != torch.float64 else ROUNDING / 1000
    bound = bound if model.dtype != torch.bfloat16 else 100 * bound
    first = {mode: {outcome.number: outcome.first for outcome in outcomes[mode]} for mode in compared}
    for mode in compared[1:]:
        for item in items:
            one, other = first[compared[0]].get(item.number), first[mode].get(item.number)
            if one is not None and other is not None:
                across += 1
                if not abs(one - other) <= bound * max(1.0, abs(one)):
                    leaks.append(f"{item.name}: the first segment came to {one} nats with {compared[0]}, {other} with {mode}")
    return Alarm(len(chosen), across, leaks)


@torch.inference_mode()
def _first(model: PMI, item: Item, donor: Item, mode: Mode, bos: int) -> float:
    """Nats of a document's first segment, read in a lane that has read the end of another document before."""
    used = model.initial_state(1)
    tail = donor.read(max(0, donor.length - 2 * model.config.segment), donor.length)
    _, used = model(torch.from_numpy(np.array(tail, dtype=np.int64))[None].to(model.device), used)
    state = model.reset(used, [0])
    if mode == "reset":
        state = state._replace(memories=map_tensors(lambda x: x.detach().clone(), model.initial_memory(1)))
    elif mode == "shuffled":
        state = state._replace(memories=model.reset(used, [0]).memories)
    length = min(model.config.segment, item.length)
    tokens, targets = np.full(length, bos, dtype=np.int64), np.zeros(length, dtype=np.int64)
    fill(tokens, targets, np.zeros(length, dtype=np.bool_), 0, item, 0, length)
    hidden, _ = model(torch.from_numpy(tokens)[None].to(model.device), state)
    return float(losses(model, hidden[0], torch.from_numpy(targets).to(model.device)).sum())
