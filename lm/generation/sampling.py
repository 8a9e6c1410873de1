"""Sampling: the next token as a pure function of (logits, settings, last ids, seed, stream, position), batched over lanes.

    ids, scores = sample(logits, Batch.of([Sampling(temperature=0.8, seed=1)]), recent, position)

- randomness is counter-based (Philox4x32-10): key = seed, counter = (position, stream). No generator is carried along, so a
  replayed position draws the same token, in any company; a fork, or each of n choices, takes another stream
- order: repetition penalty, temperature, top-k, top-p, min-p; what is tied with the last token kept is kept too
- one uniform number per token, looked up in the cumulated probabilities in the order of the ids

Axes: b lane, v vocabulary.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lm.errors import UserError

RECENT = 256
"""Last ids that the repetition penalty looks at."""
BLANK = -1
"""Stands in `recent` where a sequence is shorter than that."""
LARGEST = 2**63 - 1
"""Of seeds and streams."""


@dataclass(frozen=True)
class Sampling:
    """How one sequence's tokens are drawn."""

    temperature: float = 0.8
    """0 takes the likeliest token; higher is wilder."""
    top_k: int = 0
    """Draw from the k likeliest only (0: all)."""
    top_p: float = 1.0
    """Draw from the likeliest tokens that together have this probability."""
    min_p: float = 0.0
    """Leave out tokens less likely than this share of the likeliest one."""
    repetition_penalty: float = 1.0
    """Above 1: scores of tokens among the last 256 are divided (if positive) or multiplied (if negative) by it."""
    seed: int = 0
    stream: int = 0
    """Which of the independent streams of this seed; a fork, and each of n choices, has its own."""

    def problems(self) -> Iterator[str]:
        """What is wrong with the values, each with what is allowed."""
        ranges: dict[str, tuple[float, float]] = {
            "temperature": (0, 100), "top_k": (0, 2**31), "top_p": (0, 1), "min_p": (0, 1), "repetition_penalty": (0.01, 100),
            "seed": (0, LARGEST), "stream": (0, LARGEST),
        }  # fmt: skip
        for name, (low, high) in ranges.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
                yield f"{name}: {value!r} must be between {low} and {high}"
            elif name in ("top_k", "seed", "stream") and not isinstance(value, int):
                yield f"{name}: {value!r} must be a whole number"
        if self.top_p == 0:
            yield "top_p: 0 leaves no token to draw; use temperature 0 for the likeliest one"

    def checked(self) -> "Sampling":
        """Itself; UserError with every problem if a value is out of range."""
        problems = list(self.problems())
        if problems:
            raise UserError(problems)
        return self

    def replace(self, **changes: float | int) -> "Sampling":
        """A copy with other values."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]


class Batch(NamedTuple):
    """The settings of several lanes as tensors [b]."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    penalty: Tensor
    seed: Tensor
    stream: Tensor

    @classmethod
    def of(cls, lanes: Sequence[Sampling], device: torch.device | str = "cpu") -> "Batch":
        """The settings of `lanes`, in their order."""

        def floats(name: str) -> Tensor:
            return torch.tensor([getattr(lane, name) for lane in lanes], dtype=torch.float32, device=device)

        def integers(name: str) -> Tensor:
            return torch.tensor([getattr(lane, name) for lane in lanes], dtype=torch.int64, device=device)

        return cls(
            floats("temperature"), integers("top_k"), floats("top_p"), floats("min_p"), floats("repetition_penalty"),
            integers("seed"), integers("stream"),
        )  # fmt: skip

    def select(self, lanes: Tensor) -> "Batch":
        """The settings of some lanes."""
        return Batch(*(x[lanes] for x in self))


def sample(logits: Tensor, settings: Batch, recent: Tensor, position: Tensor) -> Tensor:
    """The ids [b] at `position [b]`, from `logits [b, v]` (-inf: never) and the last ids `recent [b, 256]`, in any order."""
    scores = penalise(logits.float(), settings.penalty, recent)
    chosen = scores.argmax(-1)
    drawn = (settings.temperature > 0).nonzero().squeeze(-1)
    if len(drawn):
        everyone = len(drawn) == len(chosen)
        mine = settings if everyone else settings.select(drawn)
        where = position if everyone else position[drawn]
        found = _draw(scores if everyone else scores[drawn], mine, uniform(mine.seed, mine.stream, where))
        chosen = found if everyone else chosen.index_copy(0, drawn, found)
    return chosen


def last_ids(ids: Sequence[int], end: int, device: torch.device | str = "cpu") -> Tensor:
    """`recent [256]` of a sequence of `end` ids of which `ids` are the last: the id at position p stands at p modulo 256."""
    recent = torch.full((RECENT,), BLANK, device=device)
    known = list(ids[-RECENT:])
    recent[torch.arange(end - len(known), end, device=device) % RECENT] = torch.tensor(known, dtype=torch.int64, device=device)
    return recent


def remember(recent: Tensor, position: Tensor, ids: Tensor) -> None:
    """Write the ids at `position [b]` into `recent [b, 256]`, in the place of those that are now too old."""
    recent.scatter_(1, (position % RECENT)[:, None], ids[:, None])


def logprobs(logits: Tensor, chosen: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The model's own log-probabilities: of the chosen ids [b], and the `count` likeliest ids [b, count] with theirs."""
    scores = logits.float().log_softmax(-1)
    top = scores.topk(min(count, scores.shape[-1]), -1)
    return scores.gather(-1, chosen[:, None]).squeeze(-1), top.indices, top.values


def penalise(logits: Tensor, penalty: Tensor, recent: Tensor) -> Tensor:
    """`logits` with the repetition penalty applied, once to each id in `recent`."""
    if bool((penalty == 1).all()):
        return logits
    # blanks go to a column behind the vocabulary
    seen = torch.zeros(logits.shape[0], logits.shape[1] + 1, dtype=torch.bool, device=logits.device)
    seen.scatter_(1, torch.where(recent < 0, logits.shape[1], recent), True)
    factor = penalty[:, None]
    return torch.where(seen[:, :-1], torch.where(logits > 0, logits / factor, logits * factor), logits)


def _draw(scores: Tensor, settings: Batch, number: Tensor) -> Tensor:
    """Ids [b] drawn from penalised `scores [b, v]` by a uniform number [b] each."""
    best = scores.amax(-1, keepdim=True)
    scores = (scores - best) / settings.temperature[:, None]  # from the top, so that no temperature overflows
    least = torch.where(settings.min_p > 0, settings.min_p.log(), -math.inf)[:, None]
    ranked = (settings.top_k > 0) & (settings.top_k < scores.shape[-1])
    if bool(ranked.any()):
        most = int(settings.top_k[ranked].max())
        kth = scores.topk(most, -1).values.gather(-1, (settings.top_k.clamp(1, most) - 1)[:, None])
        least = torch.where(ranked[:, None], torch.maximum(least, kth), least)
    if bool((settings.top_p < 1).any()):
        ordered = scores.masked_fill(scores < least, -math.inf).sort(-1, descending=True).values
        mass = ordered.double().softmax(-1).cumsum(-1)
        kept = (mass < settings.top_p[:, None]).sum(-1, keepdim=True).clamp(max=scores.shape[-1] - 1)  # as many, and one more
        last = ordered.gather(-1, kept)
        least = torch.where(settings.top_p[:, None] < 1, torch.maximum(least, last), least)
    chances = scores.masked_fill(scores < least, -math.inf).double().softmax(-1).cumsum(-1)
    # below the total, so that a number next to 1 still falls on a token that has a chance
    target = (number * chances[:, -1]).clamp(max=chances[:, -1].nextafter(torch.zeros_like(number)))
    return torch.searchsorted(chances, target[:, None], right=True).squeeze(-1)


# --- random numbers ------------------------------------------------------------------------------------------------

_LOW = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def uniform(seed: Tensor, stream: Tensor, position: Tensor) -> Tensor:
    """Numbers in [0, 1) as float64 [b], a pure function of the three."""
    words = philox((position & _LOW, position >> 32 & _LOW, stream & _LOW, stream >> 32 & _LOW), (seed & _LOW, seed >> 32 & _LOW))
    return (words[0] << 21 | words[1] >> 11).double() * 2.0**-53


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3") on 32-bit words in int64 tensors."""
    a, b, c, d = counter
    k, j = key
    for _ in range(10):
        # a product of two 32-bit words wraps in int64, but its bits are right
        left, right = a * _MULTIPLIERS[0], c * _MULTIPLIERS[1]
        a, b, c, d = (right >> 32 & _LOW) ^ b ^ k, right & _LOW, (left >> 32 & _LOW) ^ d ^ j, left & _LOW
        k, j = k + _WEYL[0] & _LOW, j + _WEYL[1] & _LOW
    return a, b, c, d
