"""A look into the memory of one lane: what its slots hold, what its gates let through, and what its last segment reads.

    inspection = inspect_memory(model, state, tail)      # state: one lane at a boundary; tail: the ids since

The model runs as always; hooks on its readers note what they were given, and the same parts are asked again for their weights.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm.model.decoder import PMI
from lm.model.memory import MemoryModule
from lm.model.state import Memory, Readout, State

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
    for j, (readout, h) in enumerate(notes):
        place = 0 if model.shared_state else j
        module = cast(MemoryModule, model.memories[0 if model.shared_weights else j])
        layers.append(_look(model.layers_with_memory[j], module, memories[place], readout, h))
        if model.shared_state:  # each layer writes what the one before has left
            memories[0] = module.scan(memories[0], h, None, memories[0])[1]
    return Inspection(int(after.position[0]), list(tail)[-last:], layers)


@contextmanager
def _noting(model: PMI) -> Iterator[list[tuple[Readout, Tensor]]]:
    """What each memory layer's reader is given, in order."""
    notes: list[tuple[Readout, Tensor]] = []

    def note(_: nn.Module, given: tuple[Any, ...]) -> None:
        notes.append((given[0], given[1]))

    hooks = [cast(MemoryModule, module).read.register_forward_pre_hook(note) for module in model.memories]
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
    )


def _listed(x: Tensor | None) -> Any:
    return None if x is None else x.float().cpu().tolist()
