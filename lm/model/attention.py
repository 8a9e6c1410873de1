"""Causal attention over the own segment and a window of earlier keys, and the span that says where a call's tokens lie.

- a query sees every key of its own segment up to itself, and the last W keys of earlier segments
- rotary angles are offsets from a segment's start, never absolute positions: position 10,000,000 behaves as position 0
- cached keys are rotated about the start of the open segment; when segments close, what stays in the window is turned back

Axes: b lane, s segment, t token of a segment, w window row, h head, e feature of a head, d feature.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm.model.state import exact

MAX_TOKENS = 4096
"""Most tokens per lane in one parallel pass over whole segments; a longer call runs as several passes."""


class Rotary(nn.Module):
    """Rotation of queries and keys by their offset: neighbouring features are turned as one complex number.

    The last feature of an odd head stays as it is.
    """

    turns: Tensor

    def __init__(self, head_width: int, segment: int, base: float) -> None:
        super().__init__()
        self.turned = head_width // 2 * 2
        frequencies = base ** (-torch.arange(self.turned // 2, dtype=torch.float64) / (self.turned // 2))
        angles = torch.arange(max(segment, MAX_TOKENS) + segment, dtype=torch.float64)[:, None] * frequencies
        # pairs of real numbers, so that casting the model cannot drop a part; float64, so that a float64 model is exact
        self.register_buffer("turns", torch.stack([angles.cos(), angles.sin()], -1), persistent=False)

    def angles(self, offsets: Tensor, dtype: torch.dtype, back: bool = False) -> Tensor:
        """Complex turns [..., 1, e / 2] by `offsets` (any shape, 0 or more), or back by them; `dtype` of their parts."""
        turns = torch.view_as_complex(self.turns[offsets].to(dtype))[..., None, :]
        return turns.conj().resolve_conj() if back else turns

    def rotate(self, x: Tensor, angles: Tensor) -> Tensor:
        """`x [..., h, e]` turned by `angles`."""
        pairs = exact(x[..., : self.turned]).unflatten(-1, (-1, 2))
        if x.shape[-1] % 2:
            pairs = pairs.contiguous()
        turned = torch.view_as_real(torch.view_as_complex(pairs) * angles).flatten(-2).to(x.dtype)
        return turned if self.turned == x.shape[-1] else torch.cat([turned, x[..., self.turned :]], -1)


@dataclass(frozen=True)
class Span:
    """Where the tokens of one pass lie, the same for every layer: `segments` x `tokens` per lane.

    Aligned: whole segments, every lane at a boundary. Otherwise: part of each lane's one open segment, put at `rows`.
    """

    segments: int
    tokens: int
    angles: Tensor  # complex [b or 1, s, t, 1, e / 2]
    mask: Tensor  # [b * s or 1, 1, t, w + t] added to attention scores
    rows: tuple[Tensor, Tensor, Tensor] | None = None  # (lanes, columns of the call, offsets in the segment)
    causal: bool = True  # false: an encoder's span, where every position sees all that `mask [b or 1, 1, 1, t]` does not hide

    @property
    def aligned(self) -> bool:
        """Whether the span is whole segments."""
        return self.rows is None

    def put(self, buffer: Tensor, new: Tensor, first_row: int, donate: bool) -> Tensor:
        """`buffer [b, rows, ...]` with the span's tokens `new [b, t, ...]` written behind `first_row`."""
        assert self.rows is not None
        lanes, columns, offsets = self.rows
        buffer = buffer if donate else buffer.clone()
        buffer[lanes, first_row + offsets] = new[lanes, columns].to(buffer.dtype)
        return buffer


def aligned_span(rotary: Rotary, causal: Tensor, valid: Tensor) -> Span:
    """The span of whole segments under the mask `causal [t, w + t]`; `valid [b, s]` rows of each one's window hold something."""
    segments, tokens = valid.shape[1], causal.shape[0]
    window = causal.shape[1] - tokens
    offsets = torch.arange(segments * tokens, device=causal.device).view(1, segments, tokens)
    mask = causal[None, None]
    if window and bool((valid < window).any()):
        mask = mask.masked_fill(_blank(valid.reshape(-1, 1), window, tokens)[:, None, None], -torch.inf)
    return Span(segments, tokens, rotary.angles(offsets, causal.dtype), mask)


def encoder_span(x: Tensor, real: Tensor | None) -> Span:
    """The span of sets of positions `x [b, t, d]` that all see each other; those that are not `real [b, t]` are hidden."""
    mask = x.new_zeros(1 if real is None else x.shape[0], x.shape[1])
    if real is not None:
        mask = mask.masked_fill_(~real, -torch.inf)
    return Span(1, x.shape[1], x.new_zeros(0), mask[:, None, None], causal=False)


def partial_span(rotary: Rotary, causal: Tensor, valid: Tensor, offset: Tensor, counts: Tensor, t: int) -> Span:
    """The span of `counts [b]` tokens from `offset [b]` in each lane's open segment, `t` the most of them."""
    segment = causal.shape[0]
    window = causal.shape[1] - segment
    columns = torch.arange(t, device=offset.device)
    offsets = offset[:, None] + columns  # [b, t]
    last = torch.arange(-window, segment, device=offset.device) > offsets[..., None]  # [b, t, w + t]
    hidden = last | _blank(valid[:, None], window, segment)[:, None]
    mask = torch.zeros(hidden.shape, device=offset.device, dtype=causal.dtype).masked_fill_(hidden, -torch.inf)
    lanes, taken = (columns < counts[:, None]).nonzero(as_tuple=True)
    angles = rotary.angles(offsets.clamp(max=segment - 1)[:, None], causal.dtype)
    return Span(1, t, angles, mask[:, None], (lanes, taken, offsets[lanes, taken]))


def _blank(valid: Tensor, window: int, segment: int) -> Tensor:
    """[..., w + t]: window rows that hold nothing yet, the window's newest row being its last."""
    return torch.arange(-window, segment, device=valid.device) < -valid


def blocks(cached: Tensor, new: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """What each whole segment sees of a cache, and the cache after them.

    `cached [b, w + t, h, e]`, `new [b, s, t, h, e]` -> `[b, s, w + t, h, e]`, `[b, w + t, h, e]` with the open part blank.
    """
    s, t = new.shape[1:3]
    before = math.ceil(window / t)  # earlier segments that a window reaches into
    unreached = before * t - window
    old = cached[:, :window].to(new.dtype)
    rows = torch.cat([old, new.flatten(1, 2)], 1)
    after = F.pad(rows[:, rows.shape[1] - window :], (0, 0, 0, 0, 0, t))
    if s == 1:
        return rows[:, None], after
    padded = F.pad(rows, (0, 0, 0, 0, unreached, 0)) if unreached else rows
    earlier = padded.unflatten(1, (before + s, t))
    seen = torch.cat([*(earlier[:, i : i + s] for i in range(before)), new], 2)
    return seen[:, :, unreached:], after


class WindowAttention(nn.Module):
    """Multi-head attention over the own segment and the window."""

    def __init__(self, width: int, heads: int, window: int, rotary: Rotary) -> None:
        super().__init__()
        self.heads, self.window = heads, window
        self._rotary = [rotary]  # shared by all layers, owned by the decoder: not a submodule here
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, keys: Tensor, values: Tensor, span: Span, donate: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Attend from `x [b, s, t, d]`; returns what to add to the residual stream, and the caches after the span."""
        rotary = self._rotary[0]
        b, s, t, _ = x.shape
        qk, v = self.qkv(x).view(b, s, t, 3 * self.heads, -1).split([2 * self.heads, self.heads], 3)
        q, k = rotary.rotate(qk, span.angles).chunk(2, 3)
        if span.aligned:
            seen_k, keys = blocks(keys, k, self.window)
            seen_v, values = blocks(values, v, self.window)
        else:
            keys = span.put(keys, k[:, 0], self.window, donate)
            values = span.put(values, v[:, 0], self.window, donate)
            seen_k, seen_v = keys[:, None].to(q.dtype), values[:, None].to(q.dtype)
        mixed = attend(q, seen_k, seen_v, span.mask)
        return self.out(mixed), keys, values


MAX_SCORES = 1 << 24
"""Most scores that are laid out at once where attention is not fused: they are kept for the backward pass, about 100 MB."""


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Multi-head attention `[b, s, t, h, e]` x `[b, s, r, h, e]` -> `[b, s, t, h * e]`; causal where there is no mask."""
    flat_q, flat_k, flat_v = (part.flatten(0, 1).transpose(1, 2) for part in (q, k, v))
    mask = None if mask is None else mask.to(q.dtype)
    # on processors torch's fused attention takes three times as long to train in bfloat16 as products and a softmax (whose scores
    # are rounded to bfloat16 before it: a result is then off by 0.4 %, where the fused one is by 0.2 %)
    scores = flat_q.shape[:3].numel() * flat_k.shape[2]
    if mask is not None and q.requires_grad and q.dtype == torch.bfloat16 and q.device.type == "cpu" and scores <= MAX_SCORES:
        weights = ((flat_q * q.shape[-1] ** -0.5) @ flat_k.mT + mask).softmax(-1, dtype=torch.float32)
        mixed = weights.to(q.dtype) @ flat_v
    else:
        mixed = F.scaled_dot_product_attention(flat_q, flat_k, flat_v, attn_mask=mask, is_causal=mask is None)
    return mixed.transpose(1, 2).reshape(*q.shape[:3], -1)
