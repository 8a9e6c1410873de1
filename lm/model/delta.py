"""Long-term memory as fast weights: each fragment an associative matrix, written by the delta rule.

A write moves what the matrix answers to a key towards a value: M <- M + strength * key (value - M^T key)^T. All writes of a
segment together are one affine map of the memory before it, M <- P M + Q, exact by a triangular solve: so the maps of all
segments are computed at once, and only their application goes segment by segment.

Axes: b lane, s segment, r row (token or slot), c fragment, k key feature, v value feature.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm.config import DeltaConfig, MemoryConfig

MAX_NORM = 4.0
"""A fragment's root mean square never exceeds this: conflicting writes cannot pump it up over millions of tokens."""

ANSWER_FLOOR = 1e-3
"""Added to an answer's mean square before it is normalised: an empty memory's answers stay small instead of being blown up."""


STRETCH = 0.1
"""How far a hard gate's sigmoid reaches beyond 0 and 1 before it is cut."""


class Unit(torch.autograd.Function):
    """Vectors of length one (or zero). Its gradient from what is saved anyway: a third of the passes over memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp_min_(1e-12)
        unit = x / length
        ctx.save_for_backward(unit, length)
        return unit

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        unit, length = ctx.saved_tensors
        return torch.addcmul(grad, unit, (grad * unit).sum(-1, keepdim=True), value=-1).div_(length)


class Taps(torch.autograd.Function):
    """A causal convolution along each segment: sum over lags of taps[lag] * x[... , r - lag, :], nothing before the segment."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, taps: Tensor) -> Tensor:
        ctx.save_for_backward(x, taps)
        mixed = taps[0] * x
        for lag in range(1, min(len(taps), x.shape[-2])):
            mixed[..., lag:, :].addcmul_(taps[lag], x[..., :-lag, :])
        return mixed

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, taps = ctx.saved_tensors
        back, for_taps = taps[0] * grad, torch.zeros_like(taps)
        for lag in range(min(len(taps), x.shape[-2])):
            late, early = grad[..., lag:, :], x[..., : x.shape[-2] - lag, :]
            for_taps[lag] = (late * early).sum((0, 1, 2))
            if lag:
                back[..., :-lag, :].addcmul_(taps[lag], late)
        return back, for_taps


class Writes(torch.autograd.Function):
    """All writes of a segment together, from keys [..., r, k], values [..., r, v] and strengths [..., r, 1] of its rows.

    Row i writes strength_i (value_i - what the rows before it have left under key_i): a triangular system. Returns
    keys^T @ [what is erased, what is written]  [..., k, k + v]. The gradient is that of the composed operations, without their
    many passes over [r, r].
    """

    @staticmethod
    def forward(ctx: Any, keys: Tensor, values: Tensor, strength: Tensor) -> Tensor:
        given = strength * torch.cat([keys, values], -1)
        overlap = (given[..., : keys.shape[-1]] @ keys.mT).tril_(-1)
        solved = torch.linalg.solve_triangular(overlap, given, upper=False, unitriangular=True)
        ctx.save_for_backward(keys, strength, overlap, solved)
        return keys.mT @ solved

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        keys, strength, overlap, solved = ctx.saved_tensors
        back = torch.linalg.solve_triangular(overlap.mT, keys @ grad, upper=True, unitriangular=True)
        # a row is strength times something, so the gradient of its strength is that of the row, over the strength
        strengths = (back * solved).sum(-1, keepdim=True) / strength.clamp_min(1e-30)
        back = back * strength
        between = (back @ solved.mT).tril_(-1)
        own, values = back.split([keys.shape[-1], back.shape[-1] - keys.shape[-1]], -1)
        return own + solved @ grad.mT - between @ keys - between.mT @ keys, values, strengths


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


def gate(x: Tensor, kind: str) -> Tensor:
    """A share in 0..1 of `x`: `soft` never reaches the ends, `hard` does, and has no gradient there."""
    return x.sigmoid() if kind == "soft" else (x.sigmoid() * (1 + 2 * STRETCH) - STRETCH).clamp(0, 1)


class DeltaWrite(nn.Module):
    """Keys, values and write strengths from rows of features, as one map per segment."""

    def __init__(self, width: int, fragments: int, config: DeltaConfig, convolution: int) -> None:
        super().__init__()
        self.top_k, self.gates = config.top_k, config.gates
        self.key = nn.Linear(width, fragments * config.key_width, bias=False)
        self.value = nn.Linear(width, fragments * config.value_width, bias=False)
        self.strength = nn.Linear(width, fragments, bias=False)
        # a hard gate starts open for all fragments: where it is shut for every token, none could open it again
        self.strength_bias = nn.Parameter(torch.linspace(-1.0, -4.0 if config.gates == "soft" else -1.0, fragments))
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
        return gate(4 * self.time_scale, self.gates)  # near 1 the slope is flat; the factor gives a gradient worth having

    def forward(self, h: Tensor) -> Transition:
        """The maps of the segments `h [b, s, r, d]`."""
        keys = self.key(h)
        if self.taps is not None:
            keys = Taps.apply(keys, self.taps)
        keys = Unit.apply(keys.unflatten(-1, (len(self.time_scale), -1)).transpose(2, 3))  # [b, s, c, r, k]
        values = self.value(h).unflatten(-1, (len(self.time_scale), -1)).transpose(2, 3)
        erased, written = Writes.apply(keys, values, self.strengths(h)).split([keys.shape[-1], values.shape[-1]], -1)
        keep = torch.eye(keys.shape[-1], device=h.device) - erased
        return Transition(self.retention[:, None, None] * keep, written)

    def strengths(self, h: Tensor) -> Tensor:
        """How strongly each row is written to each fragment [b, s, c, r, 1]."""
        strength = self.opened(self.strength(h)).mT[..., None]
        if self.top_k is not None and self.top_k < strength.shape[-2]:
            winners, places = strength.topk(self.top_k, -2)
            strength = torch.zeros_like(strength).scatter(-2, places, winners)
        return strength

    def opened(self, wish: Tensor) -> Tensor:
        """Write strengths, before any competition, of what `strength` makes of the features."""
        return gate(wish + self.strength_bias, self.gates)


class ScaledLinear(nn.Linear):
    """A projection of features times `scale`: the factors go to its few rows instead of to every token's features."""

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:  # type: ignore[override]
        return F.linear(x, self.weight * scale)


class DeltaRead(nn.Module):
    """A token's queries to the associative matrices; the answers are normalised, and each fragment's gated by the token."""

    def __init__(self, width: int, memory_width: int, config: MemoryConfig) -> None:
        super().__init__()
        c, self.key_width, value_width = config.fragments, config.delta.key_width, config.delta.value_width
        self.query = nn.Linear(width, c * self.key_width, bias=False)
        self.gate = nn.Linear(width, c)
        self.norm = nn.Parameter(torch.ones(c, value_width))
        self.up = ScaledLinear(c * value_width, memory_width, bias=False)

    def forward(self, h: Tensor, memory: Tensor) -> Tensor:
        """U_l [b, s, t, d] for tokens `h [b, s, t, d]` of segments whose memory is `[b, s, c, k, v]`."""
        return self.up(self._gated(h, memory).flatten(-2), self.norm.flatten())

    def answers(self, h: Tensor, memory: Tensor) -> Tensor:
        """What each fragment gives to each token [b, s, t, c, v]."""
        return self._gated(h, memory) * self.norm

    def _gated(self, h: Tensor, memory: Tensor) -> Tensor:
        query = Unit.apply(self.query(h).unflatten(-1, (-1, self.key_width)).transpose(2, 3))  # [b, s, c, t, k]
        answer = (query @ memory).transpose(2, 3)  # [b, s, t, c, v]
        scale = (answer.square().mean(-1, keepdim=True) + ANSWER_FLOOR).rsqrt()
        return answer * (scale * self.gate(h).sigmoid()[..., None])
