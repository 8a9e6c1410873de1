"""The two-level memory (paper, section 2): working slots written by competition, consolidated into long-term memory.

- write: slots attend to a segment's tokens, top-k competition, gates; then consolidation into long-term memory
- read: tokens attend to working slots (U_w) and long-term memory (U_l); optionally U_l attends to U_w (the correction step)
- all projections of slots are folded: N slots x H heads are far fewer than T tokens, so W_q (M W_k)^T is built once per
  segment and tokens meet it directly. The same function as projecting every token, at a fraction of the cost
- everything here runs in float32, whatever the type of the decoder around it

Axes: b lane, s segment, t token of a segment, n slot, c fragment, h head, e feature of a head, d feature.
Every parameter is used in the `forward` of the module that owns it, so that sharded training can gather it there.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm.config import MemoryConfig, Remembering
from lm.model.attention import Span, attend
from lm.model.delta import DeltaRead, DeltaWrite, Transition, advance
from lm.model.state import Memory, Open, Readout, where_lanes
from lm.model.verbatim import VerbatimRead

MAX_RETENTION = 0.95
"""Ceiling of the forget gate: working memory then stays within 1 / (1 - 0.95) = 20 per element, however long the stream."""
NARROW = 16
"""Over fewer elements than these torch's softmax goes one by one on a processor, ten times slower."""


def matrix(*shape: int, fan_in: int) -> nn.Parameter:
    """A projection drawn with variance 1 / fan_in."""
    return nn.Parameter(torch.randn(*shape) / math.sqrt(fan_in))


def softmax(scores: Tensor) -> Tensor:
    """Over the last axis."""
    if scores.shape[-1] >= NARROW or scores.device.type != "cpu":
        return scores.softmax(-1)
    weights = (scores - scores.detach().amax(-1, keepdim=True)).exp()
    return weights / weights.sum(-1, keepdim=True)


class Competition(torch.autograd.Function):
    """Softmax over the last axis, of which the `top_k` largest are kept. Its gradient from what is kept, in few passes."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, top_k: int) -> Tensor:
        weights = softmax(scores)
        kept = weights * winners(weights, top_k)
        ctx.save_for_backward(weights, kept)
        return kept

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        weights, kept = ctx.saved_tensors
        grad = grad * kept
        return grad.addcmul_(weights, grad.sum(-1, keepdim=True), value=-1), None


def winners(weights: Tensor, top_k: int) -> Tensor:
    """Which are among the `top_k` largest of the last axis; of equal ones, some."""
    n = weights.shape[-1]
    if n >= NARROW or weights.numel() < NARROW**3 or weights.device.type != "cpu":
        return torch.zeros_like(weights, dtype=torch.bool).scatter_(-1, weights.topk(top_k, -1).indices, True)
    columns = weights.movedim(-1, 0).contiguous()  # topk, too, goes row by row: a rank by pairs is four times as fast
    rank = torch.zeros(columns.shape, dtype=torch.int8)
    for i, j in itertools.combinations(range(n), 2):
        behind = columns[i] < columns[j]
        rank[i] += behind
        rank[j] += ~behind
    return (rank < top_k).movedim(0, -1)


def compete(scores: Tensor, top_k: int | None) -> Tensor:
    """Softmax over the last axis, then only the `top_k` largest are kept (None: all). What is kept is not rescaled."""
    if top_k is None or top_k >= scores.shape[-1]:
        return softmax(scores)
    kept: Tensor = Competition.apply(scores, top_k)
    return kept


class WorkingWrite(nn.Module):
    """A segment's tokens compete for the slots; gates decide what is forgotten and what is taken in."""

    def __init__(self, width: int, memory_width: int, config: MemoryConfig) -> None:
        super().__init__()
        h, d, e = config.heads, memory_width, memory_width // config.heads
        self.top_k, self.gate = config.top_k, config.gate
        self.query = matrix(d, h, e, fan_in=d)
        self.key = matrix(h, e, width, fan_in=width)
        self.value = matrix(h, e, width, fan_in=width)
        self.norm_attended, self.norm_candidate = nn.LayerNorm(d), nn.LayerNorm(d)
        self.mlp = nn.Sequential(*(part for _ in range(config.mlp_layers) for part in (nn.Linear(d, d), nn.ReLU())))
        if self.gate != "none":
            gates = d if self.gate == "unit" else 1
            self.gate_slots = nn.Linear(d, 2 * gates, bias=False)
            self.gate_bias = nn.Parameter(torch.tensor([[0.0], [1.0]]).expand(2, gates).clone())

    def forward(self, working: Tensor, h: Tensor, perceived: Tensor | None, real: Tensor | None = None) -> Tensor:
        """New slots from slots [b, n, d], a segment's tokens `h [b, t, d]` and the gates' view of them [b, gates].

        Tokens that are not `real [b, t]` are padding and do not compete.
        """
        taken = (self.attention(working, h, real) @ h).unflatten(1, (self.query.shape[1], -1))  # [b, h, n, w]
        taken = torch.einsum("bhnw,hew->bnhe", taken, self.value).flatten(2)
        candidate = self.norm_candidate(working + self.mlp(self.norm_attended(working + taken)))
        if perceived is None:
            return candidate.tanh()
        take, keep = self.gates(working, perceived)
        return take * candidate.tanh() + MAX_RETENTION * keep * working

    def attention(self, working: Tensor, h: Tensor, real: Tensor | None = None) -> Tensor:
        """What each slot takes of each token [b, h * n, t]."""
        query = torch.einsum("bnd,dhe->bnhe", working, self.query) / math.sqrt(self.query.shape[2])
        scores = torch.einsum("bnhe,hew->bhnw", query, self.key).flatten(1, 2) @ h.mT
        if real is not None:
            scores.masked_fill_(~real[:, None], -torch.inf)
        return compete(scores, self.top_k)

    def gates(self, working: Tensor, perceived: Tensor) -> tuple[Tensor, Tensor]:
        """The input and the forget gates [b, n, ...]."""
        # [b, n, gate, ...]: what the tokens say counts for both gates (paper, appendix), what a slot says for each its own
        gates = self.gate_slots(working.tanh()).unflatten(-1, (2, -1)) + perceived[:, None, None] + self.gate_bias
        take, keep = gates.sigmoid().unbind(2)
        return take, keep


class SlotConsolidation(nn.Module):
    """Long-term slots take in the outer product of working and long-term slots, contracted to a slot again.

    paper: contracted with ones, as the published code computes it (after its LayerNorm that is nearly nothing);
    probe: contracted with a learned vector per fragment and head. The d x d product is never built.
    """

    def __init__(self, memory_width: int, config: MemoryConfig) -> None:
        super().__init__()
        self.heads = config.heads if config.consolidation == "probe" else 1
        self.norm = nn.LayerNorm(memory_width)
        e = memory_width // self.heads
        if config.consolidation == "probe":
            self.probe = nn.Parameter(torch.randn(config.fragments, self.heads, e) / math.sqrt(e))
        else:
            self.register_buffer("probe", torch.ones(1, 1, e), persistent=False)

    def forward(self, long_term: Tensor, working: Tensor) -> Tensor:
        """New long-term slots [b, c, n, d] from the old ones and the new working slots [b, n, d]."""
        heads = long_term.unflatten(-1, (self.heads, -1))  # [b, c, n, h, e]
        strength = torch.einsum("bcnhe,che->bcnh", heads, self.probe.expand(long_term.shape[1], -1, -1))
        product = strength[..., None] * working.unflatten(-1, (self.heads, -1))[:, None]
        return self.norm(long_term + product.flatten(-2))


class SlotReadout(nn.Module):
    """Projects one level's slots for reading: how tokens address them, and what each slot gives."""

    def __init__(self, width: int, memory_width: int, heads: int, outputs: int) -> None:
        super().__init__()
        d, e = memory_width, memory_width // heads
        self.query = matrix(width, heads, e, fan_in=width)
        self.key = matrix(d, heads, e, fan_in=d)
        self.value = matrix(d, heads, e, fan_in=d)
        # with the correction step, slots are read as its queries, or as U_w and the keys and values made of it
        self.further = matrix(heads, e, outputs, fan_in=d) if outputs else None

    def forward(self, slots: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """What `slots [b, n, d]` are addressed by [b, h * n, w], and what each gives to U [b, h, n, e] and to the correction."""
        key = torch.einsum("bnd,dhe->bnhe", slots, self.key) / math.sqrt(self.query.shape[2])
        address = torch.einsum("whe,bnhe->bhnw", self.query, key).flatten(1, 2)
        value = torch.einsum("bnd,dhe->bhne", slots, self.value)
        if self.further is None:
            return address, value, None
        return address, value, torch.einsum("bhne,hex->bhnx", value, self.further).flatten(1, 2)


def attended(weights: Tensor, values: Tensor) -> Tensor:
    """U: what weights [..., t, h, n] take of values [..., h, n, e], head beside head [..., t, d]."""
    return (weights.transpose(-3, -2) @ values).transpose(-3, -2).flatten(-2)


class Read(nn.Module):
    """What a token takes from memory: U_w, U_l, and U_wl where the correction step is on."""

    def __init__(self, width: int, memory_width: int, config: MemoryConfig) -> None:
        super().__init__()
        self.config = config
        if config.read == "both":
            self.alpha = nn.Parameter(torch.tensor([config.alpha]))
        if config.consolidation == "delta" and config.keeps_long_term:
            self.delta = DeltaRead(width, memory_width, config)
        self.out = nn.Linear(memory_width, width, bias=False)

    def forward(self, readout: Readout, h: Tensor, opened: Open, span: Span, donate: bool) -> tuple[Tensor, Open]:
        """Read for tokens `h [b, s, t, d]` of segments whose memory is `readout [b, s, ...]`; also the open part after."""
        u_w, u_l, corrects = self._answers(readout, h)
        if corrects is not None:
            assert u_l is not None
            u_l, opened = self._correct(u_l, *corrects, opened, span, donate)
        if u_w is None or u_l is None:
            return self.out(u_w if u_l is None else u_l), opened
        return self.out(torch.lerp(u_l, u_w, self.alpha)), opened

    def levels(self, readout: Readout, h: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """U_w and U_l [b, s, t, d]; with the correction step, U_l is its queries."""
        return self._answers(readout, h)[:2]

    def _answers(self, readout: Readout, h: Tensor) -> tuple[Tensor | None, Tensor | None, tuple[Tensor, Tensor] | None]:
        """Both levels, and of the correction step the keys and values, which are made of U_w."""
        own, others = self.attention(readout, h)
        u_w = u_l = corrects = None
        if own is not None:
            u_w = attended(own, readout.working)
            if self.config.correction:  # a product for each: cut out of one, their gradients would have to be joined again
                keys, values = readout.correcting.chunk(2, -1)
                corrects = own.flatten(-2) @ keys, own.flatten(-2) @ values
        if others is not None:
            u_l = others.flatten(-2) @ readout.long_term if self.config.correction else attended(others, readout.long_term)
        if self.config.keeps_long_term and self.config.consolidation == "delta":
            u_l = self.delta(h, readout.long_term)
        return u_w, u_l, corrects

    def attention(self, readout: Readout, h: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Weights of the working and of the long-term slots [b, s, t, heads, n]; None for a level without slots to read."""
        config, scores = self.config, h @ readout.address.mT
        own = others = None
        if config.read != "long_term":
            mine, scores = scores.tensor_split([config.heads * config.slots], -1)
            own = softmax(mine.unflatten(-1, (config.heads, -1)))
        if config.keeps_long_term and config.consolidation != "delta":
            others = compete(scores.unflatten(-1, (config.heads, -1)), config.top_k)
        return own, others

    def _correct(
        self, queries: Tensor, keys: Tensor, values: Tensor, opened: Open, span: Span, donate: bool
    ) -> tuple[Tensor, Open]:
        """U_wl: attention from U_l to U_w across the positions of a segment: up to the own one, where the span is causal."""
        q, k, v = (part.unflatten(-1, (self.config.heads, -1)) for part in (queries, keys, values))
        if span.aligned:
            return attend(q, k, v, None if span.causal else span.mask), opened
        opened = opened._replace(
            keys=span.put(opened.keys, k[:, 0], 0, donate), values=span.put(opened.values, v[:, 0], 0, donate)
        )
        own = span.mask[..., span.mask.shape[-1] - opened.keys.shape[1] :]
        return attend(q, opened.keys[:, None], opened.values[:, None], own), opened


class MemoryModule(nn.Module):
    """One set of memory weights: `scan` writes over segments, `readout` makes a memory readable, `read` reads it."""

    def __init__(self, model: Remembering) -> None:
        super().__init__()
        assert model.memory is not None
        config, width, d = model.memory, model.width, model.memory_width
        self.config, self.width = config, width
        delta = config.consolidation == "delta" and config.keeps_long_term
        slots = config.consolidation != "delta" and config.keeps_long_term
        if config.keeps_working:
            self.write = WorkingWrite(width, d, config)
            if config.gate != "none":
                self.gate_tokens = nn.Linear(width, d if config.gate == "unit" else 1, bias=False)
        if slots:
            self.consolidate = SlotConsolidation(d, config)
            self.readout_long_term = SlotReadout(width, d, config.heads, d if config.correction else 0)
        if delta and config.delta.source != "slots":
            self.delta_tokens = DeltaWrite(width, config.fragments, config.delta, config.delta.convolution)
        if delta and config.delta.source != "tokens":
            self.delta_slots = DeltaWrite(d, config.fragments, config.delta, convolution=1)
        if config.read != "long_term":
            self.readout_working = SlotReadout(width, d, config.heads, 2 * d if config.correction else 0)
        self.read = Read(width, d, config)
        if config.verbatim is not None:
            self.verbatim = VerbatimRead(width, config.verbatim)

    def initialise(self) -> None:
        """What is read adds nothing at first; a memory of tokens starts as an induction head.

        Its keys are those of the token before, its queries find what was written under the same token, and what is read stands
        where that value came from: "what followed this before" is one gradient step away from the prediction. Drawn at random
        instead, queries, keys and values must first find each other, which on real text they hardly do.
        """
        nn.init.zeros_(self.read.out.weight)
        if hasattr(self, "verbatim"):
            nn.init.zeros_(self.verbatim.out.weight)
            nn.init.zeros_(self.verbatim.gate.weight)
        if not hasattr(self, "delta_tokens"):
            return
        write, read = self.delta_tokens, self.read.delta
        with torch.no_grad():
            read.query.weight.copy_(write.key.weight)
            if read.up.weight.shape == write.value.weight.T.shape:
                read.up.weight.copy_(write.value.weight.T)

    def scan(self, memory: Memory, h: Tensor, starts: Tensor | None, initial: Memory) -> tuple[Memory, Memory]:
        """Write the segments `h [b, s, t, d]` one after the other.

        Returns the memory before each segment [b, s, ...] (what its tokens read) and the memory after the last.
        Where `starts [b, s]`, a document begins: the memory is `initial` again.
        """
        segments = range(h.shape[1])
        perceived: Sequence[Tensor | None] = [None for _ in segments]
        transitions: Sequence[Transition | None] = [None for _ in segments]
        if hasattr(self, "gate_tokens"):
            perceived = F.relu(self.gate_tokens(h), inplace=True).mean(2).unbind(1)
        if hasattr(self, "delta_tokens"):
            transitions = self.delta_tokens(h).unbind()
        before = []
        # unbind, not indexing: its gradient is one stack instead of a blank copy of the whole per segment
        for s, features in enumerate(h.unbind(1)):
            if starts is not None:
                memory = where_lanes(starts[:, s], initial, memory)
            before.append(memory)
            memory = self._step(memory, features, perceived[s], transitions[s])
        return Memory(*(torch.stack(level, 1) for level in zip(*before, strict=True))), memory

    def write_together(self, memory: Memory, h: Tensor, real: Tensor | None) -> Memory:
        """The memory after one set of perceptions `h [b, t, d]`, of which only `real [b, t]` count: the encoder's write.

        For memories of slots; the delta rule writes in an order, which a set does not have.
        """
        perceived = None
        if hasattr(self, "gate_tokens"):
            seen = F.relu(self.gate_tokens(h), inplace=True)
            share = None if real is None else real / real.sum(1, keepdim=True)
            perceived = seen.mean(1) if share is None else (share[:, None] @ seen)[:, 0]
        return self._step(memory, h, perceived, None, real)

    def _step(
        self, memory: Memory, h: Tensor, perceived: Tensor | None, transition: Transition | None, real: Tensor | None = None
    ) -> Memory:
        working, long_term = memory
        if hasattr(self, "write"):
            working = self.write(working, h, perceived, real)
        if hasattr(self, "consolidate"):
            long_term = self.consolidate(long_term, working)
        if transition is not None:
            long_term = advance(long_term, transition)
        if hasattr(self, "delta_slots"):
            long_term = advance(long_term, self.delta_slots(working[:, None]).unbind()[0])
        return Memory(working, long_term)

    def readout(self, memory: Memory) -> Readout:
        """The memory `[b, ...]` made ready for reading."""
        working, long_term = memory
        b = len(long_term)
        addresses = [long_term.new_zeros(b, 0, self.width)]
        gives, corrects, gives_long = (long_term.new_zeros(b, *(0 for _ in range(n))) for n in (3, 2, 3))
        if hasattr(self, "readout_working"):
            address, gives, further = self.readout_working(working)
            addresses.append(address)
            corrects = corrects if further is None else further
        if hasattr(self, "readout_long_term"):
            address, gives_long, further = self.readout_long_term(long_term.mean(1))
            addresses.append(address)
            gives_long = gives_long if further is None else further
        elif self.config.keeps_long_term:
            gives_long = long_term
        return Readout(torch.cat(addresses, 1), gives, corrects, gives_long)


def memory_shapes(model: Remembering) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of working and long-term memory per lane; a level that is not kept has no slots or fragments."""
    config, width = model.memory, model.memory_width
    if config is None:
        return (0, width), (0, 0, width)
    delta = (config.delta.key_width, config.delta.value_width)
    fragment = delta if config.consolidation == "delta" else (config.slots, width)
    return (
        (config.slots if config.keeps_working else 0, width),
        (config.fragments if config.keeps_long_term else 0, *fragment),
    )
