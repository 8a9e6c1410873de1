"""Snapshots: what was stored comes back, and what does not fit is refused by name."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from lm.model import PMI
from lm.model.snapshot import Identity, SnapshotError, dump, load_snapshot, sizes
from lm.model.state import tensors
from tests.model.variants import build

MINE = Identity("model-1", "tokenizer-1")
MODEL = build(["memory.layers=[0, 2]"])


def stored(model: PMI = MODEL, count: int = 24) -> bytes:
    tokens = torch.randint(0, 23, (2, count), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        return dump(model, model(tokens, model.initial_state(2))[1], 1, MINE)


def edited(**changes: str) -> bytes:
    """A snapshot with its metadata changed."""
    data = stored()
    return bytes(save(load(data), {"snapshot": json.dumps(about(data) | changes)}))


def about(data: bytes) -> dict[str, str]:
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return json.loads(header["__metadata__"]["snapshot"])


def test_a_snapshot_comes_back_bit_for_bit() -> None:
    tokens = torch.randint(0, 23, (1, 24))
    with torch.no_grad():
        _, state = MODEL(tokens, MODEL.initial_state(1))
        again = load_snapshot(MODEL, dump(MODEL, state, 0, MINE), MINE)
        one, _ = MODEL(tokens, state)
        two, _ = MODEL(tokens, again)
    assert torch.equal(one, two)
    assert again.position.tolist() == [24]
    assert dump(MODEL, again, 0, MINE) == dump(MODEL, state, 0, MINE)  # the same content has the same bytes


def test_a_snapshots_size_is_constant_and_as_announced() -> None:
    assert len(stored(count=800)) - len(stored(count=8)) <= 8  # the position's digits
    memory, window = sizes(MODEL)
    assert 0 < len(stored()) - memory - window < 4096
    assert memory == sum(x[0].nbytes for x in tensors(MODEL.initial_state(1).memories))


def test_inside_a_segment_there_is_no_snapshot() -> None:
    with torch.no_grad(), pytest.raises(SnapshotError, match="position 3, inside a segment of 8"):
        dump(MODEL, MODEL(torch.zeros(1, 3, dtype=torch.long), MODEL.initial_state(1))[1], 0, MINE)


def test_values_that_are_not_finite_are_never_written() -> None:
    state = MODEL.initial_state(1)
    state.values[1][0, 2] = torch.nan
    with pytest.raises(SnapshotError, match=r"window\.1\.values"):
        dump(MODEL, state.detach(), 0, MINE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "1"}, "format is '1', here it is '2'"),
        ({"model": "other"}, "model is 'other'"),
        ({"tokenizer": "other"}, "tokenizer is 'other'"),
        ({"position": "25"}, "multiple of the segment"),
        ({"position": "-8"}, "multiple of the segment"),
        ({"position": "9" * 30}, "multiple of the segment"),
        ({"position": "024"}, "not in the form"),
        ({"position": "٢٤"}, "multiple of the segment"),
        ({"model": "x" * 10**6}, "damaged snapshot: [0-9,]+ bytes"),
        ({"position": "32"}, "checksum"),
        ({"checksum": "0"}, "checksum"),
    ],
)
def test_a_mismatch_is_refused_by_name(changes: dict[str, str], message: str) -> None:
    with pytest.raises(SnapshotError, match=message):
        load_snapshot(MODEL, edited(**changes), MINE)


def test_a_snapshot_of_another_shape_or_with_nan_is_refused() -> None:
    for other in (
        build(["memory=off"]),
        build(["window=16", "memory.layers=[0, 2]"]),
        build(["memory.slots=9", "memory.layers=[0, 2]"]),
    ):
        with pytest.raises(SnapshotError, match="this model's"):
            load_snapshot(MODEL, stored(other), MINE)
    data = stored()
    parts = load(data)
    parts["memory.0.working"][0, 0, 0] = torch.inf
    with pytest.raises(SnapshotError, match=r"memory\.0\.working holds values that are not finite"):
        load_snapshot(MODEL, bytes(save(parts, {"snapshot": json.dumps(about(data))})), MINE)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(data=st.data())
def test_damaged_bytes_are_refused_and_never_crash(data: st.DataObject) -> None:
    whole = bytearray(stored())
    kind = data.draw(st.sampled_from(["flip", "cut", "noise"]))
    if kind == "flip":
        place = data.draw(st.integers(0, len(whole) - 1))
        whole[place] ^= 1 << data.draw(st.integers(0, 7))
    elif kind == "cut":
        whole = whole[: data.draw(st.integers(0, len(whole) - 1))]
    else:
        whole = bytearray(data.draw(st.binary(max_size=200)))
    try:
        state = load_snapshot(MODEL, bytes(whole), MINE)
    except SnapshotError:
        return
    assert bytes(whole) == dump(MODEL, state, 0, MINE) == stored()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("overrides", [[], ["memory=off"], ["memory.scope=global", "memory.layers=all"]], ids=str)
def test_the_bytes_are_those_that_safetensors_itself_writes(overrides: list[str], dtype: torch.dtype) -> None:
    model = build(overrides).compute_in(dtype)
    with torch.no_grad():
        state = model(torch.randint(0, 23, (2, 16)), model.initial_state(2))[1]
    data = dump(model, state, 1, Identity("m", "t"))
    length = int.from_bytes(data[:8], "little")
    metadata = json.loads(data[8 : 8 + length])["__metadata__"]
    assert data == save(load(data), metadata)
