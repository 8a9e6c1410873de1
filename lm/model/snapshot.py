"""Snapshots: a lane's state at a segment boundary, as bytes that carry everything needed to refuse what does not fit.

A snapshot is memory + window + position in safetensors form, with a format version, the fingerprints of model and tokenizer and
a checksum. `load` treats its input as hostile: sizes, shapes, types, values and fingerprints are checked, nothing is executed.
"""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from lm.model.checks import finite
from lm.model.decoder import PMI
from lm.model.memory import memory_shapes
from lm.model.state import State, map_tensors, named_tensors, raw_bytes

FORMAT = 1
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
    window = 2 * model.config.layers * model.config.window * model.config.width
    return 4 * per_memory * model.initial_memory.count, window * model.norm.weight.dtype.itemsize


@dataclass(frozen=True)
class Captured:
    """What a snapshot keeps of a lane, copied out of the state: `encode` may run later, in another thread."""

    tensors: dict[str, Tensor]
    position: int


def dump(model: PMI, state: State, lane: int, identity: Identity) -> bytes:
    """The snapshot of one lane; it must be at a segment boundary."""
    return encode(capture(model, state, lane), identity)


def capture(model: PMI, state: State, lane: int) -> Captured:
    """The quick half of `dump`: a copy of what belongs into the snapshot."""
    position = int(state.position[lane])
    if position % model.config.segment:
        raise SnapshotError(
            f"lane {lane} is at position {position}, inside a segment of {model.config.segment}; snapshots are for boundaries"
        )
    view = map_tensors(lambda x: x[lane : lane + 1], state)
    copies = {name: x.detach().to("cpu", copy=True).contiguous() for name, x in _parts(model, view).items()}
    return Captured(copies, position)


def encode(captured: Captured, identity: Identity) -> bytes:
    """The other half of `dump`: the bytes."""
    tensors, position = captured.tensors, captured.position
    bad = [name for name, x in tensors.items() if not finite(x)]
    if bad:
        raise SnapshotError(f"the state at position {position} is not finite in {', '.join(bad[:4])}; nothing was written")
    return _bytes(tensors, position, _checksum(tensors, position), identity)


def _bytes(tensors: dict[str, Tensor], position: int, checksum: str, identity: Identity) -> bytes:
    about = {
        "format": str(FORMAT),
        "model": identity.model,
        "tokenizer": identity.tokenizer,
        "position": str(position),
        "checksum": checksum,
    }
    # one entry: safetensors writes several in no fixed order, and the same content must give the same bytes
    return _safetensors(tensors, {"snapshot": json.dumps(about, sort_keys=True)})


def load_snapshot(model: PMI, data: bytes, identity: Identity) -> State:
    """The one-lane state that `data` is a snapshot of; SnapshotError if it is damaged or belongs elsewhere."""
    memory, window = sizes(model)
    header = HEADER_BYTES * (1 + len(_parts(model, model.blank_state(1, "meta"))))
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
    blank = model.initial_state(1)
    wanted = _parts(model, blank)
    if tensors.keys() != wanted.keys():
        odd = sorted(tensors.keys() ^ wanted.keys())
        raise SnapshotError(f"the snapshot's parts are not this model's: {', '.join(odd[:4])[:200]}")
    for name, x in tensors.items():
        if x.shape != wanted[name].shape or x.dtype != wanted[name].dtype:
            mine = f"{wanted[name].dtype} {list(wanted[name].shape)}"
            raise SnapshotError(f"{name} is {x.dtype} {list(x.shape)}, this model's is {mine}")
        if not finite(x):
            raise SnapshotError(f"{name} holds values that are not finite")
    if metadata.get("checksum") != _checksum(tensors, position):
        raise SnapshotError("the snapshot's checksum does not match its contents")
    if _bytes(tensors, position, metadata["checksum"], identity) != data:
        raise SnapshotError("the snapshot's content is sound, but not in the form that this version writes: it was tampered with")
    for name, x in _parts(model, blank).items():
        x.detach().copy_(tensors[name])
    return blank._replace(position=torch.full_like(blank.position, position)).detach()


def _safetensors(tensors: dict[str, Tensor], metadata: dict[str, str]) -> bytes:
    """The bytes that `safetensors.torch.save` gives (a test compares), with one copy instead of three."""
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for name in order:
        x = tensors[name]
        kind = _KINDS[x.dtype]
        header[name] = {"dtype": kind, "shape": list(x.shape), "data_offsets": [offset, offset + x.nbytes]}
        offset += x.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *(raw_bytes(tensors[name]) for name in order)])


def _parts(model: PMI, state: State) -> dict[str, Tensor]:
    """The tensors that a snapshot keeps of a one-lane state, as views of it."""
    window = model.config.window
    parts = dict(named_tensors(state.memories, "memory"))
    for i, (keys, values) in enumerate(zip(state.keys, state.values, strict=True)):
        parts[f"window.{i}.keys"], parts[f"window.{i}.values"] = keys[0, :window], values[0, :window]
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


def _checksum(tensors: dict[str, Tensor], position: int) -> str:
    digest = hashlib.sha256(str(position).encode())
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(raw_bytes(tensors[name]))
    return digest.hexdigest()
