"""Reading documents with carried memory: every token predicted once, many documents side by side.

- a lane reads document after document; each starts at a segment boundary behind BOS, with initial memory and no window
- a lane that finishes its document takes the next at once; when none is left the lane ends, and the others read longer calls
- a call is `lanes x segments` whole segments in parallel; its tokens stay near a fixed number, whatever the lanes
- sums are float64; the head is computed for real tokens only, in slices that bound its memory

Axes: b lane, k segment of the call, t token of a segment.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lm.evaluation.corpus import Item
from lm.evaluation.tally import Outcome, Tally
from lm.evaluation.variants import Mode
from lm.model import PMI, State
from lm.model.attention import MAX_TOKENS
from lm.model.state import Remembered, map_tensors, where_lanes

CALL_TOKENS = 4_096
"""Tokens of a call over all lanes, about; more is no faster on a CPU, and costs memory."""
CALL_COST = 400
"""What a call costs beside its tokens, in tokens, about."""
HEAD_SCORES = 1 << 24
"""Most scores (tokens x vocabulary) that exist at a time."""


class StoppedError(Exception):
    """The evaluation was asked to stop; what is open is in `open`."""

    def __init__(self, open_: "list[Open]") -> None:
        self.open = open_
        super().__init__("stopped")


@dataclass(frozen=True)
class Open:
    """A document in the middle: its sums, and the state of its lane (and of the lane it takes memory from)."""

    tally: Tally
    states: list[State]


@dataclass
class Watch:
    """What a caller wants to hear, and whether it wants to stop."""

    done: Callable[[Outcome], None] = lambda outcome: None
    advanced: Callable[[int], None] = lambda tokens: None
    stop: Callable[[], bool] = lambda: False
    save: Callable[[Callable[[], list[Open]]], None] = field(default=lambda opened: None)
    """Called after every call with a function that gives what is open."""
    failed: Callable[[], None] = lambda: None
    """A worker was lost with what it was reading (on a cluster)."""


def evaluate(
    model: PMI,
    items: Sequence[Item],
    mode: Mode,
    bos: int,
    watch: Watch | None = None,
    lanes: int | None = None,
    call_tokens: int = CALL_TOKENS,
    resume: Iterable[Open] = (),
    finished: Collection[int] = (),
) -> None:
    """Read every document; `watch.done` gets each one's outcome as it ends, in no fixed order.

    `off` is `on` with a model that has no memory (variants.py). `resume` are documents in the middle, `finished` the numbers
    of those that were read before.
    """
    reader = (_Shuffled if mode == "shuffled" else _Reader)(model, items, mode, bos, lanes, call_tokens, list(resume), finished)
    with torch.inference_mode():
        reader.run(watch or Watch())


class _Reader:
    """Modes on, off and reset."""

    pair = 1
    """Rows of the batch per lane."""

    def __init__(
        self,
        model: PMI,
        items: Sequence[Item],
        mode: Mode,
        bos: int,
        lanes: int | None,
        call_tokens: int,
        resume: list[Open],
        finished: Collection[int],
    ) -> None:
        self.model, self.mode, self.bos, self.call_tokens = model, mode, bos, call_tokens
        self.t = model.config.segment
        # the longest first: the lanes then end at about the same time
        begun = {*finished, *(opened.tally.item.number for opened in resume)}
        self.queue = deque(sorted((item for item in items if item.number not in begun), key=lambda item: -item.length))
        wanted = lanes or max(1, call_tokens // (self.t * self.pair))
        count = max(len(resume), min(len(self.queue) + len(resume), wanted))
        self.lanes = [opened.tally for opened in resume]
        while len(self.lanes) < count and self.queue:
            self.lanes.append(self._next())
        self.state = model.initial_state(count * self.pair)
        for lane, opened in enumerate(resume):
            for row, state in enumerate(opened.states):
                self.state = self.state.merge([lane + row * count], state)
        self.initial = map_tensors(lambda x: x.detach(), model.initial_state(1).remembered)

    def _next(self) -> Tally:
        return Tally(self.queue.popleft(), self.t)

    def run(self, watch: Watch) -> None:
        """Read until nothing is left."""
        while self.lanes:
            if watch.stop():
                raise StoppedError(self.opened())
            self._call(watch)
            keep = []
            for lane, tally in enumerate(self.lanes):
                if not tally.left and self.queue:
                    self.lanes[lane] = self._next()
                if self.lanes[lane].left:
                    keep.append(lane)
            if len(keep) < len(self.lanes):
                count = len(self.lanes)
                self.lanes = [self.lanes[lane] for lane in keep]
                if keep:
                    self.state = self.state.select([lane + row * count for row in range(self.pair) for lane in keep])
            if self.lanes:
                watch.save(self.opened)

    def opened(self) -> list[Open]:
        """The documents in the middle."""
        count = len(self.lanes)
        return [
            Open(tally, [self.state.select([lane + row * count]) for row in range(self.pair)])
            for lane, tally in enumerate(self.lanes)
            if tally.done
        ]

    def _segments_per_call(self) -> int:
        if self.mode == "reset":  # the memory is put back between calls
            return 1
        lanes, most = len(self.lanes), max(1, min(self.call_tokens // (len(self.lanes) * self.t), MAX_TOKENS // self.t))
        if self.queue:
            return most
        # nothing follows a lane that ends: so many segments as read most for their time, with padding behind the shorter lanes
        left = [tally.left for tally in self.lanes]
        return max({min(most, x) for x in left}, key=lambda k: sum(min(k, x) for x in left) / (lanes * k * self.t + CALL_COST))

    def _call(self, watch: Watch) -> None:
        """One call: fill its rows, run the model, add up."""
        k, count = self._segments_per_call(), len(self.lanes)
        batch = Batch(count, k, self.t, self.bos)
        for lane in range(count):
            tally = self.lanes[lane]
            filled = min(k, tally.left)
            batch.put(lane, 0, tally, tally.done, filled)
            while filled < k and self.queue:
                tally = self.lanes[lane] = self._next()
                taken = min(k - filled, tally.left)
                batch.put(lane, filled, tally, 0, taken)
                filled += taken
            batch.finish(lane, filled)
        if self.mode == "reset":
            self.state = self.state.remembering(map_tensors(lambda x: x.expand(count, *x.shape[1:]), self.initial))
        device = self.model.device
        hidden, self.state = self.model(batch.tensor(batch.tokens, device), self.state, starts=batch.tensor(batch.starts, device))
        batch.add_up(self.model, hidden, watch)


@dataclass(frozen=True)
class Span:
    """A stretch of segments of one document in a row of a call."""

    row: int
    at: int
    tally: Tally
    segments: int
    tokens: int


class Batch:
    """The rows of one call: inputs, targets, where documents start, what is real."""

    def __init__(self, rows: int, segments: int, t: int, bos: int) -> None:
        self.t, self.bos = t, bos
        self.tokens = np.full((rows, segments * t), bos, dtype=np.int64)
        self.targets = np.full((rows, segments * t), bos, dtype=np.int64)
        self.mask = np.zeros((rows, segments * t), dtype=np.bool_)
        self.starts = np.zeros((rows, segments), dtype=np.bool_)
        self.spans: list[Span] = []

    def put(self, row: int, at: int, tally: Tally, first: int, segments: int) -> None:
        """Lay `segments` of a document from its segment `first` on at segment `at` of a row."""
        fill(self.tokens[row], self.targets[row], self.mask[row], at * self.t, tally.item, first * self.t, segments * self.t)
        self.starts[row, at] = first == 0
        tokens = min(tally.item.length - first * self.t, segments * self.t)
        self.spans.append(Span(row, at, tally, segments, tokens))

    def finish(self, row: int, filled: int) -> None:
        """Nothing follows in a row: what is left of it counts as a new, empty document."""
        if filled < self.starts.shape[1]:
            self.starts[row, filled] = True

    def tensor(self, array: NDArray[Any], device: torch.device) -> Tensor:
        """An array on the model's device."""
        return torch.from_numpy(array).to(device)

    def add_up(self, model: PMI, hidden: Tensor, watch: Watch) -> None:
        """Add the losses of the call to its documents; those at their end are given to `watch`."""
        # row by row, padding too: scores of one shape whatever else is read beside, so that their bits do not depend on it
        rows = zip(hidden, self.tensor(self.targets, hidden.device), strict=True)
        values = np.stack([losses(model, features, targets).cpu().numpy() for features, targets in rows])
        values[~self.mask] = 0
        sums = values.reshape(*self.starts.shape, self.t).sum(-1)
        advanced = 0
        for span in self.spans:
            begin = span.at * self.t
            span.tally.add(sums[span.row, span.at : span.at + span.segments], values[span.row, begin : begin + self.t])
            advanced += span.tokens
            if not span.tally.left:
                watch.done(span.tally.outcome())
        watch.advanced(advanced)


class _Shuffled(_Reader):
    """Mode shuffled: beside each document runs the next one, under `on`; the first reads the second's memory.

    Where the next document is shorter, its last memory stays.
    """

    pair = 2

    def __init__(self, *args: Any) -> None:
        items: Sequence[Item] = args[1]
        super().__init__(*args)
        numbers = [item.number for item in items]
        self.donors = dict(zip(numbers, [*items[1:], *items[:1]], strict=True))

    def _call(self, watch: Watch) -> None:
        count, t = len(self.lanes), self.t
        batch, donors = Batch(count, 1, t, self.bos), Batch(count, 1, t, self.bos)
        complete = torch.zeros(count, dtype=torch.bool)
        for lane, tally in enumerate(self.lanes):
            donor, s = self.donors[tally.item.number], tally.done
            batch.put(lane, 0, tally, s, 1)
            donors.starts[lane, 0] = s == 0
            if s * t < donor.length:
                fill(donors.tokens[lane], donors.targets[lane], donors.mask[lane], 0, donor, s * t, t)
            complete[lane] = (s + 1) * t <= donor.length
        device = self.model.device
        starts = torch.from_numpy(batch.starts).to(device)
        memory: Remembered = map_tensors(lambda x: x[count:], self.state.remembered)
        memory = where_lanes(starts[:, 0], map_tensors(lambda x: x.expand(count, *x.shape[1:]), self.initial), memory)
        state = self.state.remembering(map_tensors(lambda x: torch.cat([x, x]), memory))
        tokens = torch.from_numpy(np.concatenate([batch.tokens, donors.tokens])).to(device)
        hidden, state = self.model(tokens, state, starts=torch.cat([starts, starts]))
        after = where_lanes(complete.to(device), map_tensors(lambda x: x[count:], state.remembered), memory)
        self.state = state.remembering(map_tensors(lambda x: torch.cat([x, x]), after))
        batch.add_up(self.model, hidden[:count], watch)


def fill(
    tokens: NDArray[np.int64],
    targets: NDArray[np.int64],
    mask: NDArray[np.bool_],
    at: int,
    item: Item,
    first: int,
    count: int,
) -> None:
    """Lay tokens `first` and on of a document into a row: the input is one behind the target, BOS before the first."""
    read = item.read(max(0, first - 1), min(first + count, item.length))
    real = min(count, item.length - first)
    targets[at : at + real] = read[len(read) - real :]
    mask[at : at + real] = True
    if first:
        tokens[at : at + real] = read[:-1]
    else:
        tokens[at + 1 : at + real] = read[:-1]  # position 0 holds BOS already


def losses(model: PMI, hidden: Tensor, targets: Tensor) -> Tensor:
    """Nats of each target [n] from features [n, d], in float64, in slices that bound the scores in memory."""
    step = max(1, HEAD_SCORES // model.config.vocab_size)
    return torch.cat([model.head.nll(h, y).double() for h, y in zip(hidden.split(step), targets.split(step), strict=True)])
