"""Lanes: the parallel, endless streams of documents that training reads, resumable at any segment.

    lanes = Lanes(open_prepared("data/enwik8"), "train", lanes=16, segment=512, seed=1, rank=0, world=2)
    batch = lanes.next_batch(4)          # 4 segments of each of this rank's 8 lanes

Axes: l this rank's lanes, k segments of the batch, T positions of a segment.

- A document starts at a segment boundary, with BOS at position 0: its N tokens are N targets, and the inputs are BOS
  and the first N-1. The rest of its last segment is padding.
- Each epoch the documents are shuffled by (seed, epoch) and dealt to the lanes, balanced by length; a lane reads its
  documents one after the other and then goes into its next epoch, without waiting for the others.
- Where documents are fewer than 4 per lane, they are laid end to end in shuffled order and cut, at segment multiples,
  into one stretch per lane. A part of a document is read like a document: it starts reset, behind a BOS.
- Which tokens a lane reads is a function of (data, seed, lanes, segment, lane id) alone, never of rank or world.
"""

import heapq
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from lm.data.prepared import Prepared
from lm.errors import UserError

DOCUMENTS_PER_LANE = 4
"""With fewer documents than this per lane, dealing whole documents would leave the lanes too unequal."""
EPOCHS_KEPT = 4
"""Lanes are rarely further apart than neighbouring epochs; plans of more are made anew when needed."""


class Batch(NamedTuple):
    """`k` segments of each of this rank's lanes. Padding holds BOS, in tokens and in targets."""

    tokens: torch.Tensor
    """int64 [l, k*T]: the input; position 0 of a document (or part) is BOS."""
    targets: torch.Tensor
    """int64 [l, k*T]: the token to predict at each position."""
    lengths: torch.Tensor
    """int64 [l, k]: the predictions of each segment; its positions from there on are padding."""
    starts: torch.Tensor
    """bool [l, k]: a document (or part) starts with this segment; memory is reset there."""
    lanes: torch.Tensor
    """int64 [l]: the lanes' global ids."""

    def mask(self) -> torch.Tensor:
        """bool [l, k*T]: the positions that are not padding."""
        lanes, k = self.lengths.shape
        offsets = torch.arange(self.tokens.shape[1] // k)
        return (offsets < self.lengths[:, :, None]).view(lanes, -1)


Parts = NDArray[np.int64]
"""[parts, 2]: what a lane reads one after the other, each from a first to a last token of the split (exclusive)."""


class Lanes:
    """This rank's lanes of a split. An iterator of one-segment batches, or `next_batch(k)` for k segments each."""

    def __init__(
        self, data: Prepared, split: str, *, lanes: int, segment: int, seed: int = 0, rank: int = 0, world: int = 1
    ) -> None:
        self.data, self.split = data, data.split(split)
        self.lanes, self.segment, self.seed = lanes, segment, seed
        self._lengths = np.asarray(self.split.lengths)
        _check(lanes, segment, rank, world, self._lengths, split)
        self.own = range(lanes * rank // world, lanes * (rank + 1) // world)
        self._cursors = dict.fromkeys(self.own, (0, 0, 0))
        self._plan = lru_cache(maxsize=EPOCHS_KEPT)(self._planned)

    def __iter__(self) -> Iterator[Batch]:
        while True:
            yield self.next_batch()

    def next_batch(self, k: int = 1) -> Batch:
        """The next `k` segments of each of this rank's lanes."""
        segment, bos, shape = self.segment, self.data.tokenizer.bos, (len(self.own), k)
        tokens = np.full((len(self.own), k * segment), bos, dtype=np.int64)
        targets = np.full((len(self.own), k * segment), bos, dtype=np.int64)
        lengths, starts = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.bool_)
        for row, lane in enumerate(self.own):
            epoch, item, offset = self._cursors[lane]
            parts = self._plan(epoch)[lane]
            filled = 0
            while filled < k:
                start, stop = parts[item].tolist()
                left = -(-(stop - start) // segment) - offset
                count = min(left, k - filled)
                first, last = start + offset * segment, min(stop, start + (offset + count) * segment)
                self._fill(tokens[row], targets[row], filled * segment, first, last, reset=offset == 0)
                lengths[row, filled : filled + count] = segment
                lengths[row, filled + count - 1] = last - first - (count - 1) * segment
                starts[row, filled] = offset == 0
                filled += count
                offset += count
                if count == left:
                    item, offset = item + 1, 0
                    if item == len(parts):
                        epoch, item = epoch + 1, 0
                        parts = self._plan(epoch)[lane]
            self._cursors[lane] = epoch, item, offset
        arrays = (tokens, targets, lengths, starts, np.asarray(self.own, dtype=np.int64))
        return Batch(*(torch.from_numpy(array) for array in arrays))

    def _fill(self, tokens: NDArray[np.int64], targets: NDArray[np.int64], at: int, first: int, last: int, reset: bool) -> None:
        """Put tokens `first` to `last` of the split at position `at` of a row, behind a BOS where the part begins."""
        # Read from one token earlier (at a part's start there is BOS instead): one read serves inputs and targets.
        read = self.split.read(first if reset else first - 1, last)
        count = last - first
        targets[at : at + count] = read if reset else read[1:]
        if reset:
            tokens[at + 1 : at + count] = read[:-1]  # position `at` holds BOS already
        else:
            tokens[at : at + count] = read[:-1]

    def _planned(self, epoch: int) -> dict[int, Parts]:
        """What each of this rank's lanes reads in an epoch."""
        order = shuffled(len(self._lengths), self.seed, epoch)
        if len(order) < DOCUMENTS_PER_LANE * self.lanes:
            stretches = self._cut(order)
            return {lane: np.asarray(stretches[lane], dtype=np.int64) for lane in self.own}
        dealt = deal(_segments(self._lengths, self.segment), order, self.lanes)
        bounds = np.stack([self.split.index[:, 0], self.split.index[:, 0] + self._lengths], axis=1)
        return {lane: bounds[dealt[lane]] for lane in self.own}

    def _cut(self, order: NDArray[np.int64]) -> list[list[tuple[int, int]]]:
        """One stretch per lane, of equal segments (to one): the documents end to end, cut where a stretch ends."""
        total = int(_segments(self._lengths, self.segment).sum())
        ends = [total * (lane + 1) // self.lanes for lane in range(self.lanes)]
        stretches: list[list[tuple[int, int]]] = [[] for _ in range(self.lanes)]
        lane = position = 0
        for document in order.tolist():
            start, length = self.split.index[document, :2].tolist()
            stop = start + length
            while start < stop:
                end = min(stop, start + (ends[lane] - position) * self.segment)
                stretches[lane].append((start, end))
                position += -(-(end - start) // self.segment)
                start = end
                if position == ends[lane]:
                    lane += 1
        return stretches

    def state_dict(self) -> dict[str, Any]:
        """Where this rank's lanes stand: a small JSON-able value. `merge_states` joins those of all ranks.

        A cursor is [epoch, document in the lane's epoch, segments of it read]; randomness is a function of (seed,
        epoch), so there is no other state.
        """
        cursors = {str(lane): list(cursor) for lane, cursor in self._cursors.items()}
        return self._identity() | {"cursors": cursors}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`, which must hold this rank's lanes; made by any number of ranks."""
        for key, own in self._identity().items():
            if state.get(key) != own:
                raise UserError(
                    f"lanes: the saved state has {key} {state.get(key)!r}, this run {own!r}; "
                    "a stream can go on only with the same data, split, seed, number of lanes and segment length"
                )
        missing = [lane for lane in self.own if str(lane) not in state["cursors"]]
        if missing:
            raise UserError(
                f"lanes: the saved state lacks lane {missing[0]} ({len(missing)} such of {len(self.own)}); "
                "join the states of all ranks with merge_states"
            )
        self._cursors = {lane: _cursor(state["cursors"][str(lane)]) for lane in self.own}

    def _identity(self) -> dict[str, Any]:
        return {
            "data": self.data.fingerprint,
            "split": self.split.name,
            "lanes": self.lanes,
            "segment": self.segment,
            "seed": self.seed,
        }


def merge_states(states: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The states of all ranks as one, that any rank of any world can load."""
    merged: dict[str, Any] = {}
    for state in states:
        for key, value in state.items():
            if key != "cursors" and merged.setdefault(key, value) != value:
                raise UserError(f"lanes: states with {key} {merged[key]!r} and {value!r} are of different runs")
        merged["cursors"] = merged.get("cursors", {}) | state["cursors"]
    return merged


def shuffled(count: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """0..count-1 in an order given by (seed, epoch), the same on every machine and with every version of NumPy."""
    with np.errstate(over="ignore"):
        words = np.array([seed % 2**64, epoch], dtype=np.uint64)
        salt = _mix(_mix(words[:1]) + words[1:])
        return np.argsort(_mix(salt + np.arange(count).astype(np.uint64)), kind="stable")


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64 (Steele, Lea and Flood, 2014): a fixed, well-mixed map of 64 bits to 64 bits."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def deal(sizes: NDArray[np.int64], order: NDArray[np.int64], lanes: int) -> list[list[int]]:
    """Deal documents to lanes: the longest first, each to the lane that has least; then each lane in `order`."""
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order))
    load = [(0, lane) for lane in range(lanes)]
    hands: list[list[int]] = [[] for _ in range(lanes)]
    for document in order[np.argsort(-sizes[order], kind="stable")].tolist():
        size, lane = load[0]
        hands[lane].append(document)
        heapq.heapreplace(load, (size + int(sizes[document]), lane))
    return [sorted(hand, key=rank.__getitem__) for hand in hands]


def _segments(lengths: NDArray[np.int64], segment: int) -> NDArray[np.int64]:
    return -(-lengths // segment)


def _cursor(value: Any) -> tuple[int, int, int]:
    epoch, item, offset = (int(part) for part in value)
    return epoch, item, offset


def _check(lanes: int, segment: int, rank: int, world: int, lengths: NDArray[np.int64], split: str) -> None:
    problems = []
    segments = int(_segments(lengths, max(segment, 1)).sum())
    if segment < 1:
        problems.append(f"lanes: segment {segment}: must be at least 1")
    elif not 1 <= lanes <= segments:
        problems.append(
            f"lanes: {lanes} lanes: must be 1 to {segments:,}, the segments of {segment} tokens in the split {split!r}"
        )
    if not (1 <= world <= max(lanes, 1) and 0 <= rank < world):
        problems.append(f"lanes: rank {rank} of {world}: a rank is below the world, and each needs a lane of the {lanes}")
    if problems:
        raise UserError(problems)
