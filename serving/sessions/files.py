"""A session as one file: safetensors with its ids, its snapshot (itself safetensors) and a JSON header. Read as hostile input.

Nothing in the file is believed: sizes before anything is read, then names, types, the checksum, the fingerprints of model and
tokenizer, every id, and the snapshot by the model itself (shapes, finite values, its own checksum).
"""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from lm.data.files import write_atomically
from lm.errors import UserError
from lm.generation.sampling import Sampling
from lm.model.pretrained import Checkpoint
from lm.model.snapshot import SnapshotError, load_snapshot
from serving.sessions.errors import InvalidError
from serving.sessions.records import MAX_SAMPLING, check_content
from serving.sessions.store import Content, Settings

FORMAT = 1
"""Version of the file's layout."""
HEADER_BYTES = 4 * MAX_SAMPLING
MAX_BYTES = 1 << 32
KINDS = {"recent": "<i4", "tail": "<i4", "history": "<i4", "snapshot": "|u1"}
CARRIED: dict[str, type] = {"model": str, "tokenizer": str, "segment": int, "seed": int, "sampling": dict, "keep_history": bool}
"""The settings that travel; how long it lives and what is retained is for the store that takes it in."""
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""What a session may say of its sampling: its seed stands apart, its stream is the store's."""


def dump_session(content: Content) -> bytes:
    """The file's bytes; the same content gives the same bytes."""
    tensors = {"recent": _array(content.recent), "tail": _array(content.tail)}
    if content.history is not None:
        tensors["history"] = _array(content.history)
    if content.snapshot is not None:
        tensors["snapshot"] = np.frombuffer(content.snapshot, np.uint8)
    about: dict[str, Any] = {name: getattr(content.settings, name) for name in CARRIED}
    about |= {"format": FORMAT, "boundary": content.boundary, "sampling": dict(content.settings.sampling)}
    about["checksum"] = _checksum(about, tensors)
    return bytes(save(tensors, {"session": json.dumps(about, sort_keys=True)}))


def write_session(path: Path, content: Content) -> int:
    """Write the file whole or not at all; the number of bytes."""
    data = dump_session(content)
    write_atomically(path, data)
    return len(data)


def read_session(path: Path, checkpoint: Checkpoint) -> Content:
    """The session in a file; InvalidError says what is wrong with it."""
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise InvalidError(f"{path}: {size:,} bytes; a session's file has at most {MAX_BYTES:,}")
    try:
        return load_session(path.read_bytes(), checkpoint)
    except InvalidError as error:
        raise InvalidError(f"{path}: {problem}" for problem in error.problems) from error


def load_session(data: bytes, checkpoint: Checkpoint) -> Content:
    """The session in a file's bytes, which may come from anyone; InvalidError."""
    about = _header(data)
    settings = _settings(about, checkpoint)
    try:
        tensors = load(data)
    except (SafetensorError, ValueError, KeyError, TypeError, OverflowError, RuntimeError, MemoryError) as error:
        raise InvalidError(f"damaged: {str(error)[:200]}") from error
    for name, x in tensors.items():
        if name not in KINDS or x.dtype.str != KINDS[name] or x.ndim != 1:
            raise InvalidError(f"part {name[:40]!r} ({x.dtype}, {x.ndim} axes) does not belong in a session's file")
    if {"recent", "tail"} - tensors.keys():
        raise InvalidError("the ids are missing")
    boundary = about.get("boundary")
    if type(boundary) is not int or not 0 <= boundary < 2**62:
        raise InvalidError(f"boundary {str(boundary)[:40]!r}: must be a position")
    vocabulary = checkpoint.model.config.vocab_size
    for name in ("recent", "tail", "history"):
        ids = tensors.get(name, np.zeros(0, "<i4"))
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
            raise InvalidError(f"{name} holds ids outside the vocabulary of {vocabulary}")
    snapshot = tensors["snapshot"].tobytes() if "snapshot" in tensors else None
    history = tuple(tensors["history"].tolist()) if "history" in tensors else None
    content = Content(settings, boundary, snapshot, tuple(tensors["recent"].tolist()), tuple(tensors["tail"].tolist()), history)
    check_content(content)
    _check_sampling(dict(settings.sampling))
    if snapshot is not None:
        try:
            state = load_snapshot(checkpoint.model, snapshot, checkpoint.identity)
        except SnapshotError as error:
            raise InvalidError(str(error)) from error
        if int(state.position[0]) != boundary:
            raise InvalidError(f"the snapshot is at position {int(state.position[0])}, the file says {boundary}")
    if about.get("checksum") != _checksum(about, tensors):
        raise InvalidError("the checksum does not match the content: the file is damaged")
    if dump_session(content) != data:
        raise InvalidError("sound content, but not in the form that this version writes: it was tampered with")
    return content


def imported(content: Content, retain: int | None = None, ttl: float | None = None) -> Content:
    """The content with this store's own choices of what is retained and how long it lives."""
    kept = content.settings.retain if retain is None else retain
    return replace(content, settings=replace(content.settings, retain=kept, ttl=ttl))


def _header(data: bytes) -> dict[str, Any]:
    """The JSON that describes the session, found with care."""
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > min(HEADER_BYTES, len(data) - 8):
        raise InvalidError(f"damaged, or not a session's file: {len(data):,} bytes, its header claims {length:,}")
    try:
        about = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["session"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InvalidError("not a session's file: its header does not describe one") from error
    if not isinstance(about, dict):
        raise InvalidError("not a session's file: its header does not describe one")
    if about.get("format") != FORMAT:
        raise InvalidError(f"format {str(about.get('format'))[:40]}; this version reads {FORMAT}")
    return about


def _settings(about: dict[str, Any], checkpoint: Checkpoint) -> Settings:
    problems = []
    for name, kind in CARRIED.items():
        if type(about.get(name)) is not kind:
            problems.append(f"{name} {str(about.get(name))[:40]!r}: must be of type {kind.__name__}")
    if about.keys() - CARRIED.keys() - {"format", "boundary", "checksum"}:
        problems.append("its header says more than a session has")
    mine = {
        "model": checkpoint.fingerprint,
        "tokenizer": checkpoint.tokenizer.fingerprint(),
        "segment": checkpoint.model.config.segment,
    }
    for name, value in mine.items():
        if about.get(name) != value:
            problems.append(f"it belongs to {name} {str(about.get(name))[:64]!r}, the checkpoint's is {value!r}")
    if problems:
        raise InvalidError(problems)
    return Settings(**{name: about[name] for name in CARRIED})


def _check_sampling(values: dict[str, Any]) -> None:
    """What every later request on the session would fail with."""
    problems = [
        f"sampling {name[:40]!r}: not a setting; there are {', '.join(SAMPLING)}" for name in values.keys() - set(SAMPLING)
    ]
    if not problems:
        try:
            Sampling(**values).checked()
        except UserError as error:
            problems = [f"sampling: {problem[:200]}" for problem in error.problems]
    if problems:
        raise InvalidError(problems)


def _array(ids: tuple[int, ...]) -> "np.ndarray[Any, np.dtype[Any]]":
    return np.asarray(ids, dtype="<i4")


def _checksum(about: dict[str, Any], tensors: dict[str, Any]) -> str:
    plain = {name: value for name, value in about.items() if name != "checksum"}
    digest = hashlib.sha256(json.dumps(plain, sort_keys=True).encode())
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].size} ".encode())
        digest.update(tensors[name].tobytes())
    return digest.hexdigest()
