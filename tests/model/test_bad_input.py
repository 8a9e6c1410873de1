"""Bad input gets a clear exception with the values in it, and the state stays as it was."""

import pytest
import torch

from lm.model.checks import InputError, StateError
from lm.model.state import State, tensors
from tests.model.variants import build

MODEL = build([])


def ids(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.long)


def after(count: int, lanes: int = 2) -> State:
    with torch.no_grad():
        return MODEL(ids(lanes, count), MODEL.initial_state(lanes))[1]


@pytest.mark.parametrize(
    ("tokens", "options", "error", "message"),
    [
        (ids(2, 3) + 23, {}, InputError, r"token id 23 is out of range; this model knows 0\.\.22"),
        (ids(2, 3) - 1, {}, InputError, "token id -1 is out of range"),
        (ids(2, 0), {}, InputError, r"empty: shape \[2, 0\]"),
        (ids(0, 2), {}, InputError, "empty"),
        (ids(2), {}, InputError, r"integers \[lanes, tokens\]; got torch.int64 \[2\]"),
        (ids(2, 3).float(), {}, InputError, "got torch.float32"),
        (ids(3, 3), {}, StateError, "tokens have 3 lanes but the state has 2"),
        (ids(2, 3), {"lengths": torch.tensor([1, 4])}, InputError, r"one int64 of 0\.\.3 .* got \[1, 4\]"),
        (ids(2, 3), {"lengths": torch.tensor([1])}, InputError, "each of 2 lanes"),
        (ids(2, 3), {"starts": torch.tensor([[True], [True]])}, InputError, "3 is not a multiple of segment 8"),
        (ids(2, 16), {"starts": torch.tensor([[True], [True]])}, InputError, r"bool \[2, 2\]"),
        (ids(2, 8), {"starts": torch.tensor([[True], [False]])}, StateError, "lane 1 is at position 5, inside a segment of 8"),
        (ids(2, 8), {"starts": torch.ones(2, 1).bool(), "lengths": torch.tensor([8, 8])}, InputError, "lengths cannot be given"),
        (ids(2, 1), {"donate": True}, InputError, "inference_mode"),
    ],
)
def test_a_bad_call_is_refused_with_its_values(
    tokens: torch.Tensor, options: dict[str, torch.Tensor], error: type[Exception], message: str
) -> None:
    state = after(5)
    copy = state.clone()
    with pytest.raises(error, match=message):
        MODEL(tokens, state, **options)
    assert all(torch.equal(a, b) for a, b in zip(tensors(state), tensors(copy), strict=True))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["layers=2"], r"another model: keys\.2, values\.2 in only one of them"),
        (["memory=off"], "another model: memories"),
        (["window=16"], r"keys\.0 is \[24, 2, 16\], this model's \[16, 2, 16\]"),
        (["memory.slots=9"], r"memories\.0\.working is \[9, 32\]"),
        (["memory.consolidation=probe"], r"memories\.0\.long_term is"),
        (["memory.correction=true"], r"readouts\.0\.working is"),
    ],
)
def test_a_state_of_another_model_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(StateError, match=message):
        MODEL(ids(1, 1), build(overrides).initial_state(1))


def test_a_state_of_another_type_is_refused() -> None:
    state = after(5)
    for layer in 0, 2:
        narrow = state._replace(keys=tuple(k.half() if i == layer else k for i, k in enumerate(state.keys)))
        with pytest.raises(StateError, match=rf"keys\.{layer} was made in torch.float16, this model keeps it in torch.float32"):
            MODEL(ids(2, 1), narrow)
    memory = state.memories[0]
    with pytest.raises(StateError, match=r"memories\.0\.working was made in torch.bfloat16"):
        MODEL(ids(2, 1), state._replace(memories=(memory._replace(working=memory.working.bfloat16()),)))


def test_a_state_that_does_not_agree_with_itself_is_refused() -> None:
    state = after(5)
    with pytest.raises(StateError, match=r"memories\.0\.working has 1 lanes, position 2"):
        MODEL(ids(2, 1), state._replace(memories=after(5, lanes=1).memories))
    with pytest.raises(StateError, match=r"0 or more; got \[-3, 5\]"):
        MODEL(ids(2, 1), state._replace(position=torch.tensor([-3, 5])))


@pytest.mark.parametrize("part", ["memory", "window", "open"])
@pytest.mark.parametrize("position", [16, 13])
def test_nan_in_a_state_is_named_with_its_lane(part: str, position: int) -> None:
    state = after(position)
    place = {"memory": state.memories[0].long_term, "window": state.values[1], "open": state.open[0].features}[part]
    place[1] = torch.nan
    if part == "open" and position == 16:
        return  # at a boundary there is no open segment, and what is left of the last one is never read
    copy = state.clone()
    with pytest.raises(StateError, match=r"lanes \[1\]: .* not finite"):
        MODEL(ids(2, 3), state)
    for a, b in zip(tensors(state), tensors(copy), strict=True):
        torch.testing.assert_close(a, b, equal_nan=True, rtol=0, atol=0)
    assert MODEL(ids(2, 3), MODEL.reset(state, [1]))[0].isfinite().all()
