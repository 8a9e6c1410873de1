"""A look into the memory of one lane: what its slots hold, what its gates let through, and what its last segment reads.

    inspection = inspect_memory(model, state, tail)      # state: one lane at a boundary; tail: the ids since

    trace = trace_reads(model, ids)                      # which of the ids the reading of the last one goes back to

The model runs as always; hooks on its readers note what they were given, and the same parts are asked again for their weights.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm.model.decoder import PMI
from lm.model.memory import MemoryModule
from lm.model.state import Memory, Readout, State
from lm.model.verbatim import addresses, look_up, recite

Rows = list[list[float]]


@dataclass(frozen=True)
class LayerInspection:
    """The memory of one layer, through its last segment (t tokens). A part that the configuration does not have is None."""

    layer: int
    working_norms: list[float] | None
    """Length of each working slot [n]."""
    long_term_norms: Rows | None
    """Length of each row of long-term memory [c, slots or keys]."""
    take: list[float] | None
    """Mean input gate of each slot [n], were the segment written now."""
    keep: list[float] | None
    """Mean forget gate of each slot [n]."""
    working_attention: Rows | None
    """Share of each working slot in what a token reads, over all heads [t, n]."""
    long_term_attention: Rows | None
    """The same of the long-term slots [t, n]; of associative memory, the strength of each fragment's answer [t, c]."""
    long_term_kind: str
    """What the columns of that are: slot or fragment."""
    write_strength: Rows | None
    """Of associative memory: how strongly each token would be written to each fragment [t, c]."""
    verbatim_used: list[float] | None
    """Share of each verbatim table's rows that hold anything [tables]."""
    verbatim_answers: Rows | None
    """Length of what each verbatim table gives to each token [t, tables]."""


@dataclass(frozen=True)
class Inspection:
    """All memory layers."""

    position: int
    """Where the lane stands after its tail."""
    ids: list[int]
    """The ids of the last segment."""
    layers: list[LayerInspection]

    def row(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


@torch.inference_mode()
def inspect_memory(model: PMI, state: State, tail: Sequence[int]) -> Inspection:
    """Read `tail` behind a one-lane `state` at a boundary and look at the last segment; needs at least one id."""
    t = model.config.segment
    if not tail or state.lanes != 1 or int(state.position[0]) % t:
        raise ValueError("needs one lane at a boundary and at least one id behind it")
    last = (len(tail) - 1) % t + 1
    ids = torch.tensor([list(tail)], device=model.device)
    if len(tail) > last:
        _, state = model(ids[:, :-last], state)
    with _noting(model) as notes:
        _, after = model(ids[:, -last:], state)
    layers, memories = [], list(state.memories)
    used = state.verbatim[0].ne(0).any(-1).float().mean(-1)
    for j, (readout, h, found) in enumerate(notes):
        place = 0 if model.shared_state else j
        module = _module(model, j)
        look = _look(model.layers_with_memory[j], module, memories[place], readout, h)
        if found is not None:
            answers = module.verbatim.answers(h, found).norm(dim=-1)[0, 0]
            look = replace(look, verbatim_used=_listed(used), verbatim_answers=_listed(answers))
        layers.append(look)
        if model.shared_state:  # each layer writes what the one before has left
            memories[0] = module.scan(memories[0], h, None, memories[0])[1]
    return Inspection(int(after.position[0]), list(tail)[-last:], layers)


@contextmanager
def _noting(model: PMI) -> Iterator[list[tuple[Readout, Tensor, Tensor | None]]]:
    """What each memory layer's readers are given, in order: a readout, features, and what these found in verbatim tables."""
    notes: list[tuple[Readout, Tensor, Tensor | None]] = []

    def note(_: nn.Module, given: tuple[Any, ...]) -> None:
        notes.append((given[0], given[1], None))

    def note_found(_: nn.Module, given: tuple[Any, ...]) -> None:  # comes right behind the layer's own
        notes[-1] = (*notes[-1][:2], given[1])

    modules = [cast(MemoryModule, module) for module in model.memories]
    hooks = [module.read.register_forward_pre_hook(note) for module in modules]
    hooks += [module.verbatim.register_forward_pre_hook(note_found) for module in modules if model.wordings]
    try:
        yield notes
    finally:
        for hook in hooks:
            hook.remove()


def _look(layer: int, module: MemoryModule, memory: Memory, readout: Readout, h: Tensor) -> LayerInspection:
    """One layer; `h [1, 1, t, d]`."""
    config = module.config
    own, others = module.read.attention(readout, h)
    long_term, kind, strength = (None if others is None else others.mean(-2)[0, 0]), "slot", None
    if config.consolidation == "delta" and config.keeps_long_term:
        long_term, kind = module.read.delta.answers(h, readout.long_term).norm(dim=-1)[0, 0], "fragment"
        if hasattr(module, "delta_tokens"):
            strength = module.delta_tokens.strengths(h)[0, 0, :, :, 0].mT
    take = keep = None
    if hasattr(module, "gate_tokens"):
        perceived = F.relu(module.gate_tokens(h)).mean(2)[:, 0]
        take, keep = (gate.mean(-1)[0] for gate in module.write.gates(memory.working, perceived))
    return LayerInspection(
        layer=layer,
        working_norms=_listed(memory.working.norm(dim=-1)[0] if config.keeps_working else None),
        long_term_norms=_listed(memory.long_term.norm(dim=-1)[0] if config.keeps_long_term else None),
        take=_listed(take),
        keep=_listed(keep),
        working_attention=_listed(None if own is None else own.mean(-2)[0, 0]),
        long_term_attention=_listed(long_term),
        long_term_kind=kind,
        write_strength=_listed(strength),
        verbatim_used=None,
        verbatim_answers=None,
    )


@dataclass(frozen=True)
class LayerTrace:
    """What one layer reads for the last id, traced to the ids that were written. A level that is not there is None."""

    layer: int
    working: list[float] | None
    """Share of each id in what is read from working memory [ids]; sums to 1 where anything was written."""
    long_term: list[float] | None
    """The same of long-term memory."""
    verbatim: list[float] | None
    """The same of the verbatim tables."""
    chosen: list[float] | None
    """Mean weight that the slots gave each id when it was written (top-k competition) [ids]."""
    strength: list[float] | None
    """Of associative memory: mean strength that each id was written with [ids]."""


@dataclass(frozen=True)
class Trace:
    """All memory layers."""

    ids: list[int]
    layers: list[LayerTrace]


def trace_reads(model: PMI, ids: Sequence[int], segments: int = 64) -> Trace:
    """Which ids the memory's answer to the last of `ids` comes from, over so many segments before its own.

    The share of an id is the size of the derivative of what is read (U_w, U_l) by the features it was written with, estimated
    by random probes: how much the answer would change with the id. So it goes through competition, gates and consolidation of
    every kind; of verbatim tables, whose wordings are no features, through what was written. Ids of the last one's own segment
    are not in memory yet, and have none.
    """
    t = model.config.segment
    if not ids:
        raise ValueError("needs at least one id")
    *written, reading = _features(model, ids)
    leaves = [[h.clone().requires_grad_() for h in features] for features in written[-segments:]]
    memories = [Memory(*(x.detach() for x in memory)) for memory in model.initial_memory(1)]
    chosen: list[list[Tensor]] = [[] for _ in model.layers_with_memory]
    strengths: list[list[Tensor]] = [[] for _ in model.layers_with_memory]
    first = len(written) - len(leaves)
    for s in range(len(written)):
        features = written[s] if s < first else leaves[s - first]
        for j, h in enumerate(features):
            place, module = (0 if model.shared_state else j), _module(model, j)
            memory = memories[place]
            if s < first:
                with torch.no_grad():
                    memories[place] = module.scan(memory, h, None, memory)[1]
                continue
            if hasattr(module, "write"):
                chosen[j].append(module.write.attention(memory.working, h[:, 0]).detach().mean(1)[0])
            if hasattr(module, "delta_tokens"):
                strengths[j].append(module.delta_tokens.strengths(h).detach()[0, 0, :, :, 0].mean(0))
            memories[place] = module.scan(memory, h, None, memory)[1]
    early = first * t
    found, embedded = _found(model, ids, written, first)
    layers = []
    for j, h in enumerate(reading):
        module = _module(model, j)
        readout = module.readout(memories[0 if model.shared_state else j])
        u_w, u_l = module.read.levels(Readout(*(x[:, None] for x in readout)), h[:, :, -1:])
        u_v = None if found is None else module.verbatim(h[:, :, -1:], found)
        blank = torch.zeros(early)
        layers.append(
            LayerTrace(
                layer=model.layers_with_memory[j],
                working=_shares(u_w, leaves, early, len(ids)),
                long_term=_shares(u_l, leaves, early, len(ids)),
                verbatim=_shares(u_v, embedded, early, len(ids)),
                chosen=_over_ids([blank, *chosen[j]], len(ids)) if hasattr(module, "write") else None,
                strength=_over_ids([blank, *strengths[j]], len(ids)) if hasattr(module, "delta_tokens") else None,
            )
        )
    return Trace(list(ids), layers)


PROBES = 16
"""Random directions that a derivative's size is estimated by."""


def _module(model: PMI, j: int) -> MemoryModule:
    return cast(MemoryModule, model.memories[0 if model.shared_weights else j])


@torch.no_grad()
def _features(model: PMI, ids: Sequence[int]) -> list[list[Tensor]]:
    """Each memory layer's features of a document, segment by segment: the whole ones, and what is left (one id at least)."""
    t, state = model.config.segment, model.initial_state(1)
    found = []
    for first in range(0, len(ids), t):
        with _noting(model) as notes:
            _, state = model(torch.tensor([list(ids[first : first + t])], device=model.device), state)
        found.append([h for _, h, _ in notes])
    return found


def _found(model: PMI, ids: Sequence[int], written: list[list[Tensor]], first: int) -> tuple[Tensor | None, list[list[Tensor]]]:
    """What the last of `ids` finds in the verbatim tables, and the embedded segments, from `first` on, that it hangs on."""
    if model.wordings is None:
        return None, []
    t, leaves = model.config.segment, []
    tables = model.initial_state(1).verbatim
    for s, features in enumerate(written):
        segment = torch.tensor([[list(ids[s * t : (s + 1) * t])]], device=model.device)
        embedded = model.embedding(segment).detach()
        if s >= first:
            leaves.append([embedded.requires_grad_()])
        reads = addresses(segment, model.wordings)
        with torch.set_grad_enabled(s >= first):
            tables = recite(tables, reads, model.verbatim(embedded, features[0], reads), None)[1]
    last = torch.tensor([[list(ids[len(written) * t :])]], device=model.device)
    return look_up(tables, addresses(last, model.wordings)[..., -1:]), leaves


def _shares(read: Tensor | None, leaves: list[list[Tensor]], early: int, count: int) -> list[float] | None:
    """The size of the derivative of `read` by the features of each id, of all layers together, over their sum."""
    if read is None:
        return None
    generator = torch.Generator(read.device).manual_seed(0)
    flat = [h for features in leaves for h in features]
    sizes = [torch.zeros(h.shape[2]) for h in flat]
    if read.requires_grad:
        for _ in range(PROBES):
            probe = torch.randn(read.shape, generator=generator, device=read.device)
            for i, slope in enumerate(torch.autograd.grad(read, flat, probe, retain_graph=True, allow_unused=True)):
                if slope is not None:
                    sizes[i] += slope.square().sum(-1)[0, 0].cpu()
    layers = len(leaves[0]) if leaves else 1
    by_segment = [sum(sizes[i : i + layers], torch.zeros(())) for i in range(0, len(sizes), layers)]
    found = torch.cat([torch.zeros(early), *(size.sqrt() for size in by_segment)])
    return _over_ids([found / found.sum().clamp(min=1e-12)], count)


def _over_ids(parts: list[Tensor], count: int) -> list[float]:
    """Parts behind each other as values for `count` ids, 0 for those that are not in memory yet."""
    found = torch.cat([part.float().cpu() for part in parts])
    return F.pad(found, (0, count - len(found))).tolist()


def _listed(x: Tensor | None) -> Any:
    return None if x is None else x.float().cpu().tolist()
