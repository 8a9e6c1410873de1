"""Training on tasks: fresh samples at every step, a curriculum over how far an answer is from what it rests on.

A step draws whole samples, so gradient reaches from the answer to the write it depends on. The run moves to the next stage of
the curriculum when it answers well enough, and makes all its steps: what is right is not yet kept for long. The same command goes
on where it was ended.
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor

from lm.config import OptimiserConfig, with_defaults
from lm.data.files import write_atomically
from lm.errors import UserError
from lm.evaluation.tasks_report import progress
from lm.model import PMI
from lm.training.loop import Batch, learning_rate, optimiser_for
from lm.training.signals import StopRequest

STATE, METRICS, REQUEST = "training.pt", "training.jsonl", "request.json"
SHARPNESS = 8.0
"""Of the choice among facts by the likeness of query and key, where looking up is taught."""
SAVE_EVERY = 60.0
"""Seconds between saves."""


@dataclass(frozen=True)
class TaskBatch(Batch):
    """Whole samples, one a lane, each a document of its own; the mask is on the answers. Padding stands behind a sample's end."""

    lengths: Tensor  # [b] predictions of each lane
    hints: Tensor | None = None  # [b, t] bool: what is learned beside the answers, and not counted among them
    facts: Tensor | None = None  # [b, t] under which name a token is worth being written to memory; -1: it is not
    asks: Tensor | None = None  # [b, t] which of those names a token should look up; -1: it does not matter


@dataclass
class Curriculum:
    """Which stage is trained: the next once `pass_` of the answers of the last `over` steps are right."""

    stages: list[int]
    pass_: float = 0.9
    over: int = 20
    stage: int = 0
    recent: list[float] = field(default_factory=list)

    @property
    def accuracy(self) -> float:
        """The share of right answers of the last steps at this stage."""
        return sum(self.recent) / len(self.recent) if self.recent else 0.0

    def draw(self, rng: np.random.Generator) -> int:
        """What to train on: half of the steps at the stage itself, half at any reached so far."""
        return self.stages[self.stage if rng.random() < 0.5 else int(rng.integers(self.stage + 1))]

    def note(self, accuracy: float) -> None:
        """Take in a step's accuracy."""
        self.recent = [*self.recent, accuracy][-self.over :]
        if len(self.recent) == self.over and self.accuracy >= self.pass_ and self.stage < len(self.stages) - 1:
            self.stage, self.recent = self.stage + 1, []


def claim(out: Path, request: dict[str, Any], growing: dict[str, Any] | None = None) -> None:
    """Make `out` the folder of this request; UserError where it is another's. What is in `growing` may be added later."""
    path, growing = out / REQUEST, growing or {}
    request = json.loads(json.dumps({**request, **growing}))
    if path.is_file():
        had = json.loads(path.read_text())
        had = {**{key: request[key] for key in growing}, **had}
        if isinstance(had.get("model"), dict):
            had["model"] = with_defaults(had["model"])
        other = [f"{key} {had.get(key)!r}, now {value!r}" for key, value in request.items() if had.get(key) != value]
        if other:
            raise UserError(f"{out}: is of a run with {'; '.join(other)}. Choose another --out, or the same settings to go on")
        request = {**had, **request}
        if not growing:
            return
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (json.dumps(request, indent=2) + "\n").encode())


def train(
    model: PMI,
    draw: Callable[[int, np.random.Generator], TaskBatch],
    curriculum: Curriculum,
    optimisation: OptimiserConfig,
    steps: int,
    seed: int,
    out: Path,
    console: Console,
    everything: float = 0.0,
    writing: float = 0.0,
) -> bool:
    """Train for `steps` steps; false where a signal ended it before (it is saved).

    `draw(stage, rng)` gives a step's samples. `everything` is the weight of predicting every token beside the answers, `writing`
    that of writing to memory what is known to be worth it, and nothing else, and of looking it up under its name.
    """
    optimiser = optimiser_for(model, optimisation)
    done = _restore(model, optimiser, curriculum, out)
    stop, saved = StopRequest(), time.monotonic()
    model.train()
    try:
        with progress(console, "training", steps, "steps", done) as advance, (out / METRICS).open("a") as metrics:
            while done < steps and not stop.signal:
                rng = np.random.default_rng([seed, done])
                stage = curriculum.draw(rng)
                batch = draw(stage, rng)
                for group in optimiser.param_groups:
                    group["lr"] = learning_rate(optimisation, done, steps)
                loss, right, strength = _step(model, batch, optimiser, optimisation.clip, everything, writing)
                done += 1
                curriculum.note(right)
                reached = curriculum.stages[curriculum.stage]
                row = {"step": done, "stage": stage, "reached": reached, "loss": loss, "accuracy": right, "strength": strength}
                metrics.write(json.dumps(row) + "\n")
                advance(1, f"loss {loss:.3f}  accuracy {curriculum.accuracy:.3f} at {reached}")
                if time.monotonic() - saved > SAVE_EVERY:
                    metrics.flush()
                    _save(model, optimiser, curriculum, done, out)
                    saved = time.monotonic()
            _save(model, optimiser, curriculum, done, out)
    finally:
        stop.close()
    model.eval()
    return not stop.signal


def _step(
    model: PMI, batch: TaskBatch, optimiser: torch.optim.Optimizer, clip: float, everything: float, writing: float
) -> tuple[float, float, float]:
    """One optimiser step; the loss of the answers, the share of them that is right, and the mean strength of writes."""
    given: dict[str, Any] = {part.name: getattr(batch, part.name) for part in fields(batch)}
    given |= {name: part.to(model.device) for name, part in given.items() if part is not None}
    tokens, targets, mask, starts = given["tokens"], given["targets"], given["mask"], given["starts"]
    lengths, hints, facts, asks = given["lengths"], given["hints"], given["facts"], given["asks"]
    with _watching_memory(model) as seen:
        hidden, _ = model(tokens, model.initial_state(tokens.shape[0]), starts=starts)
    asked, answers = hidden[mask], targets[mask]
    loss: Tensor = model.head.loss(asked, answers) / len(answers)
    total = loss
    if hints is not None and bool(hints.any()):
        total = total + model.head.loss(hidden[hints], targets[hints]) / int(hints.sum())
    if writing and seen and facts is not None and asks is not None:
        total = total + writing * torch.stack([taught(memory, facts, asks) for memory in seen]).mean()
    if everything:
        real = torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
        total = total + everything * model.head.loss(hidden[real], targets[real]) / int(lengths.sum())
    optimiser.zero_grad(set_to_none=True)
    total.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    if not bool(norm.isfinite()):
        raise UserError("the gradient is not finite; lower the learning rate with --lr")
    optimiser.step()
    with torch.no_grad():
        right = (model.head.logits(asked).argmax(-1) == answers).float().mean()
        strength = float(torch.stack([memory.strengths.mean() for memory in seen]).mean()) if seen else 0.0
    return float(loss.detach()), float(right), strength


class Seen(NamedTuple):
    """What one memory's write and read made of a step's tokens [b, t, ...]."""

    wishes: Tensor  # [b, t, c] how strongly each is to be written, before the gate
    strengths: Tensor  # [b, t, c] and behind it
    keys: Tensor  # [b, t, c, k]
    queries: Tensor  # [b, t, c, k]


@contextmanager
def _watching_memory(model: PMI) -> Iterator[list[Seen]]:
    """What the memories of tokens made of all tokens while the model ran: known when it has."""
    found: list[Seen] = []
    memories = [memory for memory in getattr(model, "memories", ()) if hasattr(memory, "delta_tokens")]
    taken: list[tuple[list[Tensor], ...]] = [([], [], []) for _ in memories]
    handles = [
        part.register_forward_hook(lambda _, __, x, own=own: own.append(x.flatten(1, 2)))
        for memory, parts in zip(memories, taken, strict=True)
        for part, own in zip((memory.delta_tokens.strength, memory.delta_tokens.key, memory.read.delta.query), parts, strict=True)
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
    for memory, parts in zip(memories, taken, strict=True):
        wishes, keys, queries = (torch.cat(part, 1) for part in parts)  # a long call runs in several passes
        write, bias = memory.delta_tokens, memory.delta_tokens.strength_bias
        found.append(Seen(wishes + bias, write.opened(wishes), *(x.unflatten(-1, (len(bias), -1)) for x in (keys, queries))))


def taught(memory: Seen, facts: Tensor, asks: Tensor) -> Tensor:
    """How far a memory is from writing the facts and nothing else, and from looking them up under their names."""
    worth = (facts >= 0)[..., None].expand_as(memory.wishes).float()
    wrong = F.binary_cross_entropy_with_logits(memory.wishes, worth, reduction="sum") / worth.sum().clamp_min(1)
    astray = []
    for lane in range(len(facts)):
        named, asking = facts[lane] >= 0, asks[lane] >= 0
        same = asks[lane, asking, None] == facts[lane, named]  # [asking, named]
        near = F.normalize(memory.queries[lane, asking], dim=-1).transpose(0, 1)
        near = SHARPNESS * near @ F.normalize(memory.keys[lane, named], dim=-1).permute(1, 2, 0)  # [c, asking, named]
        told = same.any(1)
        if bool(told.any()):
            right = near[:, told].masked_fill(~same[told], -torch.inf).logsumexp(-1)
            astray.append((near[:, told].logsumexp(-1) - right).mean())
    return wrong + torch.stack(astray).mean() if astray else wrong


def _save(model: PMI, optimiser: torch.optim.Optimizer, plan: Curriculum, done: int, out: Path) -> None:
    part = out / f".{STATE}.part"
    torch.save({
        "model": model.state_dict(), "optimiser": optimiser.state_dict(), "step": done,
        "stage": plan.stage, "recent": plan.recent,
    }, part)  # fmt: skip
    os.replace(part, out / STATE)


def _restore(model: PMI, optimiser: torch.optim.Optimizer, plan: Curriculum, out: Path) -> int:
    if not (out / STATE).is_file():
        (out / METRICS).unlink(missing_ok=True)
        return 0
    kept = torch.load(out / STATE, weights_only=True, map_location=model.device)
    model.load_state_dict(kept["model"])
    optimiser.load_state_dict(kept["optimiser"])
    plan.stage, plan.recent = kept["stage"], kept["recent"]
    if (out / METRICS).is_file():  # what was measured behind the save is measured again
        lines = (out / METRICS).read_text().splitlines(keepends=True)[: kept["step"]]
        (out / METRICS).write_text("".join(lines))
    return int(kept["step"])
