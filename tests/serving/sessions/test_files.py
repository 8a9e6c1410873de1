"""A session as a file: carried to another store unchanged, and refused whenever it is not what an export wrote."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load, save

from lm.config import load_model_config
from lm.data.tokenizer import ByteTokenizer, Tokenizer
from lm.model.decoder import PMI
from lm.model.pretrained import Checkpoint, fingerprint
from serving.sessions.base import BaseStore
from serving.sessions.errors import InvalidError
from serving.sessions.files import dump_session, imported, load_session, read_session, write_session
from serving.sessions.states import read_again
from serving.sessions.store import Content, Settings


def build(seed: int = 0, *changes: str, tokenizer: Tokenizer | None = None) -> Checkpoint:
    torch.manual_seed(seed)
    overrides = [
        "layers=2",
        "width=16",
        "heads=2",
        "feedforward=16",
        "segment=8",
        "window=8",
        "memory.heads=2",
        "memory.layers=[1]",
    ]
    tokenizer = tokenizer or ByteTokenizer()
    model = PMI(load_model_config("tiny", [*overrides, f"vocab_size={tokenizer.vocab_size}", *changes])).eval()
    return Checkpoint(model, tokenizer, fingerprint(model))


MINE = build()
TEXT = [MINE.tokenizer.bos, *MINE.tokenizer.encode("It was the best of times, it was the worst of times")]


def content(ids: list[int] = TEXT, **more: Any) -> Content:
    mine = MINE.identity
    return read_again(MINE, ids, Settings(mine.model, mine.tokenizer, 8, seed=3, sampling={"temperature": 0.5}, **more))


@pytest.mark.parametrize("keep", [False, True])
def test_a_session_comes_back_from_a_file_unchanged(store: BaseStore, tmp_path: Path, keep: bool) -> None:
    first = store.restore("t", "s", content(keep_history=keep))
    size = write_session(tmp_path / "s.session", store.content("t", "s"))
    assert (tmp_path / "s.session").stat().st_size == size
    second = store.restore("t", "copy", imported(read_session(tmp_path / "s.session", MINE), retain=2))
    assert store.content("t", "copy").tail == store.content("t", "s").tail == tuple(TEXT[48:])
    assert second.snapshot == first.snapshot  # the same bytes, kept once
    assert second.settings == replace(first.settings, retain=2)
    assert dump_session(store.content("t", "copy")) == (tmp_path / "s.session").read_bytes()


def test_a_session_without_a_snapshot_can_be_carried_too() -> None:
    for ids in ([], TEXT[:5], TEXT[:8]):
        short = content(ids)
        assert load_session(dump_session(short), MINE) == short


def edited(change: Callable[[Any, Any], Any], keep: bool = True) -> bytes:
    """An export with its parts changed and its checksum made right again: what an attacker would write."""
    from serving.sessions.files import _checksum

    data = dump_session(content(keep_history=keep))
    about = json.loads(json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]["session"])
    tensors = {name: x.copy() for name, x in load(data).items()}
    change(about, tensors)
    about["checksum"] = _checksum(about, tensors)
    return bytes(save(tensors, {"session": json.dumps(about, sort_keys=True)}))


def poisoned(value: float) -> np.ndarray:
    """A snapshot with one value that is not finite, its own checksum right."""
    import safetensors.torch

    from lm.model import snapshot

    data = content().snapshot or b""
    tensors = safetensors.torch.load(data)
    about = snapshot._metadata(data)
    next(iter(tensors.values())).view(-1)[3] = value
    mine = snapshot.Identity(about["model"], about["tokenizer"])
    return np.frombuffer(snapshot._encoded(tensors, int(about["position"]), mine).data, np.uint8)


HOSTILE: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "model": (lambda a, t: a.update(model="f" * 16), "belongs to model 'ffff"),
    "tokenizer": (lambda a, t: a.update(tokenizer="x"), "belongs to tokenizer 'x'"),
    "segment": (lambda a, t: a.update(segment=4), "belongs to segment '4'"),
    "format": (lambda a, t: a.update(format=2), "format 2"),
    "boundary": (lambda a, t: a.update(boundary=7), "multiple of the segment"),
    "another boundary": (lambda a, t: a.update(boundary=40), "history does not end"),
    "huge boundary": (lambda a, t: a.update(boundary=10**30), "must be a position"),
    "boundary of another type": (lambda a, t: a.update(boundary="48"), "must be a position"),
    "seed of another type": (lambda a, t: a.update(seed="1"), "seed '1': must be of type int"),
    "negative seed": (lambda a, t: a.update(seed=-1), "seed -1"),
    "sampling": (lambda a, t: a.update(sampling=[1]), "must be of type dict"),
    "sampling of NaN": (lambda a, t: a.update(sampling={"x": float("nan")}), "not JSON"),
    "deep sampling": (
        lambda a, t: a.update(sampling={"x": json.loads("[" * 900 + "]" * 900)}),
        "sampling: values must be plain|not JSON",
    ),
    "large sampling": (lambda a, t: a.update(sampling={"x": "y" * 5000}), "at most 4096"),
    "unknown sampling": (lambda a, t: a.update(sampling={"foo": 1}), "sampling 'foo': not a setting; there are temperature, "),
    "sampling out of range": (lambda a, t: a.update(sampling={"temperature": -1}), "sampling: temperature: -1 must be between"),
    "sampling of another type": (lambda a, t: a.update(sampling={"top_k": "5"}), "sampling: top_k: '5' must be"),
    "another stream": (lambda a, t: a.update(sampling={"stream": 7}), "sampling 'stream': not a setting"),
    "more in the header": (lambda a, t: a.update(retain=10**9), "more than a session has"),
    "extra tensor": (lambda a, t: t.update(extra=np.zeros(3, np.float32)), "'extra'"),
    "no tail": (lambda a, t: t.pop("tail"), "ids are missing"),
    "empty tail": (lambda a, t: t.update(tail=np.zeros(0, "<i4")), "tail is empty"),
    "ids of another type": (lambda a, t: t.update(tail=t["tail"].astype("<i8")), "'tail'"),
    "ids of another shape": (lambda a, t: t.update(tail=t["tail"][None]), "'tail'"),
    "an id outside": (lambda a, t: t["tail"].__setitem__(0, 257), "outside the vocabulary of 257"),
    "a negative id": (lambda a, t: t["recent"].__setitem__(0, -1), "outside the vocabulary"),
    "another history": (lambda a, t: t["history"].__setitem__(20, 1), "history does not end"),
    "history where none is": (lambda a, t: a.update(keep_history=False), "if, and only if"),
    "no snapshot": (lambda a, t: t.pop("snapshot"), "a snapshot belongs to every boundary"),
    "short snapshot": (lambda a, t: t.update(snapshot=t["snapshot"][:-4]), "damaged snapshot"),
    "long snapshot": (lambda a, t: t.update(snapshot=np.zeros(10**6, np.uint8)), "damaged snapshot"),
    "another model's snapshot": (
        lambda a, t: t.update(
            snapshot=np.frombuffer(read_again(build(0, "memory.slots=9"), TEXT, content().settings).snapshot or b"", np.uint8)
        ),
        "snapshot's model is",
    ),
    "NaN": (lambda a, t: t.update(snapshot=poisoned(float("nan"))), "not finite"),
    "infinity": (lambda a, t: t.update(snapshot=poisoned(float("inf"))), "not finite"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_file_that_lies_is_refused_by_name(name: str) -> None:
    change, message = HOSTILE[name]
    with pytest.raises(InvalidError, match=message):
        load_session(edited(change), MINE)


def test_a_wrong_checksum_and_a_huge_header_are_refused() -> None:
    data = dump_session(content())
    with pytest.raises(InvalidError, match="checksum"):
        load_session(bytes(data[:-1]) + bytes([data[-1] ^ 1]), MINE)
    for claimed in (2**40, 2**63, len(data)):
        with pytest.raises(InvalidError, match="header claims"):
            load_session(claimed.to_bytes(8, "little") + data[8:], MINE)
    for rubbish in (b"", b"x", b"PK\x03\x04" * 100, bytes(1000), b"\x02" + bytes(7) + b"{}"):
        with pytest.raises(InvalidError):
            load_session(rubbish, MINE)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(data=st.data())
def test_damaged_bytes_are_refused_and_never_crash(data: st.DataObject) -> None:
    whole = bytearray(SOUND)
    kind = data.draw(st.sampled_from(["flip", "cut", "noise", "longer"]))
    if kind == "flip":
        whole[data.draw(st.integers(0, len(whole) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    elif kind == "cut":
        whole = whole[: data.draw(st.integers(0, len(whole) - 1))]
    elif kind == "longer":
        whole += data.draw(st.binary(min_size=1, max_size=20))
    else:
        whole = bytearray(data.draw(st.binary(max_size=300)))
    with pytest.raises(InvalidError):
        load_session(bytes(whole), MINE)


SOUND = dump_session(content(keep_history=True))
