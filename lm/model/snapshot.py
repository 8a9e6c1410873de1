"""Snapshots: a lane's state at a segment boundary, as bytes that carry everything needed to refuse what does not fit.

A snapshot is memory + window + position in safetensors form, with a format version, the fingerprints of model and tokenizer and
a checksum. `load_snapshot` treats its input as hostile: sizes, shapes, types, values and fingerprints are checked, nothing is
executed.
"""

import hashlib
import json
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from lm.model.decoder import PMI
from lm.model.memory import memory_shapes
from lm.model.state import State, named_tensors, raw_bytes
from lm.model.verbatim import table_shape

FORMAT = 2
"""Version of the snapshot's layout."""
MAX_POSITION = 2**62
HEADER_BYTES = 512
"""More than what the header needs for one tensor, or for what it says of the snapshot."""


_KINDS = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


class SnapshotError(ValueError):
    """Bytes that are not a snapshot of this model at a boundary; the message says which part does not fit."""


@dataclass(frozen=True)
class Identity:
    """What a snapshot belongs to."""

    model: str
    tokenizer: str


def sizes(model: PMI) -> tuple[int, int]:
    """Bytes of a snapshot's tensors: (memory, window)."""
    per_memory = sum(torch.Size(shape).numel() for shape in memory_shapes(model.config))
    tables = torch.Size(table_shape(model.config)).numel()
    window = 2 * model.config.layers * model.config.window * model.config.width
    kept = model.causal.dtype.itemsize  # of memory: float32 whatever the decoder computes in, but in a float64 model
    return kept * (per_memory * model.initial_memory.count + tables), window * model.norm.weight.dtype.itemsize


@dataclass(frozen=True)
class Captured:
    """What a snapshot keeps of a lane, copied out of the state: `encode` may run later, in another thread."""

    tensors: dict[str, Tensor]
    position: int


class Encoded(NamedTuple):
    """A snapshot's bytes, and the SHA-256 of its body: all behind the header, nearly all there is to hash."""

    data: bytes
    body: bytes


def dump(model: PMI, state: State, lane: int, identity: Identity) -> bytes:
    """The snapshot of one lane; it must be at a segment boundary."""
    return encode(capture(model, state, lane), identity).data


def capture(model: PMI, state: State, lane: int) -> Captured:
    """The quick half of `dump`: a copy of what belongs into the snapshot."""
    position = int(state.position[lane])
    if position % model.config.segment:
        raise SnapshotError(
            f"lane {lane} is at position {position}, inside a segment of {model.config.segment}; snapshots are for boundaries"
        )
    parts = _parts(model, state, lane)
    return Captured({name: x.detach().to("cpu", copy=True).contiguous() for name, x in parts.items()}, position)


def encode(captured: Captured, identity: Identity) -> Encoded:
    """The other half of `dump`: the bytes. Runs beside the model, so it asks nothing of torch's threads."""
    tensors, position = captured.tensors, captured.position
    bad = [name for name, x in tensors.items() if not _finite(x)]
    if bad:
        raise SnapshotError(f"the state at position {position} is not finite in {', '.join(bad[:4])}; nothing was written")
    return _encoded(tensors, position, identity)


def _finite(x: Tensor) -> bool:
    if x.dtype == torch.bfloat16:  # unknown to numpy: an exponent of ones is infinite or not a number
        bits = x.view(torch.int16).numpy() & 0x7F80
        return not bool((bits == 0x7F80).any())
    return bool(np.isfinite(x.numpy()).all())


def _encoded(tensors: dict[str, Tensor], position: int, identity: Identity) -> Encoded:
    """The bytes that `safetensors.torch.save` gives (a test compares), with one copy instead of three."""
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    parts = [raw_bytes(tensors[name]) for name in order]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    body = digest.digest()
    about = {
        "format": str(FORMAT),
        "model": identity.model,
        "tokenizer": identity.tokenizer,
        "position": str(position),
        "checksum": _checksum(position, body),
    }
    # one entry: safetensors writes several in no fixed order, and the same content must give the same bytes
    header: dict[str, Any] = {"__metadata__": {"snapshot": json.dumps(about, sort_keys=True)}}
    offset = 0
    for name in order:
        x = tensors[name]
        header[name] = {"dtype": _KINDS[x.dtype], "shape": list(x.shape), "data_offsets": [offset, offset + x.nbytes]}
        offset += x.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return Encoded(b"".join([len(text).to_bytes(8, "little"), text, *parts]), body)


def _checksum(position: int, body: bytes) -> str:
    return hashlib.sha256(str(position).encode() + body).hexdigest()


def load_snapshot(model: PMI, data: bytes, identity: Identity, verified: bool = False) -> State:
    """The one-lane state that `data` is a snapshot of; SnapshotError if it is damaged or belongs elsewhere.

    verified: the caller has compared the bytes' hash with that of bytes that `encode` made, so that they need not be read twice.
    """
    memory, window = sizes(model)
    blank = model.initial_state(1)
    wanted = _parts(model, blank)
    header = HEADER_BYTES * (1 + len(wanted))
    if not isinstance(data, bytes) or len(data) > memory + window + header or int.from_bytes(data[:8], "little") > header:
        raise SnapshotError(f"damaged snapshot: {len(data):,} bytes; this model's have at most {memory + window + header:,}")
    metadata = _metadata(data)
    for key, mine in (("format", str(FORMAT)), ("model", identity.model), ("tokenizer", identity.tokenizer)):
        if metadata.get(key) != mine:
            raise SnapshotError(f"the snapshot's {key} is {str(metadata.get(key))[:64]!r}, here it is {mine!r}")
    try:
        tensors = load(data)
    except (SafetensorError, ValueError, KeyError, TypeError, OverflowError, RuntimeError) as error:
        raise SnapshotError(f"damaged snapshot: {str(error)[:200]}") from error
    text = metadata.get("position", "")
    if (
        not (text.isascii() and text.isdecimal())
        or len(text) > 19
        or int(text) > MAX_POSITION
        or int(text) % model.config.segment
    ):
        raise SnapshotError(
            f"the snapshot's position is {text[:24]!r}; it must be a multiple of the segment {model.config.segment}"
        )
    position = int(text)
    if tensors.keys() != wanted.keys():
        odd = sorted(tensors.keys() ^ wanted.keys())
        raise SnapshotError(f"the snapshot's parts are not this model's: {', '.join(odd[:4])[:200]}")
    for name, x in tensors.items():
        if x.shape != wanted[name].shape or x.dtype != wanted[name].dtype:
            mine = f"{wanted[name].dtype} {list(wanted[name].shape)}"
            raise SnapshotError(f"{name} is {x.dtype} {list(x.shape)}, this model's is {mine}")
        if not verified and not _finite(x):
            raise SnapshotError(f"{name} holds values that are not finite")
    if not verified:
        again = _encoded(tensors, position, identity)
        if metadata.get("checksum") != _checksum(position, again.body):
            raise SnapshotError("the snapshot's checksum does not match its contents")
        if again.data != data:
            raise SnapshotError("sound content, but not in the form that this version writes: the snapshot was tampered with")
    for name, x in wanted.items():
        x.detach().copy_(tensors[name])
    return blank._replace(position=torch.full_like(blank.position, position)).detach()


def _parts(model: PMI, state: State, lane: int = 0) -> dict[str, Tensor]:
    """The tensors that a snapshot keeps of a lane, as views of the state."""
    window = model.config.window
    parts = {name: x[lane : lane + 1] for name, x in named_tensors(state.memories, "memory")}
    if state.verbatim.numel():
        parts["verbatim"] = state.verbatim[lane]
    for i, (keys, values) in enumerate(zip(state.keys, state.values, strict=True)):
        parts[f"window.{i}.keys"], parts[f"window.{i}.values"] = keys[lane, :window], values[lane, :window]
    return parts


def _metadata(data: bytes) -> dict[str, Any]:
    """The metadata in a safetensors header, read with care: the header is JSON behind its length."""
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > len(data) - 8:
        raise SnapshotError(f"damaged snapshot: {len(data)} bytes, its header claims {length}")
    try:
        metadata = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["snapshot"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise SnapshotError("damaged snapshot: its header cannot be read") from error
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise SnapshotError("damaged snapshot: its header holds no metadata")
    return metadata
