"""Long-term memory as fast weights: each fragment an associative matrix, written by the delta rule.

A write moves what the matrix answers to a key towards a value: M <- M + strength * key (value - M^T key)^T. All writes of a
segment together are one affine map of the memory before it, M <- P M + Q, exact by a triangular solve: so the maps of all
segments are computed at once, and only their application goes segment by segment.

Axes: b lane, s segment, r row (token or slot), c fragment, k key feature, v value feature.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm.config import DeltaConfig, MemoryConfig

MAX_NORM = 4.0
"""A fragment's root mean square never exceeds this: conflicting writes cannot pump it up over millions of tokens."""

ANSWER_FLOOR = 1e-3
"""Added to an answer's mean square before it is normalised: an empty memory's answers stay small instead of being blown up."""


class Transition(NamedTuple):
    """What writing a segment does to a memory: M <- keep @ M + add."""

    keep: Tensor  # [b, s, c, k, k]
    add: Tensor  # [b, s, c, k, v]

    def unbind(self) -> list["Transition"]:
        """The maps of the single segments."""
        return [Transition(keep, add) for keep, add in zip(self.keep.unbind(1), self.add.unbind(1), strict=True)]


def advance(memory: Tensor, transition: Transition) -> Tensor:
    """The memory [b, c, k, v] after a segment."""
    memory = transition.keep @ memory + transition.add
    rms = memory.square().mean((-2, -1), keepdim=True).add(1e-12).sqrt()
    return memory * (MAX_NORM / rms).clamp(max=1)


class DeltaWrite(nn.Module):
    """Keys, values and write strengths from rows of features, as one map per segment."""

    def __init__(self, width: int, fragments: int, config: DeltaConfig, convolution: int) -> None:
        super().__init__()
        self.top_k = config.top_k
        self.key = nn.Linear(width, fragments * config.key_width, bias=False)
        self.value = nn.Linear(width, fragments * config.value_width, bias=False)
        self.strength = nn.Linear(width, fragments, bias=False)
        self.strength_bias = nn.Parameter(torch.linspace(-1.0, -4.0, fragments))
        # fragments start with different time scales, from ten segments to thousands
        self.time_scale = nn.Parameter(torch.linspace(0.5, 2.0, fragments))
        if convolution > 1:  # keys start as those of the token before: "this followed that" is what is most worth keeping
            taps = torch.randn(convolution, fragments * config.key_width) * 0.02
            taps[1] += 1.0
            self.taps: Tensor | None = nn.Parameter(taps)
        else:
            self.taps = None

    @property
    def retention(self) -> Tensor:
        """What each fragment keeps of itself over a segment [c]."""
        return (4 * self.time_scale).sigmoid()  # near 1 the slope is flat; the factor gives the weight a gradient worth having

    def forward(self, h: Tensor) -> Transition:
        """The maps of the segments `h [b, s, r, d]`."""
        keys = self.key(h)
        if self.taps is not None:
            lagged = (F.pad(keys, (0, 0, lag, 0))[..., : keys.shape[-2], :] for lag in range(1, len(self.taps)))
            keys = sum((tap * x for tap, x in zip(self.taps[1:], lagged, strict=True)), self.taps[0] * keys)
        keys = F.normalize(keys.unflatten(-1, (len(self.time_scale), -1)).transpose(2, 3), dim=-1)  # [b, s, c, r, k]
        values = self.value(h).unflatten(-1, (len(self.time_scale), -1)).transpose(2, 3)
        strength = self.strengths(h)
        overlap = (strength * keys) @ keys.mT
        solved = torch.linalg.solve_triangular(
            overlap.tril(-1), strength * torch.cat([keys, values], -1), upper=False, unitriangular=True
        )
        erased, written = solved.split([keys.shape[-1], values.shape[-1]], -1)
        keep = torch.eye(keys.shape[-1], device=h.device) - keys.mT @ erased
        return Transition(self.retention[:, None, None] * keep, keys.mT @ written)

    def strengths(self, h: Tensor) -> Tensor:
        """How strongly each row is written to each fragment [b, s, c, r, 1]."""
        strength = (self.strength(h) + self.strength_bias).sigmoid().mT[..., None]
        if self.top_k is not None and self.top_k < strength.shape[-2]:
            winners, places = strength.topk(self.top_k, -2)
            strength = torch.zeros_like(strength).scatter(-2, places, winners)
        return strength


class DeltaRead(nn.Module):
    """A token's queries to the associative matrices; the answers are normalised, and each fragment's gated by the token."""

    def __init__(self, width: int, memory_width: int, config: MemoryConfig) -> None:
        super().__init__()
        c, self.key_width, value_width = config.fragments, config.delta.key_width, config.delta.value_width
        self.query = nn.Linear(width, c * self.key_width, bias=False)
        self.gate = nn.Linear(width, c)
        self.norm = nn.Parameter(torch.ones(c, value_width))
        self.up = nn.Linear(c * value_width, memory_width, bias=False)

    def forward(self, h: Tensor, memory: Tensor) -> Tensor:
        """U_l [b, s, t, d] for tokens `h [b, s, t, d]` of segments whose memory is `[b, s, c, k, v]`."""
        return self.up(self.answers(h, memory).flatten(-2))

    def answers(self, h: Tensor, memory: Tensor) -> Tensor:
        """What each fragment gives to each token [b, s, t, c, v]."""
        query = F.normalize(self.query(h).unflatten(-1, (-1, self.key_width)).transpose(2, 3), dim=-1)  # [b, s, c, t, k]
        answer = (query @ memory).transpose(2, 3)  # [b, s, t, c, v]
        scale = (answer.square().mean(-1, keepdim=True) + ANSWER_FLOOR).rsqrt()
        return answer * (scale * self.gate(h).sigmoid()[..., None]) * self.norm
