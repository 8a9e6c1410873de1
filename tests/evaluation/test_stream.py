"""Every token once, with memory and window carried: against the plainest way to compute it, at any batch and cut."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lm.config import load_model_config
from lm.evaluation.corpus import InMemory, Item
from lm.evaluation.stream import Open, StoppedError, Watch, evaluate
from lm.evaluation.tally import Outcome
from lm.evaluation.variants import Mode
from lm.model import PMI, State
from lm.model.proofs import draw_zeros
from lm.model.state import Remembered, map_tensors
from tests.evaluation.conftest import make_model

T, BOS = 8, 256
LENGTHS = (40, 1, 8, 9, 7, 64, 33, 2, 16)


@pytest.fixture(scope="module", params=[("layer", "null"), ("global", "{rows: 50, width: 6}")], ids=["layer", "global verbatim"])
def model(request: pytest.FixtureRequest) -> PMI:
    scope, verbatim = request.param
    return make_model(f"memory.scope={scope}", "memory.layers=all", f"memory.verbatim={verbatim}").double()


def documents(lengths: Sequence[int] = LENGTHS) -> list[Item]:
    generator = np.random.default_rng(3)
    arrays = [generator.integers(0, 256, length).astype(np.uint8) for length in lengths]
    return [Item(i, f"d{i}", len(array), len(array), len(array), InMemory(array)) for i, array in enumerate(arrays)]


def run(model: PMI, items: list[Item], mode: Mode = "on", **options: object) -> dict[int, Outcome]:
    found: dict[int, Outcome] = {}

    def done(outcome: Outcome) -> None:
        assert outcome.number not in found
        found[outcome.number] = outcome

    evaluate(model, items, mode, BOS, Watch(done=done), **options)  # type: ignore[arg-type]
    return found


def holding(state: State, memory: Remembered) -> State:
    """A state with another memory, every level of it named here: not by the method that the evaluator uses."""
    return state._replace(memories=memory.memories, verbatim=memory.verbatim)


@torch.no_grad()
def plainly(model: PMI, item: Item, donated: list[Remembered] | None = None, mode: Mode = "on") -> tuple[list[float], list]:
    """Nats of each token, read segment by segment in a lane alone; and the memory before each segment."""
    tokens = torch.tensor([BOS, *item.read(0, item.length).tolist()])
    state, nats, memories = model.initial_state(1), [], []
    for first in range(0, item.length, T):
        cut = tokens[first : min(first + T, item.length) + 1]
        if mode == "reset":
            state = holding(state, model.initial_state(1).remembered)
        if donated is not None:
            state = holding(state, donated[min(first // T, len(donated) - 1)])
        memories.append(map_tensors(torch.clone, state.remembered))
        hidden, state = model(cut[None, :-1], state)
        nats += model.head.nll(hidden, cut[None, 1:])[0].tolist()
    if item.length % T == 0:
        memories.append(state.remembered)
    return nats, memories


def test_n_tokens_give_n_predictions_as_a_document_read_alone_does(model: PMI) -> None:
    items = documents()
    found = run(model, items, lanes=3, call_tokens=64)
    for item in items:
        nats, _ = plainly(model, item)
        assert len(nats) == item.length == found[item.number].tokens
        assert found[item.number].nats == pytest.approx(sum(nats), rel=1e-10)
        assert found[item.number].first == pytest.approx(sum(nats[:T]), rel=1e-10)
        for first, last, total in found[item.number].bins:
            assert total == pytest.approx(sum(nats[first:last]), rel=1e-10)
        assert sum(last - first for first, last, _ in found[item.number].bins) == item.length
        assert sum(tokens for tokens, _ in found[item.number].blocks) == item.length


def test_reset_puts_the_initial_memory_back_at_each_segment_and_keeps_the_window(model: PMI) -> None:
    found = run(model, documents(), "reset", lanes=4)
    for item in documents():
        assert found[item.number].nats == pytest.approx(sum(plainly(model, item, mode="reset")[0]), rel=1e-10)
    assert found[0].nats != pytest.approx(sum(plainly(model, documents()[0])[0]), rel=1e-6)


def test_shuffled_reads_the_next_documents_memory_of_the_same_segment(model: PMI) -> None:
    items = documents()
    found = run(model, items, "shuffled", lanes=3)
    for item, donor in zip(items, [*items[1:], items[0]], strict=True):
        nats, _ = plainly(model, item, donated=plainly(model, donor)[1])
        assert found[item.number].nats == pytest.approx(sum(nats), rel=1e-10)
    assert found[0].nats == pytest.approx(sum(plainly(model, items[0], donated=plainly(model, items[1])[1])[0]), rel=1e-10)


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=8), st.integers(1, 9), st.integers(1, 200),
    st.sampled_from(["on", "reset", "shuffled"]),
)  # fmt: skip
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_result_does_not_depend_on_lanes_or_on_how_calls_are_cut(
    model: PMI, lengths: list[int], lanes: int, call_tokens: int, mode: Mode
) -> None:
    items = documents(lengths)
    found, plain = run(model, items, mode, lanes=lanes, call_tokens=call_tokens), run(model, items, mode, lanes=1, call_tokens=8)
    assert sorted(found) == sorted(plain) == [item.number for item in items]
    for number, outcome in found.items():
        assert abs(outcome.nats - plain[number].nats) <= 1e-6 * plain[number].tokens


@pytest.mark.parametrize("mode", ["on", "reset", "shuffled"])
def test_at_tiny_in_float64_a_text_gives_the_same_nats_to_a_millionth_however_it_is_read(moby_dick: str, mode: Mode) -> None:
    torch.manual_seed(0)
    model = draw_zeros(PMI(load_model_config("tiny"))).eval().double()
    text = np.frombuffer(moby_dick.encode()[5_000:6_300], np.uint8)
    cuts = [(0, 500), (500, 533), (533, 1_300)]
    items = [Item(i, str(i), b - a, 1, 1, InMemory(text[a:b])) for i, (a, b) in enumerate(cuts)]
    ways = [run(model, items, mode, lanes=lanes, call_tokens=tokens) for lanes, tokens in ((1, 32), (3, 4_096), (2, 320))]
    for number, outcome in ways[0].items():
        for other in ways[1:]:
            assert abs(other[number].nats - outcome.nats) <= 1e-6 * outcome.tokens


@given(st.integers(0, 30), st.sampled_from(["on", "reset", "shuffled"]))
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_stopped_after_any_call_it_goes_on_to_the_same_result(model: PMI, calls: int, mode: Mode) -> None:
    items, found, left = documents(), {}, [calls]
    whole = run(model, items, mode, lanes=3, call_tokens=48)

    def stop() -> bool:
        left[0] -= 1
        return left[0] < 0

    def done(outcome: Outcome) -> None:
        found[outcome.number] = outcome

    opened: list[Open] = []
    try:
        evaluate(model, items, mode, BOS, Watch(done=done, stop=stop), 3, 48)
    except StoppedError as stopped:
        opened = stopped.open
        assert not {part.tally.item.number for part in opened} & found.keys()
    evaluate(model, items, mode, BOS, Watch(done=done), 2, 24, opened, finished=set(found))
    assert {n: pytest.approx(o.nats, rel=1e-10) for n, o in found.items()} == {n: o.nats for n, o in whole.items()}
