"""Verbatim memory: tables of what followed each wording, for as long as the document lasts.

Long-term memory learns what to write under which key. This one need not: the key is the wording itself, a hash of the last
tokens, and what is written under it is the token that followed. It is the delta rule with keys of which one element is 1:

    row <- row + strength * (value - row)          value: learned features of the token that followed, of mean square one

so reading and writing touch one row per token, whatever the number of rows, and no row can grow beyond what is written to it.

- one table per length of wording (`contexts`); tables belong to the model, and all memory layers read them
- wordings end with their segment: the first tokens of a segment have shorter ones
- a segment's tokens read what earlier segments wrote, like every other level of memory

Axes: b lane, s segment, t token of a segment, c table, r row, v value feature, d feature.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from lm.config import ModelConfig, VerbatimConfig
from lm.model.delta import ANSWER_FLOOR, Unit
from lm.model.state import exact

MULTIPLIER = 6364136223846793005
"""Of the hash (Knuth's linear congruential generator)."""


NOTHING = -1
"""Stands for the tokens before a segment."""


def addresses(tokens: Tensor, config: VerbatimConfig) -> Tensor:
    """The row of each table that the wording up to each of the tokens `[b, s, t]` of whole segments points at [b, s, c, t]."""
    tokens, t = tokens.long(), tokens.shape[-1]
    return _rows(lambda lag: F.pad(tokens[..., : max(0, t - lag)], (min(lag, t), 0), value=NOTHING), config)


def addresses_at(segment: Tensor, offsets: Tensor, config: VerbatimConfig) -> Tensor:
    """The same [b, 1, c, n] of the tokens at `offsets [b, n]` of open segments `[b, t]`."""

    def earlier(lag: int) -> Tensor:
        places = offsets - lag
        found = segment.gather(1, places.clamp(0, segment.shape[1] - 1))
        return found.masked_fill(places < 0, NOTHING)[:, None]

    return _rows(earlier, config)


def _rows(earlier: Callable[[int], Tensor], config: VerbatimConfig) -> Tensor:
    """The rows of all tables, from the tokens so many places `earlier`."""
    rows = []
    for length in config.contexts:
        if length == 1:  # every token has a row of its own, where there are as many
            rows.append(earlier(0).remainder(config.rows))
            continue
        mixed: Tensor | int = 0
        for lag in range(length - 1, -1, -1):
            mixed = (mixed + earlier(lag) + 2) * MULTIPLIER  # overflow wraps around
        rows.append((cast(Tensor, mixed) >> 33).remainder(config.rows))  # the upper bits are the well-mixed ones
    return torch.stack(rows, 2)


def table_shape(config: ModelConfig) -> tuple[int, ...]:
    """Of a lane's tables [c, r, v]; nothing where there are none."""
    verbatim = config.memory and config.memory.verbatim
    return (len(verbatim.contexts), verbatim.rows, verbatim.width) if verbatim else (0, 0, 0)


class Entries(NamedTuple):
    """What segments write: the token at t under the wording up to t - 1, so there are t - 1 of each."""

    rows: Tensor  # [b, s, c, t - 1] where to
    last: Tensor  # [b, s, c, t - 1] bool: no later token of the segment writes to the same row
    keep: Tensor  # [b, s, c, t - 1] what is left of the row, where it is the last
    add: Tensor  # [b, s, c, t - 1, v] and what all that write to it in this segment put there


class VerbatimWrite(nn.Module):
    """Values of tokens, from their embedding, and how strongly each is written, from what the first memory layer makes of it."""

    def __init__(self, width: int, config: VerbatimConfig) -> None:
        super().__init__()
        self.width, tables = config.width, len(config.contexts)
        self.value = nn.Linear(width, tables * config.width, bias=False)
        self.strength = nn.Linear(width, tables)

    def forward(self, embedded: Tensor, h: Tensor, rows: Tensor, ids: Tensor | None = None) -> Entries:
        """What whole segments write: tokens with the embedding `[b, s, t, d]`, the features `h [b, s, t, d]` and the addresses
        `rows [b, s, c, t]`. With `ids [b, s, t]`, `embedded [vocabulary, d]` is that of all ids: where they are fewer than the
        tokens, there is less to project."""
        values = self.value(F.layer_norm(exact(embedded), embedded.shape[-1:])).unflatten(-1, (rows.shape[2], -1))
        values = Unit.apply(values) * math.sqrt(self.width)
        if ids is not None:
            values = F.embedding(ids, values.flatten(1)).unflatten(-1, values.shape[1:])
        values = values[:, :, 1:].transpose(2, 3)
        wish = self.strength(h[:, :, 1:]).mT[..., None]  # [b, s, c, t - 1, 1]
        kept = F.logsigmoid(-wish)  # log(1 - strength), of which nothing can become infinite
        rows = rows[..., :-1]
        same = rows[..., :, None] == rows[..., None, :]
        together = same.to(kept.dtype)
        faded = together * kept.mT
        left = F.logsigmoid(wish) + faded.triu(1).sum(-1, keepdim=True)  # of each write, when the segment has ended
        return Entries(rows, ~same.triu(1).any(-1), faded.sum(-1).exp(), together @ (left.exp() * values))


class Recital(torch.autograd.Function):
    """Segments read their rows of the tables and then write, one after the other; only the rows that are met are touched.

    Takes tables [b, c, r, v], where to read [b, s, c, t], the writes, and where a document starts anew [b, s] (or None).
    Returns what is read [b, s, c, t, v] and the tables after.
    """

    @staticmethod
    def forward(
        ctx: Any, tables: Tensor, reads: Tensor, rows: Tensor, last: Tensor, keep: Tensor, add: Tensor, starts: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        v = tables.shape[-1]
        reads, rows = (_flat(places, tables).transpose(0, 1) for places in (reads, rows))
        after = tables.clone()
        flat, found, before, chosen = after.view(-1, v), [], [], []
        anew = [False] * len(reads) if starts is None else starts.any(0).tolist()
        for s, (read, row, own) in enumerate(zip(reads, rows, last.transpose(0, 1), strict=True)):
            if starts is not None and anew[s]:
                after[starts[:, s]] = 0
            found.append(flat[read])
            chosen.append(row[own])
            before.append(flat[chosen[-1]])
            flat[chosen[-1]] = before[-1] * keep[:, s][own][:, None] + add[:, s][own]
        ctx.save_for_backward(reads, last, keep, starts, *before, *chosen)
        ctx.anew, ctx.shape = anew, tables.shape
        ctx.set_materialize_grads(False)  # the tables after a step are cut off: zeros for them would be the largest tensor here
        return torch.stack(found, 1), after

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, for_found: Tensor | None, for_after: Tensor | None) -> tuple[Tensor | None, ...]:
        reads, last, keep, starts, *rest = ctx.saved_tensors
        before, chosen = rest[: len(reads)], rest[len(reads) :]
        back = keep.new_zeros(ctx.shape) if for_after is None else for_after.clone()
        flat = back.view(-1, back.shape[-1])
        for_keep, for_add = torch.zeros_like(keep), keep.new_zeros(*keep.shape, back.shape[-1])
        for s in reversed(range(len(reads))):
            own, late = last[:, s], flat[chosen[s]]
            for_add[:, s][own] = late
            for_keep[:, s][own] = (late * before[s]).sum(-1)
            flat[chosen[s]] = late * keep[:, s][own][:, None]
            if for_found is not None:
                flat.index_add_(0, reads[s].flatten(), for_found[:, s].flatten(0, -2))
            if starts is not None and ctx.anew[s]:
                back[starts[:, s]] = 0
        return back, None, None, None, for_keep, for_add, None


def recite(tables: Tensor, reads: Tensor, entries: Entries, starts: Tensor | None) -> tuple[Tensor, Tensor]:
    """What each token of whole segments finds [b, s, c, t, v] under `reads [b, s, c, t]`, and the tables after them."""
    found, after = Recital.apply(tables, reads, *entries, starts)
    return found, after


def look_up(tables: Tensor, reads: Tensor) -> Tensor:
    """The rows [b, s, c, t, v] at `reads [b, s, c, t]` of tables that nothing is written to."""
    return tables.reshape(-1, tables.shape[-1])[_flat(reads, tables)]


def _flat(rows: Tensor, tables: Tensor) -> Tensor:
    """Rows [b, s, c, t] as rows of all lanes' tables laid one behind the other."""
    b, c, r, _ = tables.shape
    return rows + torch.arange(b * c, device=tables.device).view(b, 1, c, 1) * r


class VerbatimRead(nn.Module):
    """What a layer makes of the rows its tokens found: each table's gated by the token."""

    def __init__(self, width: int, config: VerbatimConfig) -> None:
        super().__init__()
        tables = len(config.contexts)
        self.gate = nn.Linear(width, tables)
        self.out = nn.Linear(tables * config.width, width, bias=False)

    def forward(self, h: Tensor, found: Tensor) -> Tensor:
        """What to add to the residual stream of tokens `h [b, s, t, d]` that found `[b, s, c, t, v]`."""
        return self.out(self.answers(h, found).flatten(-2))

    def answers(self, h: Tensor, found: Tensor) -> Tensor:
        """What each table gives to each token [b, s, t, c, v]; what was told once counts as much as what was told often."""
        scale = (found.square().mean(-1, keepdim=True) + ANSWER_FLOOR).rsqrt().transpose(2, 3)
        return found.transpose(2, 3) * (scale * self.gate(h).sigmoid()[..., None])
