"""The sums of one document, in float64, and what is made of them when it is read."""

from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lm.evaluation.corpus import Item

BLOCKS = 100
"""Most contiguous blocks that a document's loss is kept in: what confidence is drawn from where there is one document."""


@dataclass(frozen=True)
class Outcome:
    """A document that was read to its end. JSON-able: a line of the journal."""

    number: int
    name: str
    tokens: int
    words: int
    bytes: int
    nats: float
    first: float
    """Nats of its first segment."""
    bins: list[tuple[int, int, float]]
    """Loss by position: first and last position (exclusive), nats."""
    blocks: list[tuple[int, float]]
    """Tokens and nats of contiguous blocks."""

    def row(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> "Outcome":
        """From JSON."""
        pairs = {"bins": [tuple(x) for x in row["bins"]], "blocks": [tuple(x) for x in row["blocks"]]}
        return cls(**{**row, **pairs})


class Tally:
    """A document while it is read: nats of each segment, and of each token of the first segment."""

    def __init__(self, item: Item, segment: int) -> None:
        self.item, self.segment = item, segment
        self.first = np.zeros(min(segment, item.length))
        self.segments = np.zeros(item.segments(segment))
        self.done = 0
        """Segments read."""

    @property
    def left(self) -> int:
        """Segments still to be read."""
        return len(self.segments) - self.done

    @property
    def tokens_done(self) -> int:
        """Tokens read."""
        return min(self.done * self.segment, self.item.length)

    def add(self, sums: NDArray[np.float64], tokens: NDArray[np.float64]) -> None:
        """Take in the nats of further segments; `tokens` are those of the first of them, token by token."""
        if self.done == 0:
            self.first[:] = tokens[: len(self.first)]
        self.segments[self.done : self.done + len(sums)] = sums
        self.done += len(sums)

    def outcome(self) -> Outcome:
        """What it came to."""
        t, length, item = self.segment, self.item.length, self.item
        bins = [(a, b, float(self.first[a:b].sum())) for a, b in pairwise(_octaves(len(self.first)))]
        bins += [(a * t, min(b * t, length), float(self.segments[a:b].sum())) for a, b in pairwise(_halves(len(self.segments)))]
        edges = sorted({len(self.segments) * i // BLOCKS for i in range(BLOCKS + 1)})
        blocks = [(min(b * t, length) - a * t, float(self.segments[a:b].sum())) for a, b in pairwise(edges)]
        nats = float(self.segments.sum())
        return Outcome(item.number, item.name, length, item.words, item.bytes, nats, float(self.segments[0]), bins, blocks)


def _octaves(end: int) -> list[int]:
    """0, 1, 2, 4, ... end: edges of bins inside the first segment."""
    return [0, *(1 << i for i in range(end.bit_length()) if 1 << i < end), end]


def _halves(end: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, ... end: edges of bins in segments, two to an octave."""
    edges = sorted(
        {x for i in range(end.bit_length() + 1) for x in (1 << i, 3 << i >> 1) if x < end} | ({end} if end > 1 else set())
    )
    return [x for x in edges if x >= 1]
