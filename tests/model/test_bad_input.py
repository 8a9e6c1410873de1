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
        (["memory.correction=true"], r"readouts\.0\.correcting is"),
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
    sound = state.clone()
    place[1] = torch.nan
    if part == "open" and position == 16:  # at a boundary there is no open segment, and what is left of the last is never read
        for count in 3, 8:
            torch.testing.assert_close(MODEL(ids(2, count), state)[0], MODEL(ids(2, count), sound)[0], rtol=0, atol=0)
        return
    copy = state.clone()
    with pytest.raises(StateError, match=r"lanes \[1\]: .* not finite"):
        MODEL(ids(2, 3), state)
    for a, b in zip(tensors(state), tensors(copy), strict=True):
        torch.testing.assert_close(a, b, equal_nan=True, rtol=0, atol=0)
    assert MODEL(ids(2, 3), MODEL.reset(state, [1]))[0].isfinite().all()


def test_in_training_the_loss_shows_nan_and_no_exception_does() -> None:
    model, state = build([]).train(), after(16)
    state.memories[0].long_term[1] = torch.nan
    hidden, _ = model(ids(2, 3), state)
    assert not model.head.loss(hidden, ids(2, 3)).isfinite()


@pytest.mark.parametrize(
    ("targets", "mask", "message"),
    [
        (ids(2, 3) - 100, None, r"target -100 is out of range; this model knows 0\.\.22"),
        (ids(2, 3) - 1, None, "target -1 is out of range"),
        (ids(2, 3) + 23, None, "target 23 is out of range"),
        (ids(2, 3).float(), None, r"int64 \[2, 3\].* got torch.float32"),
        (ids(2, 4), None, r"int64 \[2, 3\].* got torch.int64 \[2, 4\]"),
        (ids(3, 2), None, r"\[3, 2\]"),
        (ids(2, 3), torch.ones(3).bool(), r"mask must be bool \[2, 3\], as the targets; got torch.bool \[3\]"),
        (ids(2, 3), torch.ones(2, 3), "mask must be bool"),
    ],
)
@pytest.mark.parametrize("overrides", [[], ["cutoffs=[5, 11]"]], ids=" ".join)
def test_targets_without_a_probability_are_refused(
    overrides: list[str], targets: torch.Tensor, mask: torch.Tensor | None, message: str
) -> None:
    model = MODEL if not overrides else build(overrides)
    with pytest.raises(InputError, match=message):
        model.head.loss(torch.zeros(2, 3, 32), targets, mask)


def test_lanes_that_a_state_does_not_have_are_refused() -> None:
    state = after(5)
    for wrong in [5], [-1], [0, 2], torch.tensor([2]):
        with pytest.raises(InputError, match=r"has the lanes 0\.\.1"):
            state.select(wrong)
    with pytest.raises(InputError, match=r"lanes \[7\]"):
        MODEL.reset(state, [7])
    with pytest.raises(InputError, match="a state cannot have -1 lanes"):
        MODEL.initial_state(-1)
    assert MODEL.initial_state(0).lanes == state.select([]).lanes == 0


def test_a_merge_with_other_lanes_or_another_model_is_refused() -> None:
    state = after(5)
    with pytest.raises(StateError, match=r"2 lanes \[0, 1\] are to be replaced, but the other state has 1"):
        state.merge([0, 1], after(5, lanes=1))
    with pytest.raises(StateError, match=r"another model: keys\.2, values\.2 in only one of them"):
        state.merge([0], build(["layers=2"]).initial_state(1))
    with pytest.raises(StateError, match=r"another model: memories\.0\.working is \[9, 32\], here \[4, 32\]"):
        state.merge([0], build(["memory.slots=9"]).initial_state(1))


def test_a_model_turned_to_bfloat16_as_a_whole_is_refused_by_name() -> None:
    state, model = after(5), build([]).bfloat16()
    with pytest.raises(InputError, match=r"compute_in\(torch.bfloat16\)"):
        model.initial_state(1)
    with pytest.raises(InputError, match="its memory needs float32"):
        model(ids(2, 1), state)
