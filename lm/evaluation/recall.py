"""Key-value recall across segments: what a memory must be able to do, and a window cannot.

A sample, with fresh random keys and values: BOS k1 v1 k2 v2 ... | noise | ... | noise | ? k v' where v' is asked for.

- keys are distinct within a sample, values are drawn freely: 64 of each, so that guessing gives 1/64
- the pairs fill the first segment(s); `distance` is how many segments behind the last of those the query's segment is
- between them stands noise from an alphabet of its own, and in each of those segments `distractors` pairs of other keys
- several queries of a sample are of different keys; each is followed by its answer, as in text

Axes: b lane (sample), t token.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lm.data.words import EOS, UNK, WordTokenizer
from lm.errors import collecting
from lm.evaluation.tasks_training import TaskBatch
from lm.model import PMI

SYMBOLS = 64
"""Keys, values and noise tokens there are."""
VALUES, NOISE, QUERY = SYMBOLS, 2 * SYMBOLS, 3 * SYMBOLS
"""Where their ids begin (keys begin at 0), and the id that announces a query."""
CHANCE = 1 / SYMBOLS
CALL_SEGMENTS = 8
"""Segments of a call when samples are read to be asked."""


def recall_tokenizer() -> WordTokenizer:
    """The vocabulary of the task: k0.. v0.. n0.. and `?`."""
    words = [f"{kind}{i}" for kind in "kvn" for i in range(SYMBOLS)]
    return WordTokenizer([*words, "?", EOS, UNK])


@dataclass(frozen=True)
class RecallTask:
    """One setting of the task."""

    segment: int = 64
    pairs: int = 8
    queries: int = 1
    distance: int = 8
    distractors: int = 0

    def __post_init__(self) -> None:
        with collecting() as problems:
            if not 1 <= self.pairs <= SYMBOLS:
                problems.append(f"--pairs {self.pairs}: must be 1..{SYMBOLS}, the number of keys there are")
            most = min(self.pairs, self.segment // 3)
            if not 1 <= self.queries <= most:
                problems.append(f"--queries {self.queries}: must be 1..{most}, of different pairs, 3 tokens each in one segment")
            if self.distance < 1:
                problems.append(f"distance {self.distance}: must be 1 segment or more")
            others = max(0, min(SYMBOLS - self.pairs, self.segment // 2))
            if not 0 <= self.distractors <= others:
                problems.append(
                    f"--distractors {self.distractors}: must be 0..{others}: other keys than those of the {self.pairs} pairs"
                )

    @property
    def segments(self) -> int:
        """Segments of a sample: those of the pairs, then `distance` more, the last of which holds the queries."""
        return -(-(1 + 2 * self.pairs) // self.segment) + self.distance

    def draw(self, samples: int, rng: np.random.Generator, bos: int) -> TaskBatch:
        """Fresh samples, each a document of its own; the mask is on the queries' answers."""
        shape = (samples, self.segments * self.segment)
        tokens = rng.integers(NOISE, NOISE + SYMBOLS, shape)
        keys = rng.permuted(np.tile(np.arange(SYMBOLS), (samples, 1)), axis=1)
        values = rng.integers(VALUES, VALUES + SYMBOLS, (samples, self.pairs))
        tokens[:, 0] = bos
        tokens[:, 1 : 1 + 2 * self.pairs : 2] = keys[:, : self.pairs]
        tokens[:, 2 : 2 + 2 * self.pairs : 2] = values
        for s in range(self.segments - self.distance, self.segments - 1 if self.distractors else 0):
            first, last = s * self.segment, s * self.segment + 2 * self.distractors
            others = rng.permuted(keys[:, self.pairs :], axis=1)
            tokens[:, first:last:2] = others[:, : self.distractors]
            tokens[:, first + 1 : last : 2] = rng.integers(VALUES, VALUES + SYMBOLS, (samples, self.distractors))
        asked = rng.permuted(np.tile(np.arange(self.pairs), (samples, 1)), axis=1)[:, : self.queries]
        first, last = shape[1] - self.segment, shape[1] - self.segment + 3 * self.queries
        tokens[:, first:last:3] = QUERY
        tokens[:, first + 1 : last : 3] = np.take_along_axis(keys, asked, 1)
        tokens[:, first + 2 : last : 3] = np.take_along_axis(values, asked, 1)
        mask = np.zeros(shape, dtype=bool)
        mask[:, first + 1 : last : 3] = True
        starts = torch.zeros(samples, self.segments, dtype=torch.bool)
        starts[:, 0] = True
        lengths = torch.full((samples,), last - 1)
        rolled = np.roll(tokens, -1, 1)
        return TaskBatch(torch.from_numpy(tokens), torch.from_numpy(rolled), torch.from_numpy(mask), starts, lengths)


@torch.no_grad()
def correct(model: PMI, batch: TaskBatch) -> Tensor:
    """Whether the likeliest token is the answer, for each query [b, queries]; the samples are read as sessions are.

    In calls of a few segments with carried state: what is computed takes the same memory at every distance.
    """
    asked = batch.mask[0].nonzero().squeeze(-1)
    t, end = model.config.segment, int(asked[-1]) + 1
    base = int(asked[0]) // t * t  # the queries' segment is a call of its own
    state = model.initial_state(batch.tokens.shape[0])
    for first in range(0, base, CALL_SEGMENTS * t):
        _, state = model(batch.tokens[:, first : min(first + CALL_SEGMENTS * t, base)].to(model.device), state)
    hidden, _ = model(batch.tokens[:, base:end].to(model.device), state)
    found = model.head.logits(hidden[:, (asked - base).to(model.device)]).argmax(-1)
    return found.cpu() == batch.targets[:, asked]
