"""What a call may not be: each mistake is answered with the values in it, before anything is computed."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lm.model.state import InputError, State, StateError, named_tensors

if TYPE_CHECKING:
    from lm.model.decoder import PMI

__all__ = [
    "InputError",
    "NotFiniteError",
    "StateError",
    "check_call",
    "check_finite",
    "check_lanes",
    "check_state",
    "check_targets",
]


class NotFiniteError(StateError):
    """Results of some lanes are not finite. Lanes do not mix, so the others' results, which it carries, are good."""

    def __init__(self, message: str, lanes: list[int], hidden: Tensor, state: State) -> None:
        super().__init__(message)
        self.lanes, self.hidden, self.state = lanes, hidden, state


def check_call(model: "PMI", tokens: Tensor, state: State, lengths: Tensor | None, starts: Tensor | None, donate: bool) -> None:
    """Raise InputError or StateError for a call that cannot be answered."""
    if tokens.dim() != 2 or tokens.dtype not in (torch.int64, torch.int32):
        raise InputError(f"tokens must be integers [lanes, tokens]; got {tokens.dtype} {list(tokens.shape)}")
    check_types(model)
    lanes, count = tokens.shape
    if not tokens.numel():
        raise InputError(f"tokens are empty: shape {[lanes, count]}; a call needs one lane and one token at least")
    if state.lanes != lanes:
        raise StateError(f"tokens have {lanes} lanes but the state has {state.lanes}; use state.select or initial_state({lanes})")
    check_state(model, state)
    low, high = (int(x) for x in tokens.aminmax())
    if low < 0 or high >= model.config.vocab_size:
        bad = low if low < 0 else high
        raise InputError(f"token id {bad} is out of range; this model knows 0..{model.config.vocab_size - 1}")
    if lengths is not None:
        low, high = (int(x) for x in lengths.aminmax()) if lengths.numel() else (0, 0)
        if lengths.dtype != torch.int64 or list(lengths.shape) != [lanes] or low < 0 or high > count:
            raise InputError(f"lengths must be one int64 of 0..{count} for each of {lanes} lanes; got {lengths.tolist()}")
    if starts is not None:
        _check_starts(model, tokens, state, lengths, starts)
    if donate and torch.is_grad_enabled():
        raise InputError("donate=True reuses the state's storage; call it under torch.inference_mode() or torch.no_grad()")


def _check_starts(model: "PMI", tokens: Tensor, state: State, lengths: Tensor | None, starts: Tensor) -> None:
    segment = model.config.segment
    lanes, count = tokens.shape
    if lengths is not None:
        raise InputError("starts are for whole segments; lengths cannot be given with them (mask the loss of padding instead)")
    if count % segment:
        raise InputError(f"with starts, tokens must be whole segments: {count} is not a multiple of segment {segment}")
    if starts.dtype != torch.bool or list(starts.shape) != [lanes, count // segment]:
        raise InputError(f"starts must be bool {[lanes, count // segment]}; got {starts.dtype} {list(starts.shape)}")
    inside = (state.position % segment != 0) & ~starts[:, 0]
    if bool(inside.any()):
        lane = int(inside.nonzero()[0])
        position = int(state.position[lane])
        raise StateError(
            f"lane {lane} is at position {position}, inside a segment of {segment}; "
            "whole segments follow a boundary or the start of a document"
        )


def check_lanes(model: "PMI", lanes: int) -> None:
    """Raise InputError for a number of lanes that no state has, or a model that can have no state."""
    if lanes < 0:
        raise InputError(f"a state cannot have {lanes} lanes; give 1 or more (0: an empty one)")
    check_types(model)


def check_types(model: "PMI") -> None:
    """Raise InputError where all of a model was turned to a narrow type: its memory and its angles need float32."""
    if model.causal.dtype not in (torch.float32, torch.float64):
        raise InputError(
            f"the whole model was turned to {model.causal.dtype}, but its memory needs float32; "
            f"load it again and use model.compute_in({model.causal.dtype}), which turns the decoder alone"
        )


def check_targets(hidden: Tensor, targets: Tensor, vocab_size: int) -> None:
    """Raise InputError for targets that have no log-probability."""
    if targets.dtype != torch.int64 or targets.shape != hidden.shape[:-1]:
        wanted = list(hidden.shape[:-1])
        raise InputError(
            f"targets must be int64 {wanted}, one for each hidden feature; got {targets.dtype} {list(targets.shape)}"
        )
    low, high = (int(x) for x in targets.aminmax()) if targets.numel() else (0, 0)
    if low < 0 or high >= vocab_size:
        raise InputError(
            f"target {low if low < 0 else high} is out of range; this model knows 0..{vocab_size - 1} "
            "(for what is not to be learned give any of these, and a mask that is false there)"
        )


def check_mask(targets: Tensor, mask: Tensor) -> None:
    """Raise InputError for a mask that would be spread over other targets than its own."""
    if mask.dtype != torch.bool or mask.shape != targets.shape:
        raise InputError(f"mask must be bool {list(targets.shape)}, as the targets; got {mask.dtype} {list(mask.shape)}")


def check_state(model: "PMI", state: State) -> None:
    """Raise StateError unless every part of `state` has the shape and type that this model's states have.

    Two models of the same shapes cannot be told apart here; snapshots carry fingerprints for that.
    """
    if model.dtype not in model.blueprints:
        model.blueprints[model.dtype] = dict(named_tensors(model.blank_state(1, "meta")))
    wanted = model.blueprints[model.dtype]
    found = dict(named_tensors(state))
    odd = sorted(wanted.keys() ^ found.keys())
    if odd:
        raise StateError(f"the state is of another model: {', '.join(odd[:4])} in only one of them")
    for name, x in found.items():
        if x.shape[1:] != wanted[name].shape[1:]:
            raise StateError(
                f"the state is of another model: {name} is {list(x.shape[1:])}, this model's {list(wanted[name].shape[1:])}"
            )
        if x.shape[0] != state.lanes:
            raise StateError(f"the state does not agree with itself: {name} has {x.shape[0]} lanes, position {state.lanes}")
        # caches in float32 serve a decoder that computes in less (autocast)
        if x.dtype != wanted[name].dtype and not (name.startswith(("keys", "values")) and x.dtype == torch.float32):
            raise StateError(f"{name} was made in {x.dtype}, this model keeps it in {wanted[name].dtype}")
        if x.device != model.device:
            raise StateError(f"{name} is on {x.device}, the model on {model.device}; use state.to(model.device)")
    if int(state.position.min()) < 0:
        raise StateError(f"positions must be 0 or more; got {state.position.tolist()}")
    # not verbatim tables: they are large, are looked at when they change, and what is read of them shows in the results
    for name, x in () if model.training else named_tensors(state.memories, "memories"):
        if not finite(x):
            lanes = (~x.isfinite().flatten(1).all(1)).nonzero().squeeze(-1).tolist()
            raise StateError(f"lanes {lanes}: {name} is not finite before the call; reset these lanes or restore a snapshot")


def finite(x: Tensor) -> bool:
    """Whether all values are finite. A finite sum shows it in one pass; only an overflow of the sum needs the second look."""
    return bool(x.sum().isfinite()) or bool(x.isfinite().all())


def check_finite(hidden: Tensor, state: State, donated: bool) -> None:
    """Raise NotFiniteError if a result is not finite, naming the lanes and the parts of the state that are not."""
    memories = [x for _, x in named_tensors(state.memories)]
    if state.tokens.shape[1] and bool((state.position % state.tokens.shape[1] == 0).any()):
        memories.append(state.verbatim)  # changes at a segment's end
    if finite(hidden) and all(finite(x) for x in memories):
        return
    bad = torch.stack([~x.isfinite().flatten(1).all(1) for x in (hidden, *memories)]).any(0)
    lanes = bad.nonzero().squeeze(-1)
    parts = [name for name, x in named_tensors(state) if x.is_floating_point() and not bool(x[lanes].isfinite().all())]
    found = ", ".join(parts[:6]) or "no part of the state, so the weights"
    kept = "its storage was donated" if donated else "the state given is as it was"
    raise NotFiniteError(
        f"lanes {lanes.tolist()}: results are not finite. Not finite: {found}; {kept}; reset these lanes or restore a snapshot",
        lanes.tolist(), hidden, state,
    )  # fmt: skip
