"""The state is a value: nothing hidden, nothing mutated, lanes can be taken apart and put together."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.model import PMI, State
from lm.model.state import named_tensors, tensors
from tests.model.variants import build

MODELS = {
    "layer": build([]),
    "global": build(["memory.scope=global", "memory.layers=all", "memory.correction=true", "memory.consolidation=probe"]),
    "off": build(["memory=off", "window=5"]),
}


def read(model: PMI, count: int, lanes: int = 1, seed: int = 0) -> State:
    tokens = torch.randint(0, 23, (lanes, count), generator=torch.Generator().manual_seed(seed))
    return model(tokens, model.initial_state(lanes))[1]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    kind=st.sampled_from(list(MODELS)),
    cuts=st.lists(st.lists(st.integers(0, 21), min_size=2, max_size=2), min_size=1, max_size=6),
    seed=st.integers(0, 1000),
)
def test_any_cutting_with_any_raggedness_gives_the_same_result(kind: str, cuts: list[list[int]], seed: int) -> None:
    """Lanes get different numbers of tokens in each call, and end as if each had been read alone in one."""
    model = MODELS[kind]
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 23, (2, 140), generator=generator)
    taken = [0, 0]
    state, collected = model.initial_state(2), [[], []]
    with torch.no_grad():
        for counts in cuts:
            width = max(1, *counts)
            call = torch.stack([torch.nn.functional.pad(tokens[b, taken[b] : taken[b] + width], (0, 0))[:width] for b in (0, 1)])
            hidden, state = model(call, state, torch.tensor(counts))
            for b in (0, 1):
                collected[b].append(hidden[b, : counts[b]])
                assert not hidden[b, counts[b] :].any()
                taken[b] += counts[b]
        for b in (0, 1):
            got = torch.cat(collected[b])
            assert int(state.position[b]) == taken[b]
            if taken[b]:
                alone, after = model(tokens[b : b + 1, : taken[b]], model.initial_state(1))
                torch.testing.assert_close(got, alone[0], rtol=1e-4, atol=1e-5)
                for mine, theirs in zip(tensors(state.select([b]).memories), tensors(after.memories), strict=True):
                    torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", MODELS)
def test_a_call_leaves_its_state_as_it_was(kind: str) -> None:
    model = MODELS[kind]
    state = read(model, 11, lanes=2)
    copy = state.clone()
    with torch.no_grad():
        for count in 1, 5, 30:
            model(torch.zeros(2, count, dtype=torch.long), state)
    assert all(torch.equal(a, b) for a, b in zip(tensors(state), tensors(copy), strict=True))


@pytest.mark.parametrize("kind", MODELS)
def test_donating_the_state_changes_no_result(kind: str) -> None:
    model = MODELS[kind]
    tokens = torch.randint(0, 23, (3, 40))
    with torch.inference_mode():
        kept, donated = model.initial_state(3), model.initial_state(3)
        _, kept = model(tokens[:, :3], kept, torch.tensor([1, 2, 3]))
        _, donated = model(tokens[:, :3], donated, torch.tensor([1, 2, 3]), donate=True)
        for t in range(3, 40):
            one, kept = model(tokens[:, t : t + 1], kept)
            two, donated = model(tokens[:, t : t + 1], donated, donate=True)
            assert torch.equal(one, two)
        assert all(torch.equal(a, b) for a, b in zip(tensors(kept), tensors(donated), strict=True))


@pytest.mark.parametrize("kind", MODELS)
def test_lanes_can_be_taken_apart_and_put_together(kind: str) -> None:
    model = MODELS[kind]
    a, b = read(model, 11, lanes=2, seed=1), read(model, 19, lanes=1, seed=2)
    joined = State.concatenate([a, b])
    assert joined.position.tolist() == [11, 11, 19]
    assert all(torch.equal(x, y) for x, y in zip(tensors(joined.select([2])), tensors(b), strict=True))
    merged = joined.merge([0], b)
    assert merged.position.tolist() == [19, 11, 19]
    assert all(torch.equal(x, y) for x, y in zip(tensors(merged.select([0])), tensors(b), strict=True))
    assert joined.position.tolist() == [11, 11, 19]
    fresh = model.reset(joined, [1])
    assert fresh.position.tolist() == [11, 0, 19]
    assert all(torch.equal(x, y) for x, y in zip(tensors(fresh.select([1])), tensors(model.initial_state(1)), strict=True))


def test_detach_cuts_the_graph_and_gradient_reaches_the_writer_only_without_it() -> None:
    model = MODELS["layer"]
    tokens = torch.randint(0, 23, (1, 16))
    _, state = model(tokens[:, :8], model.initial_state(1))
    assert state.memories[0].working.requires_grad
    for carried, reached in (state, True), (state.detach(), False):
        model.zero_grad(set_to_none=True)
        hidden, _ = model(tokens[:, 8:], carried)
        hidden.square().sum().backward(retain_graph=True)
        gradient = model.memories[0].write.query.grad
        assert (gradient is not None and bool(gradient.any())) is reached


def test_state_is_constant_in_size_and_memory_stays_float32_under_autocast() -> None:
    model = MODELS["layer"]
    assert read(model, 3).nbytes == read(model, 300).nbytes
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        hidden, state = model(torch.zeros(1, 21, dtype=torch.long), model.initial_state(1))
    assert state.keys[0].dtype == torch.bfloat16
    assert all(x.dtype == torch.float32 for _, x in named_tensors((state.memories, state.open, state.readouts)))
    assert hidden.isfinite().all()


@pytest.mark.parametrize("kind", MODELS)
def test_documents_that_start_inside_a_step_equal_documents_read_alone(kind: str) -> None:
    """Whole segments with starts: two documents in lane 0 (the first padded), one running on in lane 1."""
    model = MODELS[kind]
    first, second, other = (torch.randint(0, 23, (1, n)) for n in (13, 24, 48))
    tokens = torch.zeros(2, 40, dtype=torch.long)
    tokens[0, :13], tokens[0, 16:] = first, second
    tokens[1] = other[:, 8:]
    starts = torch.tensor([[1, 0, 1, 0, 0], [0, 0, 0, 0, 0]]).bool()
    with torch.no_grad():
        _, running = model(other[:, :8], model.initial_state(1))
        state = State.concatenate([read(model, 5, seed=9), running])  # lane 0 holds the remains of something else
        hidden, after = model(tokens, state, starts=starts)
        for got, document in (hidden[:1, :13], first), (hidden[:1, 16:], second):
            torch.testing.assert_close(got, model(document, model.initial_state(1))[0], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(hidden[1:], model(other, model.initial_state(1))[0][:, 8:], rtol=1e-4, atol=1e-5)
    assert after.position.tolist() == [24, 48]


def test_initial_memory_learns_from_a_start_inside_a_step() -> None:
    model = MODELS["layer"]
    model.zero_grad(set_to_none=True)
    starts = torch.tensor([[False, True]])
    hidden, _ = model(torch.zeros(1, 16, dtype=torch.long), read(model, 8).detach(), starts=starts)
    hidden.square().sum().backward()
    assert model.initial_memory.working_0.grad.any()


@pytest.mark.parametrize("kind", MODELS)
def test_in_float64_cuttings_agree_to_ten_digits(kind: str) -> None:
    model = copy.deepcopy(MODELS[kind]).double()
    tokens = torch.randint(0, 23, (2, 45))
    with torch.no_grad():
        whole, after = model(tokens, model.initial_state(2))
        state, pieces = model.initial_state(2), []
        for first in range(0, 45, 7):
            hidden, state = model(tokens[:, first : first + 7], state)
            pieces.append(hidden)
    assert whole.dtype == torch.float64
    for mine, theirs in zip(tensors(state.memories), tensors(after.memories), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", MODELS)
def test_gradients_of_ragged_lanes_equal_those_of_lanes_read_alone(kind: str) -> None:
    model = copy.deepcopy(MODELS[kind]).double()
    tokens, calls = torch.randint(0, 23, (3, 30)), [[1, 4, 0], [9, 3, 0], [12, 20, 5]]
    totals = [sum(counts[b] for counts in calls) for b in range(3)]

    def gradients() -> list[torch.Tensor]:
        found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad(set_to_none=True)
        return found

    state, loss, taken = model.initial_state(3), torch.zeros(()), [0, 0, 0]
    for counts in calls:
        call = torch.stack([tokens[b].roll(-taken[b])[: max(counts)] for b in range(3)])
        hidden, state = model(call, state, torch.tensor(counts))
        loss = loss + hidden.square().sum()
        taken = [t + n for t, n in zip(taken, counts, strict=True)]
    loss.backward()
    ragged = gradients()
    sum(model(tokens[b : b + 1, : totals[b]], model.initial_state(1))[0].square().sum() for b in range(3)).backward()
    for mine, theirs in zip(ragged, gradients(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)


def test_a_mask_is_not_taken_for_lane_numbers() -> None:
    with pytest.raises(TypeError, match="not a mask"):
        MODELS["layer"].reset(read(MODELS["layer"], 3, lanes=3), torch.tensor([False, False, True]))


def test_a_document_start_cures_a_lane_of_nan() -> None:
    model = MODELS["layer"]
    state = read(model, 16, lanes=2)
    state.values[0][1] = torch.nan
    hidden, _ = model(torch.zeros(2, 8, dtype=torch.long), state.detach(), starts=torch.tensor([[False], [True]]))
    assert hidden.isfinite().all()
