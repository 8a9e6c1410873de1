"""What a call may not be: each mistake is answered with the values in it, before anything is computed."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lm.model.memory import memory_shapes
from lm.model.state import State, named_tensors

if TYPE_CHECKING:
    from lm.model.decoder import PMI


class InputError(ValueError):
    """Tokens, lengths or starts that the model cannot read."""


class StateError(ValueError):
    """A state that does not belong to this call: another number of lanes, another model, another type, not finite."""


def check_call(model: "PMI", tokens: Tensor, state: State, lengths: Tensor | None, starts: Tensor | None, donate: bool) -> None:
    """Raise InputError or StateError for a call that cannot be answered."""
    if tokens.dim() != 2 or tokens.dtype not in (torch.int64, torch.int32):
        raise InputError(f"tokens must be integers [lanes, tokens]; got {tokens.dtype} {list(tokens.shape)}")
    lanes, count = tokens.shape
    if not tokens.numel():
        raise InputError(f"tokens are empty: shape {[lanes, count]}; a call needs one lane and one token at least")
    check_state(model, state)
    if state.lanes != lanes:
        raise StateError(f"tokens have {lanes} lanes but the state has {state.lanes}; use state.select or initial_state({lanes})")
    low, high = (int(x) for x in tokens.aminmax())
    if low < 0 or high >= model.config.vocab_size:
        bad = low if low < 0 else high
        raise InputError(f"token id {bad} is out of range; this model knows 0..{model.config.vocab_size - 1}")
    if lengths is not None:
        low, high = (int(x) for x in lengths.aminmax()) if lengths.numel() else (0, 0)
        if list(lengths.shape) != [lanes] or low < 0 or high > count:
            raise InputError(f"lengths must be one number of 0..{count} for each of {lanes} lanes; got {lengths.tolist()}")
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


def check_state(model: "PMI", state: State) -> None:
    """Raise StateError unless `state` has the shape and types that this model's states have."""
    config = model.config
    counts = (len(state.keys), len(state.values), len(state.memories), len(state.readouts), len(state.open))
    shared = model.shared_state
    layers = len(model.layers_with_memory)
    readouts = len(model.memories) if shared else layers
    wanted = (config.layers, config.layers, model.initial_memory.count, readouts, layers)
    if counts != wanted:
        raise StateError(
            f"the state is of another model: it has (keys, values, memories, readouts, open) {counts}, this model {wanted}"
        )
    cache = (config.window + config.segment, config.heads, config.width // config.heads)
    if tuple(state.keys[0].shape[1:]) != cache:
        raise StateError(
            f"the state is of another model: its caches are {tuple(state.keys[0].shape[1:])}, "
            f"this model's (window + segment, heads, head width) {cache}"
        )
    if state.memories:
        shapes = tuple(tuple(level.shape[1:]) for level in state.memories[0])
        if shapes != memory_shapes(config):
            raise StateError(f"the state is of another model: its memory is {shapes}, this model's {memory_shapes(config)}")
        kept, own = state.memories[0].working.dtype, model.initial_memory.dtype
        if kept != own:
            raise StateError(f"memory is {kept}, but this model keeps it in {own}")
    if state.keys[0].dtype not in (model.dtype, torch.float32):
        raise StateError(f"the state was made in {state.keys[0].dtype}, this model computes in {model.dtype}")
    if state.position.device != model.device:
        raise StateError(f"the state is on {state.position.device}, the model on {model.device}; use state.to(model.device)")


def check_finite(hidden: Tensor, state: State) -> None:
    """Raise StateError if a result is not finite, naming the lanes and the parts of the state that are not."""
    finite = hidden.isfinite().all(-1).all(-1)
    if bool(finite.all()):
        return
    lanes = (~finite).nonzero().squeeze(-1)
    parts = [name for name, x in named_tensors(state) if x.is_floating_point() and not x[lanes].isfinite().all()]
    raise StateError(
        f"lanes {lanes.tolist()}: results are not finite (NaN or infinity in the state or the weights). Not finite: "
        f"{', '.join(parts[:6]) or 'no part of the state'}. The state given is as it was; reset these lanes or restore a snapshot"
    )
