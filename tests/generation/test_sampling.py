"""Sampling: a pure function, batched over lanes, with known random numbers."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.errors import UserError
from lm.generation.sampling import RECENT, Batch, Sampling, last_ids, logprobs, penalise, philox, remember, sample, uniform

VOCABULARY = 40


def draws(sampling: Sampling, logits: torch.Tensor, count: int = 4000) -> torch.Tensor:
    """How often each id is drawn at `count` positions."""
    batch = Batch.of([sampling] * count)
    ids = sample(logits.expand(count, -1), batch, torch.full((count, RECENT), -1), torch.arange(count))
    return torch.bincount(ids, minlength=logits.shape[-1]) / count


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        # the known answers of Random123 for philox4x32-10
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_the_random_numbers_are_philox(counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]) -> None:
    words = philox(tuple(torch.tensor([x]) for x in counter), tuple(torch.tensor([x]) for x in key))  # type: ignore[arg-type]
    assert tuple(int(word) for word in words) == expected


def test_uniform_numbers_are_uniform_and_differ_by_seed_stream_and_position() -> None:
    n = 20_000
    zeros, counting = torch.zeros(n, dtype=torch.int64), torch.arange(n)
    columns = [uniform(counting, zeros, zeros), uniform(zeros, counting, zeros), uniform(zeros, zeros, counting)]
    for numbers in columns:
        assert bool(((numbers >= 0) & (numbers < 1)).all())
        assert len(numbers.unique()) == n
        assert float(numbers.mean()) == pytest.approx(0.5, abs=0.01)
        assert float((numbers[1:] - 0.5).mul(numbers[:-1] - 0.5).mean() * 12) == pytest.approx(0, abs=0.03)
        histogram = torch.histc(numbers, 50, 0, 1) / n * 50
        assert float((histogram - 1).abs().max()) < 0.2
    for one, other in [(0, 1), (0, 2), (1, 2)]:
        assert float((columns[one][1:] == columns[other][1:]).double().mean()) == 0


@st.composite
def samplings(draw: st.DrawFn) -> Sampling:
    return Sampling(
        temperature=draw(st.sampled_from([0.0, 0.01, 0.8, 1.0, 50.0])),
        top_k=draw(st.sampled_from([0, 1, 3, VOCABULARY, 10_000])),
        top_p=draw(st.sampled_from([1e-9, 0.3, 0.9, 1.0])),
        min_p=draw(st.sampled_from([0.0, 0.1, 1.0])),
        repetition_penalty=draw(st.sampled_from([0.5, 1.0, 1.3])),
        seed=draw(st.integers(0, 2**63 - 1)),
        stream=draw(st.integers(0, 2**63 - 1)),
    )


@settings(max_examples=60, deadline=None)
@given(st.lists(samplings(), min_size=1, max_size=6), st.integers(0, 2**32))
def test_a_lane_draws_the_same_token_alone_and_in_any_company(lanes: list[Sampling], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(lanes), VOCABULARY, generator=generator) * 4
    logits[:, 7] = -math.inf
    recent = torch.randint(-1, VOCABULARY, (len(lanes), RECENT), generator=generator)
    position = torch.randint(0, 10**9, (len(lanes),), generator=generator)
    together = sample(logits, Batch.of(lanes), recent, position)
    for i, lane in enumerate(lanes):
        alone = sample(logits[i : i + 1], Batch.of([lane]), recent[i : i + 1], position[i : i + 1])
        assert int(alone) == int(together[i])
        assert int(alone) != 7
        scores = penalise(logits[i : i + 1], Batch.of([lane]).penalty, recent[i : i + 1])[0]
        if lane.temperature == 0 or lane.top_k == 1 or lane.min_p == 1 or lane.top_p < 1e-8:
            assert int(alone) == int(scores.argmax())
        if 0 < lane.top_k < VOCABULARY:
            assert float(scores[int(alone)]) >= float(scores.topk(lane.top_k).values[-1])


def test_drawn_frequencies_follow_the_softmax_at_the_temperature() -> None:
    logits = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(3)) * 2
    expected = (logits / 1.5).softmax(-1)
    assert float((draws(Sampling(temperature=1.5), logits, 40_000) - expected).abs().max()) < 0.012


@pytest.mark.parametrize(
    ("change", "kept"),
    [({"top_k": 2}, [0, 1]), ({"top_p": 0.75}, [0, 1]), ({"top_p": 0.85}, [0, 1, 2]), ({"min_p": 0.21}, [0, 1]),
     ({"top_k": 3, "top_p": 0.6}, [0, 1]), ({"top_k": 1, "top_p": 0.99}, [0])],
    ids=str,
)  # fmt: skip
def test_truncation_keeps_the_right_tokens_and_their_proportions(change: dict[str, float], kept: list[int]) -> None:
    chances = torch.tensor([0.5, 0.3, 0.1, 0.06, 0.04])
    found = draws(dataclasses.replace(Sampling(temperature=1.0, seed=5), **change), chances.log(), 10_000)  # type: ignore[arg-type]
    assert found.nonzero().squeeze(-1).tolist() == kept
    assert float((found[kept] - chances[kept] / chances[kept].sum()).abs().max()) < 0.02


def test_the_penalty_looks_at_the_last_256_ids_and_not_further_back() -> None:
    recent = last_ids([5], 1)[None]
    remember(recent, torch.tensor([1]), torch.tensor([6]))
    assert sorted(recent[recent >= 0].tolist()) == [5, 6]
    logits = torch.tensor([[2.0, -2.0, 0.0, 1.0, 1.0, 4.0, -4.0]])
    assert penalise(logits, torch.tensor([2.0]), recent)[0].tolist() == [2.0, -2.0, 0.0, 1.0, 1.0, 2.0, -8.0]
    for position in range(2, 2 + RECENT):
        remember(recent, torch.tensor([position]), torch.tensor([0]))
    assert recent.unique().tolist() == [0]
    ids = list(range(1000))
    assert sorted(last_ids(ids, 1000).tolist()) == ids[-RECENT:]
    assert int(last_ids(ids, 1000)[999 % RECENT]) == 999


def test_logprobs_are_the_models_own() -> None:
    logits = torch.randn(3, VOCABULARY)
    chosen = torch.tensor([1, 2, 3])
    own, ids, values = logprobs(logits, chosen, 5)
    expected = logits.log_softmax(-1)
    assert torch.equal(own, expected[torch.arange(3), chosen])
    assert torch.equal(values, expected.gather(1, ids))
    assert torch.equal(ids[:, 0], logits.argmax(-1))


def test_every_setting_out_of_range_is_named_at_once() -> None:
    bad = Sampling(temperature=-1, top_k=-3, top_p=math.nan, min_p=2, repetition_penalty=0, seed=2**70, stream=-1)
    with pytest.raises(UserError) as error:
        bad.checked()
    assert len(error.value.problems) == 7
    for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "stream"):
        assert name in str(error.value)
