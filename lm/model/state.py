"""The model's state as a value: everything a sequence's past has left behind, constant in size.

Axes: b lane, w window row, t token of a segment, n slot, c fragment, h head, e feature of a head, d feature.

At a segment boundary the state is memory + window + position (what a snapshot holds). Inside a segment there is also the open
part: the segment's own keys and values, the features waiting to be written, and the memory made ready for reading.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

Tree = TypeVar("Tree")


class InputError(ValueError):
    """Tokens, targets, lanes, lengths or starts that the model cannot read."""


class StateError(ValueError):
    """A state that does not belong to this call: another number of lanes, another model, another type, not finite."""


class Memory(NamedTuple):
    """The two levels of memory of one scope. A level that the configuration does not use has no slots."""

    working: Tensor  # [b, n, d]
    long_term: Tensor  # [b, c, n, d] slots, or [b, c, k, v] associative matrices (consolidation: delta)


class Readout(NamedTuple):
    """A memory made ready for reading by one set of read parameters; constant through a segment, derived from the memory."""

    address: Tensor  # [b, h * n, d] token features times this are the scores of the slots, per head
    working: Tensor  # [b, h, n, e] what attention on a working slot gives to U_w
    correcting: Tensor  # [b, h * n, 2 d] and to the keys and values of the correction step
    long_term: Tensor  # [b, h, n, e] to U_l; [b, h * n, d] to the correction's queries; or the associative matrices [b, c, k, v]


class Open(NamedTuple):
    """What one memory layer keeps of the open segment; rows beyond the lane's offset are blank."""

    features: Tensor  # [b, t, d] to be written when the segment is complete
    keys: Tensor  # [b, t, h, e] of the correction step
    values: Tensor  # [b, t, h, e]


class Remembered(NamedTuple):
    """All memory: what outlasts the window."""

    memories: tuple[Memory, ...]  # one (scope global) or one per memory layer (scope layer)
    verbatim: Tensor  # [b, c, r, v] tables of what followed each wording


class State(NamedTuple):
    """The whole past of each lane. A value: calls return a new one and leave the old one as it was."""

    position: Tensor  # [b] tokens read so far
    keys: tuple[Tensor, ...]  # per layer [b, w + t, h, e]: the window, then the open segment; rotated about the segment's start
    values: tuple[Tensor, ...]
    memories: tuple[Memory, ...]  # as in Remembered
    verbatim: Tensor
    readouts: tuple[Readout, ...]
    open: tuple[Open, ...]  # one per memory layer
    tokens: Tensor  # [b, t] ids of the open segment, where there are verbatim tables

    @property
    def remembered(self) -> Remembered:
        """All memory."""
        return Remembered(self.memories, self.verbatim)

    def remembering(self, other: Remembered) -> "State":
        """This state with another memory."""
        return self._replace(**other._asdict())

    @property
    def lanes(self) -> int:
        """Number of lanes."""
        return self.position.shape[0]

    def detach(self) -> "State":
        """The same values, cut off from the graph that made them."""
        return map_tensors(torch.Tensor.detach, self)

    def clone(self) -> "State":
        """A copy that shares no storage."""
        return map_tensors(torch.Tensor.clone, self)

    def to(self, device: torch.device | str) -> "State":
        """The same values on another device."""
        return map_tensors(lambda x: x.to(device), self)

    def select(self, lanes: Sequence[int] | Tensor) -> "State":
        """The state of some lanes, in the order given (a lane may be given twice)."""
        index = self._index(lanes)
        return map_tensors(lambda x: x.index_select(0, index), self)

    def merge(self, lanes: Sequence[int] | Tensor, other: "State") -> "State":
        """This state with `lanes` replaced by the lanes of `other`."""
        index = self._index(lanes)
        if len(index) != other.lanes:
            raise StateError(f"{len(index)} lanes {index.tolist()} are to be replaced, but the other state has {other.lanes}")
        try:
            return map_tensors(lambda mine, theirs: mine.index_copy(0, index, theirs.to(mine.dtype)), self, other)
        except (ValueError, RuntimeError, AssertionError) as error:  # looked for only now: merging is on the path of every token
            raise StateError(f"the other state is of another model: {_unlike(self, other) or error}") from error

    def merge_(self, lanes: Tensor, other: "State") -> None:
        """As `merge`, into this state's own storage: for an owner of a slab, outside of autograd."""
        map_tensors(lambda mine, theirs: mine.index_copy_(0, lanes, theirs.to(mine.dtype)), self, other)

    def _index(self, lanes: Sequence[int] | Tensor) -> Tensor:
        index = torch.as_tensor(lanes, device=self.position.device)
        if index.dtype == torch.bool:
            raise TypeError("lanes must be numbers, not a mask; use mask.nonzero().squeeze(-1)")
        known = index.tolist() if isinstance(lanes, Tensor) else lanes
        if index.dim() != 1 or (len(known) and (min(known) < 0 or max(known) >= self.lanes)):
            raise InputError(f"lanes {index.tolist()} are not all of this state, which has the lanes 0..{self.lanes - 1}")
        return index.long()

    @classmethod
    def concatenate(cls, states: Sequence["State"]) -> "State":
        """The lanes of several states, one after the other."""
        return map_tensors(lambda *parts: torch.cat(parts), *states)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, the open segment included (a snapshot is smaller: `snapshot.sizes`)."""
        return sum(x.nbytes for x in tensors(self))


def map_tensors(function: Callable[..., Any], tree: Tree, *others: Any) -> Tree:
    """Apply `function` to corresponding tensors of trees of (named) tuples; the result has the shape of the first tree."""
    if isinstance(tree, Tensor):
        return function(tree, *others)
    assert isinstance(tree, tuple)
    parts = [map_tensors(function, *group) for group in zip(tree, *others, strict=True)]
    return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)


def _unlike(one: Any, other: Any) -> str:
    """The first parts in which two trees differ, beside the number of lanes."""
    mine, theirs = ({name: list(x.shape[1:]) for name, x in named_tensors(tree)} for tree in (one, other))
    odd = sorted(mine.keys() ^ theirs.keys())
    if odd:
        return f"{', '.join(odd[:4])} in only one of them"
    return ", ".join(f"{name} is {theirs[name]}, here {mine[name]}" for name in mine if mine[name] != theirs[name])


def where_lanes(lanes: Tensor, new: Tree, old: Tree) -> Tree:
    """`new` where `lanes [b]` is true, else `old`."""
    return map_tensors(lambda x, y: torch.where(lanes.view(-1, *[1] * (y.dim() - 1)), x, y), new, old)


def tensors(tree: Any) -> Iterator[Tensor]:
    """All tensors of a tree, in order."""
    if isinstance(tree, Tensor):
        yield tree
    else:
        for part in tree:
            yield from tensors(part)


def named_tensors(tree: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """All tensors of a tree with names such as `memories.0.working`."""
    if isinstance(tree, Tensor):
        yield prefix, tree
    else:
        for name, part in zip(getattr(tree, "_fields", map(str, range(len(tree)))), tree, strict=True):
            yield from named_tensors(part, f"{prefix}.{name}" if prefix else str(name))


def exact(x: Tensor) -> Tensor:
    """`x` in float32 at least: what is lost in half precision here would stay lost."""
    return x if x.dtype == torch.float64 else x.float()


def raw_bytes(x: Tensor) -> memoryview:
    """The bytes of a tensor's values, for hashing."""
    flat: Any = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)
