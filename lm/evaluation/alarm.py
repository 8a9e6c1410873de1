"""The leak alarm: in a document's first segment `on`, `reset` and `shuffled` read the same initial memory, so they must agree.

- the evaluator reads first segments in the three modes, in lanes that have read another document before: bit for bit equal
- the model reads them alone, from an initial state: equal to rounding, or all modes carry what they should not
- the run's own first segments, in whatever company they were read: equal to those, and between its modes, to rounding
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from lm.evaluation.corpus import Item
from lm.evaluation.stream import Watch, evaluate, fill, losses
from lm.evaluation.tally import Outcome
from lm.evaluation.variants import Mode
from lm.model import PMI

READ: tuple[Mode, ...] = ("on", "reset", "shuffled")
CHECKED = 8
"""Documents whose first segments are read again, mode by mode."""
ROUNDING = 1e-4
"""Relative difference of nats between calls of other shapes that is rounding; a thousand times less in float64."""


@dataclass(frozen=True)
class Alarm:
    """What was compared, and every disagreement."""

    documents: int
    """First segments compared bit for bit."""
    across: int
    """First segments of the run compared with these, or between its modes."""
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
    chosen = list(items[:CHECKED]) if model.config.memory is not None else []
    bound = {torch.float64: ROUNDING / 1000, torch.bfloat16: 100 * ROUNDING}.get(model.dtype, ROUNDING)
    leaks: list[str] = []
    across = 0
    again = {mode: _firsts(model, chosen, items[-1], mode, bos) for mode in READ if chosen}
    alone = {item.number: _alone(model, item, bos) for item in chosen}
    run = {mode: {outcome.number: outcome.first for outcome in outcomes[mode]} for mode in READ if mode in outcomes}
    for item in chosen:
        nats = {mode: found[item.number] for mode, found in again.items()}
        if len(set(nats.values())) > 1:
            leaks.append(f"{item.name}: the first segment's nats differ between the memory modes: {nats}")
        if not _near(nats["on"], alone[item.number], bound):
            leaks.append(
                f"{item.name}: the first segment is {nats['on']} nats behind another document, {alone[item.number]} alone"
            )
    for item in items:
        truth = again["on"][item.number] if item in chosen else None
        for mode, found in run.items():
            first = found.get(item.number)
            if first is None:
                continue
            if truth is None:  # of the other documents the run's modes have only each other
                truth = first
                continue
            across += 1
            if not _near(first, truth, bound):
                leaks.append(f"{item.name}: the first segment came to {first} nats with {mode} in this run, {truth} was due")
    return Alarm(len(chosen), across, leaks)


def _near(one: float, other: float, bound: float) -> bool:
    return abs(one - other) <= bound * max(1.0, abs(other))


def _firsts(model: PMI, chosen: list[Item], last: Item, mode: Mode, bos: int) -> dict[int, float]:
    """Nats of the first segments by document, read by the evaluator one after the other in one lane.

    A second lane runs beside it, as `shuffled` needs one: calls of one shape give results of the same bits.
    """
    t = model.config.segment
    end = max(0, last.length - t)
    before = Item(-1, "before", last.length - end, 0, 0, lambda first, stop: last.read(end + first, end + stop))
    read = [before, *(replace(item, length=min(item.length, t)) for item in chosen)]
    if mode != "shuffled":
        read = [one for item in read for one in (item, replace(item, number=-3 - item.number))]
    found: list[Outcome] = []
    evaluate(model, read, mode, bos, Watch(done=found.append), lanes=1 if mode == "shuffled" else 2, call_tokens=2 * t)
    return {outcome.number: outcome.first for outcome in found}


@torch.inference_mode()
def _alone(model: PMI, item: Item, bos: int) -> float:
    """Nats of a document's first segment, from an initial state."""
    length = min(model.config.segment, item.length)
    tokens, targets = np.full(length, bos, dtype=np.int64), np.zeros(length, dtype=np.int64)
    fill(tokens, targets, np.zeros(length, dtype=np.bool_), 0, item, 0, length)
    hidden, _ = model(torch.from_numpy(tokens)[None].to(model.device), model.initial_state(1))
    return float(losses(model, hidden[0], torch.from_numpy(targets).to(model.device)).sum())
