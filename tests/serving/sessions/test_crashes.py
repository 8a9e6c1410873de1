"""Nothing acknowledged is lost: killed writers, a killed redis-server, lost answers, many writers at once, no room."""

import multiprocessing
import os
import random
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import redis

from serving.sessions.base import BaseStore
from serving.sessions.errors import BusyError, ConflictError, FullError, StoreError, UnavailableError
from serving.sessions.local_redis import LocalRedis
from serving.sessions.redis import RedisStore
from serving.sessions.sqlite import SQLiteStore
from serving.sessions.store import Change, Committed, Content, Progress, Repaired, Response, Snapshot
from tests.serving.sessions.conftest import BACKENDS, SETTINGS, Make

LANES = [f"lane{i}" for i in range(3)]
fork = multiprocessing.get_context("fork")


def token(at: int) -> int:
    return at * 7919 % 1000


def snapshot_at(lane: str, place: int) -> Snapshot:
    """Small and large ones, each its own."""
    size = 1 << 20 if place % 16 == 0 else 100
    return Snapshot(place, f"{lane}:{place}:".encode() + bytes(size))


def run_lanes(store: BaseStore, seconds: float, steps: int, acknowledge: Callable[[int], None]) -> None:
    """An engine's writing: all lanes in one commit per step, from wherever the last writer came to."""
    leases = []
    for lane in LANES:
        while True:
            with suppress(BusyError):
                leases.append(store.lease("t", lane, "writer", seconds))
                break
            time.sleep(0.02)
    start = store.get("t", LANES[0]).position
    for at in range(start, start + steps):
        changes = [
            Change(
                lease, at, [token(at)], snapshot_at(lease.id, at) if at and at % SETTINGS.segment == 0 else None,
                response=Progress(f"r-{lease.id}", at, [token(at)]),
            )
            for lease in leases
        ]  # fmt: skip
        assert all(isinstance(outcome, Committed) for outcome in store.commit(changes))
        acknowledge(at + 1)


def create_lanes(store: BaseStore) -> None:
    for lane in LANES:
        store.create("t", lane, SETTINGS)
        store.begin(Response("t", f"r-{lane}", lane, None, "hash", {}, 0))


def check_lanes(store: BaseStore, acknowledged: int) -> int:
    """All lanes stand at one position, nothing acknowledged is missing, every byte is right."""
    positions = set()
    for lane in LANES:
        session = store.get("t", lane)
        positions.add(session.position)
        assert session.tail == tuple(token(at) for at in range(session.boundary, session.position))
        if session.boundary:
            assert store.snapshot(session) == snapshot_at(lane, session.boundary).data
        assert store.response("t", f"r-{lane}").ids == tuple(token(at) for at in range(session.position))
    (position,) = positions
    assert position >= acknowledged
    assert list(store.verify()) == []
    return position


def writer(make: Make, pipe: Connection) -> None:
    os.environ.pop("PYTEST_CURRENT_TEST", None)
    run_lanes(make(), 0.2, 10**6, lambda position: os.write(pipe.fileno(), b"%d\n" % position) and None)


@pytest.mark.parametrize("make", BACKENDS, indirect=True)
def test_a_writer_killed_at_any_moment_loses_nothing_and_the_next_goes_on(make: Make) -> None:
    first = make()
    create_lanes(first)
    first.close()
    chance = random.Random(5)
    position = 0
    for _ in range(6):
        ours, theirs = fork.Pipe(duplex=False)
        process = fork.Process(target=writer, args=(make, theirs), daemon=True)
        process.start()
        theirs.close()
        seen = b""
        while seen.count(b"\n") < 2:
            seen += os.read(ours.fileno(), 1 << 16)
        time.sleep(chance.uniform(0, 0.15))
        process.kill()
        process.join()
        while piece := os.read(ours.fileno(), 1 << 16):
            seen += piece
        acknowledged = int(seen[: seen.rindex(b"\n")].split(b"\n")[-1])
        assert acknowledged > position
        store = make()
        position = check_lanes(store, acknowledged)
        assert position - acknowledged <= 1  # at most the step whose acknowledgement was under way
        store.close()


@pytest.mark.needs("redis-server")
def test_a_redis_server_killed_at_any_moment_loses_nothing_and_the_writer_goes_on(tmp_path: Path) -> None:
    server = LocalRedis(tmp_path / "redis")
    store = RedisStore(server.url)
    create_lanes(store)
    reached, failure = [0], []

    def work() -> None:
        try:
            run_lanes(store, 60, 10**6, lambda position: reached.__setitem__(0, position) if not done.is_set() else stop())
        except BaseException as error:
            failure.append(error)

    def stop() -> None:
        raise SystemExit

    done = threading.Event()
    thread = threading.Thread(target=work)
    thread.start()
    chance = random.Random(3)
    try:
        for _ in range(5):
            time.sleep(chance.uniform(0.05, 0.3))
            server.kill()
            acknowledged = reached[0]
            server.start()
            with Reader(server) as reader:
                assert all(reader.get("t", lane).position >= acknowledged for lane in LANES)
        done.set()
        thread.join(20)
        assert [type(error) for error in failure] == [SystemExit]
        assert check_lanes(store, reached[0]) >= reached[0] > 20
    finally:
        done.set()
        thread.join(20)
        server.kill()


@pytest.mark.parametrize("make", BACKENDS[1:], indirect=True)
def test_a_commit_whose_answer_was_lost_is_made_once_and_keeps_its_snapshot(make: Make) -> None:
    store = make()
    assert isinstance(store, RedisStore)
    store.create("t", "s", replace(SETTINGS, keep_history=True))
    lease = store.lease("t", "s", "w")
    script, lost = store._script, []

    def losing(**given: object) -> object:
        answer = script(**given)
        if given["args"][2] in ("write", "take", "add_response") and len(lost) % 2 == 0:  # type: ignore[index]
            lost.append(given)
            raise redis.exceptions.ConnectionError("the answer was lost")
        lost.append(None)
        return answer

    store._script = losing  # type: ignore[assignment]
    for at in range(0, 40, 4):
        data = b"x" * (1 << 20) + bytes([at])
        (outcome,) = store.commit([Change(lease, at, [1, 2, 3, 4], Snapshot(at, data) if at else None)])
        assert outcome == Committed(2 + at // 4, at + 4)
    assert store.begin(Response("t", "r", "s", "key", "hash", {}, 0))[1] is True
    store.create("t", "other", SETTINGS)
    assert store.lease("t", "other", "w").fence > lease.fence
    assert lost.count(None) < len(lost) - 5
    assert store.snapshot(store.get("t", "s")) == data
    assert list(store.verify()) == []
    store.close()


def test_verify_finds_and_repairs_nothing_in_a_store_that_is_being_written_to(make: Make) -> None:
    store, other = make(), make()
    create_lanes(store)
    done = threading.Event()

    def stop_when_done(_: int) -> None:
        if done.is_set():
            raise SystemExit

    def work() -> None:
        with suppress(SystemExit):
            run_lanes(store, 60, 10**6, stop_when_done)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert [list(other.verify()) for _ in range(6)] == [[]] * 6
        assert [other.repair() for _ in range(20)] == [Repaired()] * 20
    finally:
        done.set()
        thread.join()
    store.close()
    other.close()


class Reader:
    """A store of its own for a look."""

    def __init__(self, server: LocalRedis) -> None:
        self.store = RedisStore(server.url)

    def __enter__(self) -> RedisStore:
        return self.store

    def __exit__(self, *_: object) -> None:
        self.store.close()


def hold(make: Make, pipe: Connection) -> None:
    store = make()
    lease = store.lease("t", "s", "first")
    pipe.send(lease)
    while True:
        time.sleep(0.5)
        store.heartbeat([lease])


@pytest.mark.parametrize("make", BACKENDS[:2], indirect=True)
def test_a_crashed_writers_session_is_taken_over_within_five_seconds(make: Make) -> None:
    store = make()
    store.create("t", "s", SETTINGS)
    store.close()
    ours, theirs = fork.Pipe(duplex=False)
    process = fork.Process(target=hold, args=(make, theirs), daemon=True)
    process.start()
    old = ours.recv()
    time.sleep(1.2)  # a heartbeat or two
    process.kill()
    process.join()
    began = time.monotonic()
    store = make()
    with pytest.raises(BusyError):
        store.lease("t", "s", "second")
    while True:
        try:
            new = store.lease("t", "s", "second")
            break
        except BusyError as error:
            time.sleep(min(error.seconds, 0.2))
    assert time.monotonic() - began < 5
    assert isinstance(store.commit([Change(old, 0, [1])])[0], StoreError)
    assert isinstance(store.commit([Change(new, 0, [1])])[0], Committed)
    store.close()


def contend(make: Make, number: int, turns: int) -> None:
    store = make()

    def work(thread: int) -> None:
        for turn in range(turns):
            while True:
                try:
                    lease = store.lease("t", "s", f"p{number}-{thread}")
                    break
                except BusyError:
                    time.sleep(0.002)
            session = store.get("t", "s")
            at = session.position
            snapshot = Snapshot(at, b"%d" % at) if at and at % SETTINGS.segment == 0 else None
            (outcome,) = store.commit([Change(lease, at, [number * 10_000 + thread * 1000 + turn], snapshot)])
            assert isinstance(outcome, Committed), outcome
            store.release([lease])

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(work, range(2)))


def test_many_writers_in_many_processes_lose_no_update(make: Make) -> None:
    processes, turns = 3, 8
    store = make()
    store.create("t", "s", replace(SETTINGS, keep_history=True))
    store.close()
    workers = [fork.Process(target=contend, args=(make, number, turns), daemon=True) for number in range(processes)]
    for process in workers:
        process.start()
    for process in workers:
        process.join(60)
        assert process.exitcode == 0
    store = make()
    ids = store.history("t", "s")
    assert sorted(ids) == sorted(
        n * 10_000 + t * 1000 + turn for n in range(processes) for t in range(2) for turn in range(turns)
    )
    assert list(store.verify()) == []
    store.close()


def test_of_two_who_put_a_snapshot_on_one_version_one_wins_and_the_other_is_told(make: Make) -> None:
    stores = [make(), make()]
    stores[0].create("t", "s", SETTINGS)
    outcomes: list[object] = []

    def put(number: int) -> None:
        for version in range(1, 9):
            content = Content(SETTINGS, 4, b"%d" % number, (1, 2, 3, 4), (number,))
            barrier.wait()
            try:
                outcomes.append((version, stores[number].put_snapshot("t", "s", content, version).tail[0]))
            except ConflictError as error:
                outcomes.append(error.found)
            barrier.wait()

    barrier = threading.Barrier(2)
    threads = [threading.Thread(target=put, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    won = [outcome for outcome in outcomes if isinstance(outcome, tuple)]
    assert [version for version, _ in won] == list(range(1, 9))
    assert len(outcomes) == 16
    assert stores[0].get("t", "s").tail == (won[-1][1],)
    for store in stores:
        store.close()


def test_relaxed_gives_up_no_file_before_the_commit_that_freed_it_is_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SQLiteStore(tmp_path / "s.db", durability="relaxed")
    store.create("t", "s", replace(SETTINGS, retain=0))
    lease = store.lease("t", "s", "w", 60)
    last = ["", ""]  # how the last commit was synced, and how the next one will be
    given_up: list[str] = []

    def trace(statement: str) -> None:
        if statement == "COMMIT":
            last[0] = last[1]
        elif statement.startswith("PRAGMA synchronous = "):
            last[1] = statement.removeprefix("PRAGMA synchronous = ")

    def watch(name: str) -> None:
        real = getattr(store._files, name)

        def noting(names: Iterable[str]) -> None:
            names = list(names)
            given_up.extend(last[0] for _ in names)
            real(names)

        monkeypatch.setattr(store._files, name, noting)

    watch("retire")
    watch("remove")
    store._db().set_trace_callback(trace)
    store.heartbeat([lease])
    for at in range(0, 20, 4):
        snapshot = Snapshot(at, bytes([at]) * (1 << 21)) if at else None
        assert isinstance(store.commit([Change(lease, at, range(3), snapshot)])[0], Committed)
        assert isinstance(store.commit([Change(lease, at + 3, [3])])[0], Committed)
        assert last[0] == "NORMAL"  # what frees nothing waits for no disk
    store.release([lease])
    store.delete("t", "s")
    assert len(given_up) >= 4
    assert set(given_up) == {"FULL"}
    assert os.listdir(tmp_path / "s.db-blobs") == []
    store.close()


# --- no room ---------------------------------------------------------------------------------------------------------


def fill(make: Make, limit: int, pipe: Connection) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    store = make()
    reached = 0

    def acknowledge(position: int) -> None:
        nonlocal reached
        reached = position

    try:
        run_lanes(store, 0.1, 10**6, acknowledge)
    except FullError as error:
        session = store.get("t", LANES[0])  # reading goes on
        pipe.send((reached, session.position, str(error)))
    except BaseException as error:
        pipe.send((reached, -1, repr(error)))


@pytest.mark.parametrize("limit", [300_000, 3 << 20], ids=["blob files", "database"])
def test_a_full_disk_is_reported_and_nothing_acknowledged_is_lost(tmp_path: Path, limit: int) -> None:
    def make() -> BaseStore:
        return SQLiteStore(tmp_path / "s.db")

    first = make()
    create_lanes(first)
    first.close()
    ours, theirs = fork.Pipe(duplex=False)
    process = fork.Process(target=fill, args=(make, limit, theirs), daemon=True)
    process.start()
    reached, position, message = ours.recv()
    process.join()
    assert position == reached > 0, message
    assert "Nothing was changed" in message
    store = make()
    assert check_lanes(store, reached) == reached
    named = {file for (file,) in store._query("SELECT file FROM blobs WHERE file IS NOT NULL")}
    assert set(os.listdir(tmp_path / "s.db-blobs")) == named  # nothing half-written is left
    run_lanes(store, 1, 20, lambda _: None)  # with room again it goes on
    store.close()


@pytest.mark.needs("redis-server")
def test_a_full_redis_is_reported_and_nothing_is_changed(tmp_path: Path) -> None:
    server = LocalRedis(tmp_path / "redis", "--maxmemory", "4mb")
    store = RedisStore(server.url)
    try:
        create_lanes(store)
        reached = [0]
        with pytest.raises(FullError, match="memory is full"):
            run_lanes(store, 60, 10**6, lambda position: reached.__setitem__(0, position))
        assert reached[0] > 10
        store._redis.config_set("maxmemory", "64mb")
        assert check_lanes(store, reached[0]) == reached[0]
        lease = store.lease("t", LANES[0], "w") if store.get("t", LANES[0]).owner is None else None
        assert lease is None  # still held by the one who met the full store: it may go on
    finally:
        store.close()
        server.kill()


# --- refused by the server, or by the disk ---------------------------------------------------------------------------


@pytest.mark.needs("redis-server")
def test_a_redis_that_refuses_a_command_is_unavailable_and_says_why(tmp_path: Path) -> None:
    server = LocalRedis(tmp_path / "redis")
    store = RedisStore(server.url)
    try:
        create_lanes(store)
        store._redis.config_set("min-replicas-to-write", 1)
        with pytest.raises(UnavailableError, match="NOREPLICAS"):
            store.fork("t", LANES[0], "copy")
        store._redis.config_set("min-replicas-to-write", 0)
        store.fork("t", LANES[0], "copy")
        key = store._key("s", "t", "copy")
        store._redis.delete(key)
        store._redis.set(key, "of another kind")
        with pytest.raises(UnavailableError, match="WRONGTYPE"):
            store.get("t", "copy")
    finally:
        store.close()
        server.kill()


@pytest.mark.parametrize("make", [BACKENDS[0], BACKENDS[2]], indirect=True)  # the stores that keep files
def test_a_folder_of_snapshots_that_cannot_be_used_is_unavailable_and_says_why(make: Make, tmp_path: Path) -> None:
    store = make()
    store.create("t", "s", SETTINGS)
    lease = store.lease("t", "s", "w", 60)
    change = Change(lease, 0, range(5), Snapshot(4, bytes(2 << 20)))
    (folder,) = [tmp_path / name for name in ("sessions.db-blobs", "blobs") if (tmp_path / name).is_dir()]
    folder.rmdir()
    for spoil in (lambda: None, folder.touch):  # gone, as a volume that is not mounted; then no folder
        spoil()
        with pytest.raises(UnavailableError, match=folder.name):
            store.commit([change])
    folder.unlink()
    folder.mkdir()
    assert store.commit([change]) == [Committed(2, 5)]
    (file,) = folder.iterdir()
    file.unlink()
    file.mkdir()
    with pytest.raises(UnavailableError, match=folder.name):
        store.snapshot(store.get("t", "s"))
    assert any(folder.name in damage.what for damage in store.verify())
    store.close()
