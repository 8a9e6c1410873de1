"""The engine without a store: the right tokens in any company, admission, cancellation, deadlines, death."""

import asyncio
import threading
import time
from typing import Any

import pytest
import torch

from lm.errors import UserError
from lm.generation.sampling import Sampling
from lm.model import PMI, State
from lm.model.pretrained import Checkpoint
from lm.model.proofs import draw_zeros
from serving.engine import Engine, EngineConfig, EngineStoppedError, QueueFullError, Request, StepError
from serving.engine.engine import FAILURES
from tests.serving.engine.conftest import SEGMENT, checkpoint, greedy, wait_for

GREEDY = Sampling(temperature=0)
TOLERANCE = 1e-4
"""Logits of a sequence alone and in company agree to this in float32; greedy choices may differ where the gap is smaller."""


def prompt_of(seed: int, most: int = 3 * SEGMENT) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    length = int(torch.randint(0, most, (), generator=generator))
    return torch.randint(0, 256, (length,), generator=generator).tolist()


def test_a_sequence_gives_the_same_greedy_tokens_alone_and_among_31_others() -> None:
    ties = 0
    for seed in range(8):
        found = checkpoint(seed)
        prompts = [prompt_of(1000 * seed + i) for i in range(32)]
        with Engine(found, EngineConfig(lanes=32)) as engine:
            streams = [engine.submit(Request(p, 20, GREEDY)) for p in prompts]
            together = [list(stream.result().ids) for stream in streams]
            alone = engine.submit(Request(prompts[seed], 20, GREEDY)).result().ids
        pairs = [(prompts[seed], list(alone)), *zip(prompts, together, strict=True)]
        for prompt, ids in pairs:
            # every choice against the model's own in one call of one lane: the likeliest, or tied with it
            with torch.inference_mode():
                tokens = torch.tensor([[found.tokenizer.bos, *prompt, *ids[:-1]]])
                logits = found.model.head.logits(found.model(tokens, found.model.initial_state(1))[0][0, len(prompt) :])
                logits[:, found.tokenizer.bos] = -torch.inf
            short = logits.amax(-1) - logits.gather(-1, torch.tensor(ids)[:, None]).squeeze(-1)
            assert float(short.max()) < TOLERANCE
            ties += int((short > 0).sum())
    assert ties <= 2  # of 5,280 choices


def test_logits_agree_with_the_models_own_whatever_the_company() -> None:
    found = checkpoint(3)
    prompts = [prompt_of(i) for i in range(16)]
    with Engine(found, EngineConfig(lanes=16)) as engine:
        streams = [engine.submit(Request(p, 12, Sampling(temperature=1, seed=i), logprobs=5)) for i, p in enumerate(prompts)]
        for prompt, stream in zip(prompts, streams, strict=True):
            event = stream.result()
            with torch.inference_mode():
                ids = torch.tensor([[found.tokenizer.bos, *prompt, *event.ids]])
                hidden, _ = found.model(ids, found.model.initial_state(1))
                logits = found.model.head.logits(hidden[0, len(prompt) : -1])
                logits[:, found.tokenizer.bos] = -torch.inf
                scores = logits.log_softmax(-1)
            for row, chosen, given in zip(scores, event.ids, event.logprobs, strict=True):
                assert given.own == pytest.approx(float(row[chosen]), abs=TOLERANCE)
                for id_, value in given.likeliest:
                    assert value == pytest.approx(float(row[id_]), abs=TOLERANCE)
                assert len(given.likeliest) == 5


def test_a_drawn_text_depends_on_seed_and_choice_and_on_nothing_else(engine: Engine) -> None:
    def draw(seed: int, choice: int = 0) -> tuple[int, ...]:
        return engine.submit(Request([1, 2, 3], 30, Sampling(temperature=1, seed=seed), choice=choice)).result().ids

    alone = draw(7)
    crowd = [engine.submit(Request([i], 30, Sampling(temperature=1, seed=i))) for i in range(6)]
    assert draw(7) == alone
    assert len({alone, draw(8), draw(7, 1), draw(7, 2)}) == 4
    for stream in crowd:
        stream.cancel()
    stream = engine.submit(Request([1, 2, 3], 1, Sampling(temperature=1, seed=7), choice=2))
    stream.result()
    assert (stream.usage.seed, stream.usage.stream, stream.usage.prompt, stream.usage.generated) == (7, 2 * 2**48, 4, 1)


def test_more_requests_than_lanes_all_end_and_lanes_are_reused(engine: Engine) -> None:
    streams = [engine.submit(Request(prompt_of(i), 5 + i % 7, GREEDY)) for i in range(40)]
    for i, stream in enumerate(streams):
        event = stream.result()
        assert event.ids == tuple(greedy(checkpoint(), prompt_of(i), 5 + i % 7)[0])
        assert event.finish == stream.finish == "length"
    assert engine.load == (0, 0)


def test_stop_strings_end_the_text_and_events_join_to_it(engine: Engine) -> None:
    whole = engine.submit(Request([5], 60, GREEDY)).result()
    assert whole.text == checkpoint().tokenizer.decode(list(whole.ids))
    stop = whole.text[20:23]
    first = whole.text.find(stop)
    events = list(engine.submit(Request([5], 60, GREEDY, stop=(stop, "never this"))))
    assert "".join(event.text for event in events) == whole.text[:first]
    assert events[-1].finish == "stop"
    assert sum(len(event.ids) for event in events) < 60


def test_who_comes_or_leaves_during_a_step_is_heeded_before_the_next(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    inner, inside, go_on, sizes = PMI.forward, threading.Event(), threading.Event(), []

    def forward(self: PMI, tokens: torch.Tensor, *args: Any, **settings: Any) -> Any:
        if inside.is_set() or len(tokens) == 2:
            sizes.append(tuple(tokens.shape))
        if len(sizes) == 1:
            inside.set()
            assert go_on.wait(10)
        return inner(self, tokens, *args, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(PMI, "forward", forward)
        staying, leaving = (engine.submit(Request([i], 40, GREEDY)) for i in (1, 2))
        assert inside.wait(10)  # both decode, and the step hangs in the model
        leaving.cancel()
        coming = engine.submit(Request([3, 4], 9, GREEDY))
        assert not coming.waited(0.05)
        go_on.set()
        assert coming.result().ids == tuple(greedy(checkpoint(), [3, 4], 9)[0])
        assert leaving.result().finish == "cancelled"
        assert staying.result().ids == tuple(greedy(checkpoint(), [1], 40)[0])
    # the step of two, one of the lane that stays with the new prompt behind it, then both
    assert sizes[:4] == [(2, 1), (1, 1), (1, 3), (2, 1)]


def test_a_long_prompt_never_delays_others_by_more_than_a_segment(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    inner = PMI.forward

    def spy(self: PMI, tokens: torch.Tensor, *args: Any, **settings: Any) -> Any:
        reads.append(tokens.shape[1])
        return inner(self, tokens, *args, **settings)

    with monkeypatch.context() as patch:
        patch.setattr(PMI, "forward", spy)
        decoding = engine.submit(Request([1], 400, GREEDY))
        long = engine.submit(Request([3] * (120 * SEGMENT), 2, GREEDY))
        wait_for(lambda: long.usage.read > SEGMENT)
        short = engine.submit(Request([2] * 20, 3, GREEDY))
        assert len(short.result().ids) == 3
        assert long.usage.read < 120 * SEGMENT  # the short prompt did not wait for the long one
        decoding.result()
        long.result()
    began, ended = reads.index(SEGMENT), len(reads) - reads[::-1].index(SEGMENT)
    between = [0]  # ids of prompts read between two decoding steps
    for count in reads[began : ended - 1]:
        between = [*between[:-1], between[-1] + count] if count > 1 else [*between, 0]
    assert max(reads) <= SEGMENT
    assert max(between) <= SEGMENT
    assert sum(count > 0 for count in between) > 50


def test_tenants_are_admitted_in_turns() -> None:
    order: list[str] = []
    with Engine(checkpoint(), EngineConfig(lanes=1, queue=64)) as engine:
        blocker = engine.submit(Request([1], 100_000, GREEDY))
        wait_for(lambda: blocker.usage.generated)
        streams = [(name, engine.submit(Request([1], 2, GREEDY, tenant=name))) for name in ["a"] * 6 + ["b"] * 2 + ["c"]]

        def follow(name: str, stream: Any) -> None:
            stream.result()
            order.append(name)

        threads = [threading.Thread(target=follow, args=item) for item in streams]
        for thread in threads:
            thread.start()
        blocker.cancel()
        for thread in threads:
            thread.join(20)
    assert sorted(order[:3]) == ["a", "b", "c"]
    assert sorted(order[:5]) == ["a", "a", "b", "b", "c"]


def test_a_full_queue_refuses_and_a_cancelled_place_is_free_again() -> None:
    with Engine(checkpoint(), EngineConfig(lanes=1, queue=2)) as engine:
        running = engine.submit(Request([1], 10**6, GREEDY))
        wait_for(lambda: running.usage.generated)
        waiting = [engine.submit(Request([1], 1, GREEDY)) for _ in range(2)]
        with pytest.raises(QueueFullError, match="2 are allowed"):
            engine.submit(Request([1], 1, GREEDY))
        waiting[0].cancel()
        assert waiting[0].result().finish == "cancelled"
        engine.submit(Request([1], 1, GREEDY))
        running.cancel()
        assert running.result().finish == "cancelled"
        assert waiting[1].result().finish == "length"


def test_cancelling_during_prefill_frees_the_lane_at_once() -> None:
    with Engine(checkpoint(), EngineConfig(lanes=1)) as engine:
        long = engine.submit(Request([1] * 10**6, 1, GREEDY))
        wait_for(lambda: long.usage.read > 10 * SEGMENT)
        long.cancel()
        read = long.usage.read
        assert engine.submit(Request([1], 1, GREEDY)).result().finish == "length"
        assert long.result().finish == "cancelled"
        assert long.usage.read <= read + 4 * SEGMENT, "the turn under way, and no more than what ran while this thread looked"


def test_a_deadline_ends_a_text_with_what_there_is_and_a_waiting_request_without_any() -> None:
    with Engine(checkpoint(), EngineConfig(lanes=1)) as engine:
        running = engine.submit(Request([1], 10**6, GREEDY, deadline=0.4))
        waiting = engine.submit(Request([1], 5, GREEDY, deadline=0.1))
        assert waiting.result().finish == "deadline"
        event = running.result()
        assert event.finish == "deadline"
        assert event.ids == tuple(greedy(checkpoint(), [1], len(event.ids))[0])


def test_async_streams_run_side_by_side_and_one_that_is_left_is_cancelled(engine: Engine) -> None:
    async def one(i: int) -> tuple[int, ...]:
        return tuple([id_ async for event in engine.submit(Request([i], 25, GREEDY)) for id_ in event.ids])

    async def leave() -> None:
        events = engine.submit(Request([9], 10**6, GREEDY)).__aiter__()
        await anext(events)
        await events.aclose()  # type: ignore[attr-defined]

    async def everything() -> list[tuple[int, ...]]:
        results = await asyncio.gather(*(one(i) for i in range(8)))
        await asyncio.wait_for(leave(), 10)
        return results

    results = asyncio.run(everything())
    assert results == [tuple(greedy(checkpoint(), [i], 25)[0]) for i in range(8)]
    wait_for(lambda: engine.load == (0, 0))


class BrokenError(Exception):
    pass


def break_model(monkeypatch: pytest.MonkeyPatch, when: Any) -> None:
    inner = PMI.forward

    def forward(self: PMI, tokens: torch.Tensor, *args: Any, **settings: Any) -> Any:
        if when(tokens):
            raise BrokenError("the device is gone")
        return inner(self, tokens, *args, **settings)

    monkeypatch.setattr(PMI, "forward", forward)


def test_a_prompt_that_the_model_cannot_read_fails_alone(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    break_model(monkeypatch, lambda tokens: 66 in tokens and tokens.shape[1] > 1)
    good = engine.submit(Request([1], 60, GREEDY))
    bad = engine.submit(Request([66], 60, GREEDY))
    with pytest.raises(StepError, match="the device is gone"):
        bad.result()
    assert len(good.result().ids) == 60
    assert engine.alive


def test_a_step_that_fails_once_fails_its_lanes_and_the_engine_goes_on(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    failed: list[int] = []

    def once(tokens: torch.Tensor) -> bool:
        if tokens.shape[0] >= 2 and not failed:
            failed.append(1)
            return True
        return False

    break_model(monkeypatch, once)
    streams = [engine.submit(Request([i], 10**5, GREEDY)) for i in range(2)]
    for stream in streams:
        with pytest.raises(StepError, match="the device is gone"):
            stream.result()
    assert engine.alive
    assert engine.submit(Request([1], 9, GREEDY)).result().ids == tuple(greedy(checkpoint(), [1], 9)[0])


def test_when_the_loop_dies_every_waiting_caller_hears_of_it_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(checkpoint(), EngineConfig(lanes=2))
    streams = [engine.submit(Request([1] * (SEGMENT * 50), 10**6, GREEDY)) for _ in range(6)]  # decoding, reading and waiting
    wait_for(lambda: streams[0].usage.generated)
    monkeypatch.setattr("serving.engine.engine.Engine._decode", lambda self: (_ for _ in ()).throw(BrokenError("lost")))
    began = time.monotonic()
    for stream in streams:
        with pytest.raises(EngineStoppedError, match="BrokenError: lost"):
            stream.result()

    async def asynchronous() -> None:
        async for _ in streams[0]:
            pass

    with pytest.raises(EngineStoppedError):
        asyncio.run(asynchronous())
    assert time.monotonic() - began < 2
    assert not engine.alive
    with pytest.raises(EngineStoppedError, match="another one"):
        engine.submit(Request([1]))
    engine.close()


def test_when_steps_keep_failing_the_loop_ends_and_nobody_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    break_model(monkeypatch, lambda tokens: tokens.shape[1] == 1)
    with Engine(checkpoint(), EngineConfig(lanes=2)) as engine:
        for number in range(FAILURES):
            streams = [engine.submit(Request([1, 2], 9, GREEDY)) for _ in range(2)]
            for stream in streams:
                assert stream.waited(20), f"failure {number}: the caller was not told"
                with pytest.raises((StepError, EngineStoppedError)):
                    stream.result()
        wait_for(lambda: not engine.alive)


def test_a_lane_whose_state_overflows_is_lost_alone() -> None:
    with Engine(checkpoint(), EngineConfig(lanes=3)) as engine:
        streams = [engine.submit(Request([i], 200, GREEDY)) for i in (1, 2, 3)]
        wait_for(lambda: engine.load[0] == 3 and all(stream.usage.generated for stream in streams))
        with torch.inference_mode():  # a value that no model writes, finite, as a hostile file may hold it
            engine._slab.state.memories[0].working[1].fill_(3e38)
        lost = engine._decoding[1].stream
        with pytest.raises(StepError, match="not finite"):
            lost.result()
        for i, stream in zip((1, 2, 3), streams, strict=True):
            if stream is not lost:
                assert stream.result().ids == tuple(greedy(checkpoint(), [i], 200)[0])
        assert engine.alive


def test_memory_is_written_for_the_lanes_at_a_boundary_alone_and_together(monkeypatch: pytest.MonkeyPatch) -> None:
    model, closed, inner = checkpoint().model, [], PMI._close
    with torch.inference_mode():
        state = State.concatenate([model(torch.tensor([[256] * n]), model.initial_state(1))[1] for n in (6, 6, 3, 1)])
        monkeypatch.setattr(PMI, "_close", lambda self, state: (closed.append(state.lanes), inner(self, state))[1])
        for _ in range(SEGMENT):
            _, state = model(torch.ones(4, 1, dtype=torch.int64), state, donate=True)
    assert closed == [2, 1, 1]


def test_closing_ends_callers_that_still_wait_and_draining_lets_them_finish() -> None:
    engine = Engine(checkpoint(), EngineConfig(lanes=2))
    streams = [engine.submit(Request([1], 40, GREEDY)) for _ in range(4)]
    engine.close(drain=20)
    assert [stream.result().finish for stream in streams] == ["length"] * 4
    engine = Engine(checkpoint(), EngineConfig(lanes=1))
    streams = [engine.submit(Request([1], 10**6, GREEDY)) for _ in range(2)]
    engine.close()
    for stream in streams:
        with pytest.raises(EngineStoppedError, match="closed"):
            stream.result()


def test_every_mistake_in_a_request_is_named_at_once(engine: Engine) -> None:
    with pytest.raises(UserError) as error:
        engine.submit(Request([300], -1, Sampling(temperature=-1), stop=("x",), text=False, logprobs=5000, session="s"))
    for part in ("300", "0..256", "tokens: -1", "temperature", "text=True", "5000", "no session store"):
        assert part in str(error.value)


def test_bfloat16_is_an_option_and_a_text_is_the_same_alone_and_in_company_up_to_ties() -> None:
    torch.manual_seed(5)
    found = Checkpoint(draw_zeros(PMI(checkpoint().model.config), 5).eval(), checkpoint().tokenizer, "bf16")
    with Engine(found, EngineConfig(lanes=8, dtype="bfloat16")) as engine:
        streams = [engine.submit(Request(prompt_of(i), 20, GREEDY)) for i in range(8)]
        for i, stream in enumerate(streams):
            prompt, ids = prompt_of(i), list(stream.result().ids)
            with torch.inference_mode():
                tokens = torch.tensor([[256, *prompt, *ids[:-1]]])
                logits = found.model.head.logits(found.model(tokens, found.model.initial_state(1))[0][0, len(prompt) :]).float()
                logits[:, 256] = -torch.inf
            assert logits.dtype == torch.float32
            assert found.model.norm.weight.dtype == torch.bfloat16
            assert float((logits.amax(-1) - logits.gather(-1, torch.tensor(ids)[:, None]).squeeze(-1)).max()) < 0.5
