"""The engine with sessions: what a caller received is on disk, and a session goes on as if never interrupted."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lm.generation.sampling import Sampling
from lm.model import PMI
from lm.model.pretrained import save_pretrained
from serving.engine import Engine, EngineConfig, EngineStoppedError, Request
from serving.sessions.errors import BusyError, FullError, InvalidError, StaleError, UnavailableError
from serving.sessions.local_redis import LocalRedis
from serving.sessions.opening import open_store
from serving.sessions.sqlite import SQLiteStore
from serving.sessions.store import LOCAL, Change, Lease, Outcome, Response, SessionStore, Settings
from tests.serving.engine import child
from tests.serving.engine.conftest import SEGMENT, checkpoint, greedy, wait_for

GREEDY = Sampling(temperature=0)


def create(store: SessionStore, *names: str, seed: int = 0) -> None:
    mine = checkpoint(seed).identity
    for name in names:
        store.create(LOCAL, name, Settings(mine.model, mine.tokenizer, SEGMENT, keep_history=True))


@contextmanager
def counting(model: PMI) -> Iterator[list[int]]:
    """How many ids each of the model's calls reads."""
    read: list[int] = []
    hook = model.register_forward_pre_hook(lambda _, given: read.append(given[0].numel()))
    try:
        yield read
    finally:
        hook.remove()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SQLiteStore]:
    opened = GatedStore(tmp_path / "sessions.db")
    yield opened
    opened.close()


class GatedStore(SQLiteStore):
    """A real store whose commits can be held up, or made to fail for a while."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.gate = threading.Event()
        self.gate.set()
        self.errors: list[Exception] = []
        self.commits = 0

    def commit(self, changes: Sequence[Change]) -> Sequence[Outcome]:
        self.gate.wait()
        if self.errors:
            raise self.errors.pop()
        self.commits += 1
        return super().commit(changes)

    def heartbeat(self, leases: Sequence[Lease]) -> Sequence[object]:  # type: ignore[override]
        self.gate.wait()
        return super().heartbeat(leases)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.integers(0, 3 * SEGMENT), st.integers(0, 2 * SEGMENT)), min_size=1, max_size=5), st.booleans(),
    st.integers(0, 10**6),
)  # fmt: skip
def test_a_session_over_many_engines_gives_what_one_text_gives_and_replays_at_most_a_segment(
    tmp_path: Path, turns: list[tuple[int, int]], greedily: bool, salt: int
) -> None:
    found = checkpoint(1)
    path = tmp_path / f"{salt}-{time.monotonic_ns()}.db"
    sampling = GREEDY if greedily else Sampling(temperature=1, seed=salt)
    text: list[int] = [found.tokenizer.bos]
    with closing(SQLiteStore(path)) as store:
        create(store, "s", seed=1)
        stream_id = store.get(LOCAL, "s").stream
    generator = torch.Generator().manual_seed(salt)
    made: dict[int, int] = {}
    for number, (asked, tokens) in enumerate(turns):
        prompt = torch.randint(0, 256, (asked,), generator=generator).tolist()
        with closing(SQLiteStore(path)) as store, Engine(found, EngineConfig(lanes=2, snapshot_segments=2), store) as engine:
            before = store.get(LOCAL, "s")
            with counting(found.model) as read:
                event = engine.submit(Request(prompt, tokens, sampling, session="s")).result()
                engine.close()
            after, counters = store.get(LOCAL, "s"), engine.counters
            assert counters.replayed == len(before.tail) <= SEGMENT
            # what the model itself was given: the tail, what is new, and each token but the last
            assert sum(read) <= len(before.tail) + asked + (number == 0) + max(0, tokens - 1)
            assert counters.generated == tokens == len(event.ids)
            text += prompt
            made |= {len(text) + i: id_ for i, id_ in enumerate(event.ids)}
            text += event.ids
            assert store.history(LOCAL, "s") == tuple(text)
            assert after.position == len(text)
            assert 1 <= len(after.tail) <= SEGMENT
            assert after.turn == before.position or not (prompt or tokens)
    # every generated token against the model reading the whole text in one call
    with torch.inference_mode():
        logits = found.model.head.logits(found.model(torch.tensor([text]), found.model.initial_state(1))[0][0])
        logits[:, found.tokenizer.bos] = -torch.inf
    if greedily:
        for position, id_ in made.items():
            assert float(logits[position - 1].max() - logits[position - 1, id_]) < 1e-4
    else:
        with Engine(found, EngineConfig(lanes=1)) as engine:
            for position, id_ in list(made.items())[:: max(1, len(made) // 4)]:
                replayed = engine.submit(Request(text[1:position], 1, sampling.replace(stream=stream_id))).result()
                assert replayed.ids == (id_,)


def test_tokens_are_on_disk_before_the_caller_gets_them_and_the_model_runs_ahead_meanwhile(store: GatedStore) -> None:
    create(store, "s")
    with Engine(checkpoint(), EngineConfig(lanes=2), store) as engine:
        store.gate.clear()
        stream = engine.submit(Request([1], 20, GREEDY, session="s"))
        other = engine.submit(Request([1], 3, GREEDY))  # without a session: waits for no disk
        assert len(other.result().ids) == 3
        assert not stream.waited(0.3)
        assert engine.counters.generated > 4
        assert store.get(LOCAL, "s").position == 0
        store.gate.set()
        assert stream.result().ids == tuple(greedy(checkpoint(), [1], 20)[0])
        assert store.get(LOCAL, "s").position == 22


def test_one_transaction_per_step_serves_all_lanes(store: GatedStore) -> None:
    names = [f"s{i}" for i in range(8)]
    create(store, *names)
    with Engine(checkpoint(), EngineConfig(lanes=8), store) as engine:
        for stream in [engine.submit(Request([i], 40, GREEDY, session=name)) for i, name in enumerate(names)]:
            stream.result()
        assert engine.counters.generated == 8 * 40
    # a token each would be 320; the lanes' first and last tokens need not fall together
    assert store.commits <= engine.counters.steps + 2 * len(names)


def test_a_store_that_breaks_is_heard_of_by_everyone_also_behind_the_last_token(store: GatedStore) -> None:
    create(store, "s", "t")
    with Engine(checkpoint(), EngineConfig(lanes=2), store) as engine:
        store.gate.clear()
        streams = [engine.submit(Request([1], tokens, GREEDY, session=name)) for name, tokens in (("s", 1), ("t", 500))]
        wait_for(lambda: engine.load[0] == 1)  # the first has produced its only token
        store.errors = [OSError("the disk is gone")] * 9
        store.gate.set()
        for stream in streams:
            assert stream.waited(20)
            with pytest.raises(EngineStoppedError, match="the disk is gone"):
                stream.result()
        assert not engine.alive


def test_a_writer_that_lost_its_lease_is_refused_and_the_new_owners_text_stands(store: GatedStore, tmp_path: Path) -> None:
    create(store, "s")
    with (
        Engine(checkpoint(), EngineConfig(lanes=1, lease=0.2), store) as old,
        closing(SQLiteStore(tmp_path / "sessions.db")) as direct,
        Engine(checkpoint(), EngineConfig(lanes=1), direct) as new,
    ):
        stream = old.submit(Request([1], 10**6, GREEDY, session="s"))
        assert stream.waited(10)
        with pytest.raises(BusyError):
            new.submit(Request([], 5, GREEDY, session="s")).result()
        store.gate.clear()  # the old owner hangs
        time.sleep(0.4)
        received = len(new.submit(Request([], 5, GREEDY, session="s")).result().ids)
        assert received == 5
        after = direct.history(LOCAL, "s")
        store.gate.set()
        with pytest.raises(StaleError):
            stream.result()
        assert direct.history(LOCAL, "s") == after == (256, 1, *greedy(checkpoint(), [1], len(after) - 2)[0])
        assert old.submit(Request([1], 2, GREEDY)).result().finish == "length"
        assert old.load == (0, 0)


def test_a_store_that_does_not_answer_for_a_moment_loses_nothing_and_a_full_one_fails_only_sessions(store: GatedStore) -> None:
    create(store, "s", "t")
    with Engine(checkpoint(), EngineConfig(lanes=3), store) as engine:
        store.errors = [UnavailableError("connection refused") for _ in range(3)]
        assert engine.submit(Request([1], 9, GREEDY, session="s")).result().ids == tuple(greedy(checkpoint(), [1], 9)[0])
        store.errors = [FullError("no room")]
        free = engine.submit(Request([1], 30, GREEDY))
        with pytest.raises(FullError):
            engine.submit(Request([1], 10**6, GREEDY, session="t")).result()
        assert len(free.result().ids) == 30
        assert engine.submit(Request([1], 2, GREEDY, session="t")).result().finish == "length"


def test_responses_record_what_was_generated_and_an_interrupted_one_goes_on(store: GatedStore) -> None:
    create(store, "s")
    store.begin(Response(LOCAL, "r", "s", "key", "hash", {}, 0))
    with Engine(checkpoint(), EngineConfig(lanes=1), store) as engine:
        stream = engine.submit(Request([1], 10**6, GREEDY, session="s", response="r"))
        for event in stream:
            if event.position > 8:
                stream.cancel()
        assert stream.finish == "cancelled"
        wanted = store.response(LOCAL, "r")
        assert wanted.status == "interrupted"
        expected = greedy(checkpoint(), [1], len(wanted.ids) + 20)[0]
        assert list(wanted.ids) == expected[:-20]
        request = Request([], 20, GREEDY, session="s", response="r", continued=wanted.ids, turn=False)
        rest = engine.submit(request).result()
        assert [*wanted.ids, *rest.ids] == expected
        found = store.response(LOCAL, "r")
        assert (found.status, list(found.ids)) == ("done", expected)
        assert store.get(LOCAL, "s").turn == 0


def test_a_stop_string_is_found_across_an_interruption(store: GatedStore) -> None:
    create(store, "s")
    tokenizer = checkpoint().tokenizer
    ids = greedy(checkpoint(), [5], 60)[0]
    text = tokenizer.decode(ids)
    stop = text[20:24]
    first = text.find(stop) + 2
    cut = next(n for n in range(60) if len(tokenizer.decode(ids[:n])) >= first)
    with Engine(checkpoint(), EngineConfig(lanes=1), store) as engine:
        engine.submit(Request([5], cut, GREEDY, session="s", stop=(stop,))).result()
        rest = engine.submit(Request([], 60, GREEDY, session="s", stop=(stop,), continued=ids[:cut], turn=False)).result()
    assert rest.finish == "stop"
    assert len(rest.ids) <= 4, "it ended where the string that had begun before was complete, not at a later one"


def test_reading_a_long_text_stores_snapshots_on_the_way(store: GatedStore) -> None:
    create(store, "s")
    prompt = torch.randint(0, 256, (40 * SEGMENT + 3,)).tolist()
    with Engine(checkpoint(), EngineConfig(lanes=1, snapshot_segments=4), store) as engine:
        positions = []
        stream = engine.submit(Request(prompt, 0, GREEDY, session="s"))
        while not stream.waited(0.001):
            positions.append(store.get(LOCAL, "s").position)
        assert stream.result().finish == "length"
        assert {p % (4 * SEGMENT) for p in positions if 0 < p < len(prompt)} <= {1}
        session = store.get(LOCAL, "s")
        assert session.position == len(prompt) + 1
        assert len(session.tail) == 4
        assert engine.counters.prompt == 40 * SEGMENT  # the tail is not read until something is to follow it
        event = engine.submit(Request([], 3, GREEDY, session="s")).result()
        assert event.ids == tuple(greedy(checkpoint(), prompt, 3)[0])


def test_a_session_of_another_model_or_one_that_is_busy_or_missing_is_refused(store: GatedStore) -> None:
    create(store, "s", seed=2)
    with Engine(checkpoint(), EngineConfig(lanes=1), store) as engine:
        with pytest.raises(InvalidError, match="belongs to model"):
            engine.submit(Request([1], 1, GREEDY, session="s")).result()
        with pytest.raises(Exception, match="nobody"):
            engine.submit(Request([1], 1, GREEDY, session="nobody")).result()
        store.release([store.lease(LOCAL, "s", "someone")])  # the refused attempt left no lease behind
        assert engine.load == (0, 0)


def test_an_engine_that_is_closed_leaves_sessions_whole_and_free(store: GatedStore) -> None:
    create(store, "s")
    engine = Engine(checkpoint(), EngineConfig(lanes=1), store)
    stream = engine.submit(Request([1], 10**6, GREEDY, session="s"))
    assert stream.waited(10)
    engine.close()
    received: list[int] = []
    try:
        for event in stream:
            received += event.ids
    except EngineStoppedError as error:
        assert "closed" in str(error)  # noqa: PT017
    else:
        raise AssertionError("nobody said that the engine was closed")
    store.release([store.lease(LOCAL, "s", "someone")])
    history = store.history(LOCAL, "s")[2:]
    assert list(history[: len(received)]) == received
    assert list(history) == greedy(checkpoint(), [1], len(history))[0]


def test_the_sessions_of_an_engine_whose_loop_died_are_soon_free_for_another(
    store: GatedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(store, "s")
    dead = Engine(checkpoint(), EngineConfig(lanes=1, lease=0.3), store)
    stream = dead.submit(Request([1], 10**6, GREEDY, session="s"))
    assert stream.waited(10)
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "_decode", lambda self: 1 / 0)
        with pytest.raises(EngineStoppedError, match="ZeroDivisionError"):
            stream.result()
    time.sleep(0.6)  # the process lives on, and so does its journal
    with Engine(checkpoint(), EngineConfig(lanes=1), store) as other:
        assert len(other.submit(Request([], 3, GREEDY, session="s")).result().ids) == 3
    history = store.history(LOCAL, "s")[2:]
    assert list(history) == greedy(checkpoint(), [1], len(history))[0]
    dead.close()


@pytest.mark.parametrize("backend", ["sqlite", pytest.param("redis", marks=pytest.mark.needs("redis-server"))])
def test_after_kill_9_at_any_moment_no_received_token_is_lost_and_the_text_is_as_if_never_interrupted(
    backend: str, tmp_path: Path
) -> None:
    found = checkpoint(1)
    save_pretrained(found.model, found.tokenizer, tmp_path / "model")
    expected = {name: [256, *prompt, *greedy(found, list(prompt), child.TOKENS)[0]] for name, prompt in child.PROMPTS.items()}
    assert min(min(greedy(found, list(p), child.TOKENS)[1]) for p in child.PROMPTS.values()) > 2e-5  # no ties to decide
    server = LocalRedis(tmp_path / "redis") if backend == "redis" else None
    url = server.url if server is not None else f"sqlite:///{tmp_path / 'sessions.db'}"
    try:
        with closing(open_store(url)) as store:
            create(store, *expected, seed=1)
            assert kill_until_done(tmp_path, url, store, expected, random.Random(7), server) >= 4
    finally:
        if server is not None:
            server.kill()


def kill_until_done(
    folder: Path, url: str, store: SessionStore, expected: dict[str, list[int]], dice: random.Random, server: LocalRedis | None
) -> int:
    """Start the child and kill it (or the server, or both) at random moments; checks all sessions after every kill."""
    log = folder / "received"
    log.touch()
    command = [sys.executable, "-m", "tests.serving.engine.child", str(folder / "model"), url, str(log)]
    kills = 0
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as nursery:
        assert nursery.stdin is not None
        assert nursery.stdout is not None
        for attempt in range(60):
            seen = log.stat().st_size
            nursery.stdin.write("start\n")
            pid = int(nursery.stdout.readline())
            ended = threading.Event()
            waiter = threading.Thread(target=lambda event=ended: nursery.stdout.readline() and event.set())
            waiter.start()
            # most are killed soon after they gave something out, some before; in the end they are let be
            patience = dice.random() * 0.05 if dice.random() < 0.2 else 60
            give_up = time.monotonic() + patience
            while log.stat().st_size == seen and not ended.is_set() and time.monotonic() < give_up:
                time.sleep(0.001)
            if server is not None and attempt < 30 and not ended.wait(dice.random() * 0.05) and dice.random() < 0.6:
                server.kill()  # the engine goes on when it is back
                kills += 1
                time.sleep(dice.random() * 0.05)
                server.start()
            if not ended.wait(dice.random() * 0.08 if attempt < 30 else 60):
                kills += 1
                os.kill(pid, signal.SIGKILL)
            waiter.join()
            if check(log, store, expected):
                return kills
    raise AssertionError(f"not done after {kills} kills")


def check(log: Path, store: SessionStore, expected: dict[str, list[int]]) -> bool:
    """Everything received is as expected and in its session, which holds nothing else; whether all sessions are complete."""
    received = dict.fromkeys(expected, 0)
    for line in log.read_text().splitlines():
        name, position, *ids = line.split()
        assert [int(i) for i in ids] == expected[name][int(position) : int(position) + len(ids)]
        received[name] = max(received[name], int(position) + len(ids))
    done = True
    for name, whole in expected.items():
        history = list(store.history(LOCAL, name))
        assert history == whole[: len(history)]
        assert len(history) >= received[name]
        done = done and len(history) == len(whole)
    return done


def test_the_journal_counts_the_time_that_a_slow_disk_takes_and_what_it_writes(tmp_path: Path) -> None:
    class Slow(SQLiteStore):
        def commit(self, changes: Sequence[Change]) -> Sequence[Outcome]:
            time.sleep(0.05)
            return super().commit(changes)

    with closing(Slow(tmp_path / "slow.db")) as store:
        create(store, "a")
        with Engine(checkpoint(), EngineConfig(lanes=1, queue=1), store) as engine:
            engine.submit(Request(list(b"The whale" * 4), 20, GREEDY, session="a")).result()
            journal = engine.journal
            assert journal is not None
    # the thread has ended: what it counts after handing a token out is counted, too
    assert journal.seconds >= 0.05 * journal.transactions > 0
    assert 0 < journal.snapshot_seconds < journal.seconds
    assert journal.bytes >= journal.snapshot_bytes + 4 * (1 + 36 + 20 - 1)
