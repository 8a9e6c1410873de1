"""From sums to figures: perplexities and bits, their confidence, loss by position, and whether shuffling hurt."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lm.evaluation.tally import Outcome

RESAMPLES = 2_000
LEVEL = 0.95
LEAST_UNITS = 2
"""Confidence needs something to resample."""


@dataclass(frozen=True)
class Interval:
    """A bootstrap interval of nats per token."""

    low: float
    high: float
    units: int
    over: str
    """What was resampled: documents, or blocks or parts of the one document."""


@dataclass(frozen=True)
class Figures:
    """What one pass came to. Nats per token are the ratio of two sums, never a mean of means."""

    documents: int
    tokens: int
    nats: float
    """Summed over all tokens."""
    nats_per_token: float
    bits_per_token: float
    perplexity: float
    word_perplexity: float | None
    bits_per_byte: float | None
    bits_per_character: float | None
    interval: Interval | None
    seconds: float
    tokens_per_second: float

    def row(self) -> dict[str, Any]:
        """As JSON; what overflows is null."""
        return {key: None if isinstance(x, float) and not math.isfinite(x) else x for key, x in asdict(self).items()}


def figures(outcomes: Sequence[Outcome], characters: int | None, seconds: float) -> Figures:
    """The figures of documents that were read."""
    nats = math.fsum(outcome.nats for outcome in outcomes)
    tokens = sum(outcome.tokens for outcome in outcomes)
    words = sum(outcome.words for outcome in outcomes)
    size = sum(outcome.bytes for outcome in outcomes)
    return Figures(
        documents=len(outcomes),
        tokens=tokens,
        nats=nats,
        nats_per_token=nats / tokens,
        bits_per_token=nats / tokens / math.log(2),
        perplexity=_exp(nats / tokens),
        word_perplexity=_exp(nats / words) if words else None,
        bits_per_byte=nats / size / math.log(2) if size else None,
        bits_per_character=nats / characters / math.log(2) if characters else None,
        interval=interval(outcomes),
        seconds=seconds,
        tokens_per_second=tokens / max(seconds, 1e-9),
    )


def units(outcomes: Sequence[Outcome]) -> tuple[NDArray[np.float64], str]:
    """[n, 2] tokens and nats of what is resampled: documents, or the contiguous blocks of a single one."""
    ordered = sorted(outcomes, key=lambda outcome: outcome.number)
    if len(ordered) > 1:
        return np.array([(outcome.tokens, outcome.nats) for outcome in ordered]), "documents"
    return np.array(ordered[0].blocks, dtype=np.float64).reshape(-1, 2), "blocks"


def interval(outcomes: Sequence[Outcome]) -> Interval | None:
    """The bootstrap interval of nats per token; None where there is one unit only."""
    sums, over = units(outcomes)
    drawn = _bootstrap(sums)
    return None if drawn is None else Interval(*_middle(drawn[:, 1] / drawn[:, 0]), len(sums), over)


def why_no_interval(found: Figures, segment: int) -> list[str]:
    """What to say where there is no interval."""
    if found.interval is not None:
        return []
    short = f"the one document, of {found.tokens:,} tokens, is no longer than a segment of {segment:,}"
    return [f"no 95 % interval: {short}: there is nothing to resample; give more text"]


@dataclass(frozen=True)
class Difference:
    """Nats per token of one pass above another's, over the same documents, resampled in pairs."""

    nats_per_token: float
    low: float | None
    high: float | None
    units: int
    over: str

    @property
    def worse(self) -> bool | None:
        """Whether the first is surely worse (True), surely not (False); None: the interval holds 0, or there is none."""
        if self.low is None or self.high is None or self.low <= 0 <= self.high:
            return None
        return self.low > 0


def difference(first: Sequence[Outcome], other: Sequence[Outcome]) -> Difference:
    """How much worse `first` is than `other`."""
    mine, over = units(first)
    theirs, _ = units(other)
    joined = np.stack([mine[:, 0], mine[:, 1] - theirs[:, 1]], 1)
    drawn = _bootstrap(joined)
    low, high = (None, None) if drawn is None else _middle(drawn[:, 1] / drawn[:, 0])
    return Difference(float(joined[:, 1].sum() / joined[:, 0].sum()), low, high, len(joined), over)


def by_position(outcomes: Sequence[Outcome]) -> list[dict[str, float]]:
    """Loss by position in the document, all documents together: log-spaced bins with their tokens and nats per token."""
    tokens: dict[int, int] = {}
    nats: dict[int, float] = {}
    ends: dict[int, int] = {}
    for outcome in outcomes:
        for first, last, total in outcome.bins:
            tokens[first] = tokens.get(first, 0) + last - first
            nats[first] = nats.get(first, 0.0) + total
            ends[first] = max(ends.get(first, 0), last)
    return [
        {"first": first, "last": ends[first], "tokens": tokens[first], "nats_per_token": nats[first] / tokens[first]}
        for first in sorted(tokens)
    ]


def _bootstrap(sums: NDArray[np.float64]) -> NDArray[np.float64] | None:
    """[resamples, columns]: sums over units drawn with replacement; None with one unit."""
    count = len(sums)
    if count < LEAST_UNITS:
        return None
    generator = np.random.default_rng(0)
    drawn = np.empty((RESAMPLES, sums.shape[1]))
    step = max(1, (1 << 22) // count)  # so many resamples at a time: memory stays bounded with a million documents
    for first in range(0, RESAMPLES, step):
        chosen = generator.integers(0, count, (min(step, RESAMPLES - first), count))
        drawn[first : first + step] = sums[chosen].sum(1)
    return drawn


def _middle(values: NDArray[np.float64]) -> tuple[float, float]:
    low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def _exp(x: float) -> float:
    return math.exp(x) if x < math.log(1e300) else math.inf
