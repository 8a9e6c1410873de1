"""Bytes that are not what was written are found, and stand in nobody's way; files go when no session needs them, never before."""

import os
import random
import sqlite3
import time
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest

from serving.sessions.base import BaseStore
from serving.sessions.errors import BusyError, DamagedError, NotFoundError, StaleError, StoreError
from serving.sessions.local_redis import LocalRedis
from serving.sessions.redis import RedisStore
from serving.sessions.sqlite import SQLiteStore
from serving.sessions.store import LATEST_END, LONGEST_LEASE, Change, Committed, Content, Progress, Repaired, Response, Snapshot
from tests.serving.sessions.conftest import BACKENDS, SETTINGS, Clock, Make


def one_of_everything(store: BaseStore) -> dict[str, Content]:
    store.create("t", "plain", SETTINGS)
    store.create("t", "historic", replace(SETTINGS, keep_history=True))
    store.create("t", "large", SETTINGS)
    for id in ("plain", "historic", "large"):
        lease = store.lease("t", id, "w")
        store.begin(Response("t", f"r-{id}", id, None, "hash", {}, 0))
        data = id.encode() * (300_000 if id == "large" else 20)
        change = Change(lease, 0, range(10), Snapshot(8, data), True, response=Progress(f"r-{id}", 0, range(5)))
        assert isinstance(store.commit([change])[0], Committed)
        store.release([lease])
    return {id: store.content("t", id) for id in ("plain", "historic", "large")}


def test_verify_finds_a_flipped_byte_in_every_kind_of_row(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    with_store = SQLiteStore(path)
    one_of_everything(with_store)
    assert list(with_store.verify()) == []
    with_store.close()
    raw = path.read_bytes()
    kinds = {
        "sessions": "head", "bounds": "data", "blobs": "data", "history": "ids", "responses": "head", "pieces": "ids",
    }  # fmt: skip
    for table, column in kinds.items():
        path.write_bytes(raw)
        db = sqlite3.connect(path)
        ((value,),) = db.execute(f"SELECT {column} FROM {table} WHERE {column} IS NOT NULL LIMIT 1").fetchall()
        flipped = bytearray(value)
        flipped[len(flipped) // 2] ^= 4
        db.execute(f"UPDATE {table} SET {column} = ? WHERE {column} = ?", (bytes(flipped), value))
        db.commit()
        db.close()
        store = SQLiteStore(path)
        damages = list(store.verify())
        assert damages, table
        store.close()
    path.write_bytes(raw)
    (blob,) = (tmp_path / "s.db-blobs").iterdir()
    content = bytearray(blob.read_bytes())
    content[777_777] ^= 1
    blob.write_bytes(content)
    store = SQLiteStore(path)
    assert [damage.what.split(":")[1].split()[0] for damage in store.verify()] == ["snapshot"]
    with pytest.raises(DamagedError):
        store.snapshot(store.get("t", "large"))
    blob.unlink()
    assert len(list(store.verify())) == 1
    store.delete("t", "large")
    assert list(store.verify()) == []
    store.close()


def test_no_flipped_byte_of_the_database_file_changes_what_a_session_says(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    store = SQLiteStore(path)
    expected = one_of_everything(store)
    store.close()
    raw = path.read_bytes()
    chance = random.Random(11)
    found = 0
    for _ in range(120):
        place, bit = chance.randrange(len(raw)), chance.randrange(8)
        flipped = bytearray(raw)
        flipped[place] ^= 1 << bit
        path.write_bytes(flipped)
        for extra in ("-wal", "-shm"):
            path.with_name(path.name + extra).unlink(missing_ok=True)
        try:
            store = SQLiteStore(path)
        except StoreError:
            found += 1
            continue
        refused = 0
        for id, content in expected.items():
            try:
                assert store.content("t", id) == content
            except StoreError:
                refused += 1
        try:
            named = len(list(store.verify()))
        except StoreError:
            named = 1
        assert named or not refused, f"bit {bit} of byte {place}: verify passes over what cannot be read"
        found += refused
        store.close()
    assert found > 5


@pytest.mark.needs("redis-server")
def test_verify_finds_a_flipped_byte_in_redis(redis_server: LocalRedis) -> None:
    store = RedisStore(redis_server.url, prefix="flip")
    one_of_everything(store)
    assert list(store.verify()) == []
    client = store._redis
    for key in client.keys("flip:*"):
        kind = client.type(key)
        if kind == b"hash" and client.hget(key, "head"):
            name, value = "head", client.hget(key, "head")
        elif kind == b"string" and b":d:" in key:
            name, value = "", client.get(key)
        elif kind == b"list":
            name, value = "0", client.lindex(key, 0)
        else:
            continue
        flipped = bytearray(value)
        flipped[-1] ^= 1
        for content in (bytes(flipped), value):
            if name == "head":
                client.hset(key, name, content)
            elif name:
                client.lset(key, 0, content)
            else:
                client.set(key, content)
            assert bool(list(store.verify())) == (content is not value), key
    store.close()


def test_a_damaged_session_does_not_hide_the_others_and_can_be_deleted(tmp_path: Path) -> None:
    store = SQLiteStore(tmp_path / "s.db")
    one_of_everything(store)
    db = sqlite3.connect(tmp_path / "s.db")
    db.execute("UPDATE sessions SET head = zeroblob(100) WHERE id = 'plain'")
    db.commit()
    db.close()
    page = store.list("t")
    assert ([x.id for x in page.sessions], page.damaged) == (["historic", "large"], ("plain",))
    with pytest.raises(DamagedError, match="'plain'"):
        store.get("t", "plain")
    store.evict()
    assert [damage.where for damage in store.verify()] == ["session t/plain"]
    assert store.repair() == Repaired()
    store.delete("t", "plain")
    assert [x.id for x in store.list("t").sessions] == ["historic", "large"]
    assert store.repair() == Repaired(counts=1, removed=1)
    assert list(store.verify()) == []
    store.close()


def spoil(store: BaseStore, id: str) -> None:
    """Damage a session so that the snapshots it refers to are unknown."""
    if isinstance(store, SQLiteStore):
        with store._transaction() as db:
            db.execute("UPDATE bounds SET data = zeroblob(100) WHERE key = (SELECT key FROM sessions WHERE id = ?)", (id,))
    else:
        assert isinstance(store, RedisStore)
        store._redis.hset(store._key("s", "t", id), "bounds", bytes(100))


def set_count(store: BaseStore, hash_: str | None, count: int) -> None:
    if isinstance(store, SQLiteStore):
        with store._transaction() as db:
            db.execute("UPDATE blobs SET refs = ? WHERE hash = ?", (count, hash_))
    else:
        assert isinstance(store, RedisStore)
        store._redis.hset(store._key("b", str(hash_)), "refs", count)


@pytest.mark.parametrize("make", BACKENDS, indirect=True)
def test_what_a_damaged_session_leaves_behind_is_repaired_once_it_is_removed(make: Make, tmp_path: Path) -> None:
    store = make()
    expected = one_of_everything(store)
    expected["twin"] = expected["plain"]
    store.fork("t", "plain", "twin")
    folders = [tmp_path / name for name in ("sessions.db-blobs", "blobs") if (tmp_path / name).is_dir()]
    files = sum(len(list(folder.iterdir())) for folder in folders)
    assert store.repair() == Repaired()  # nothing to do
    spoil(store, "large")
    assert store.repair() == Repaired(kept=1)  # it may yet be put right by hand: what it refers to stays
    store.delete("t", "large")
    (damage,) = store.verify()
    assert damage.what == "counted 1 times, referred to 0 times; `pmi sessions verify --repair` counts anew"
    assert store.repair() == Repaired(counts=1, removed=1)
    assert list(store.verify()) == []
    assert sum(len(list(folder.iterdir())) for folder in folders) == files - len(folders)
    del expected["large"]
    assert {id: store.content("t", id) for id in expected} == expected
    store.close()


def test_counts_that_are_wrong_are_repaired_and_no_session_loses_its_snapshot(make: Make) -> None:
    store = make()
    content = one_of_everything(store)["plain"]
    store.fork("t", "plain", "twin")
    spoil(store, "historic")
    hash_ = store.get("t", "plain").snapshot
    for wrong in (1, 7):
        set_count(store, hash_, wrong)
        assert len(list(store.verify())) == 3  # this count, the damaged session, and the count of what that refers to
        assert store.repair() == (Repaired(counts=1, kept=1) if wrong == 1 else Repaired(kept=2))
    store.delete("t", "historic")
    assert store.repair() == Repaired(counts=2, removed=1)
    assert list(store.verify()) == []
    store.delete("t", "plain")
    assert store.content("t", "twin") == content
    store.delete("t", "twin")
    assert list(store.verify()) == []
    store.close()


def test_verify_names_the_sessions_whose_snapshot_is_damaged(tmp_path: Path) -> None:
    store = SQLiteStore(tmp_path / "s.db")
    one_of_everything(store)
    store.fork("t", "large", "twin")
    (blob,) = (tmp_path / "s.db-blobs").iterdir()
    blob.unlink()
    (damage,) = store.verify()
    assert damage.what.endswith("; referred to by t/large, t/twin")
    store.close()


@pytest.mark.parametrize("make", [BACKENDS[0], BACKENDS[2]], indirect=True)  # the stores that keep files
def test_files_that_a_crashed_writer_left_are_collected_when_they_are_old(make: Make, tmp_path: Path) -> None:
    store = make()
    one_of_everything(store)
    (folder,) = [tmp_path / name for name in ("sessions.db-blobs", "blobs") if (tmp_path / name).is_dir()]
    for name, age in (("old-1", 7200), ("old-2", 7200), ("new-1", 10)):
        (folder / name).write_bytes(b"x")
        os.utime(folder / name, (time.time() - age,) * 2)
    for file in folder.iterdir():
        if len(file.name) > 20:  # a session's own, however old
            os.utime(file, (time.time() - 7200,) * 2)
    assert store.evict().orphans == 2
    assert list(store.verify()) == []
    store.close()


def test_a_lease_that_ends_further_off_than_any_may_has_lapsed(make: Make, clock: Clock) -> None:
    store = make(clock=clock)
    ids = ("back", "deleted", "expired", "idle", "taken")
    for id in ids:
        store.create("t", id, replace(SETTINGS, ttl=60.0 if id == "expired" else None))
    leases = [store.lease("t", id, "w", LONGEST_LEASE) for id in ids]
    store.begin(Response("t", "r", "idle", None, "hash", {}, 0))
    clock.now += LONGEST_LEASE - 1
    with pytest.raises(BusyError):
        store.lease("t", "taken", "other")
    assert f"LATEST_END = {LATEST_END:.0f} " in resources.files("serving.sessions").joinpath("script.lua").read_text()
    assert len(store.list("t").sessions) == 5
    clock.now += 10 * 86_400  # the machine's clock goes wrong, and is set right
    assert store.heartbeat(leases) == leases
    clock.now -= 10 * 86_400
    assert [(x.id, x.owner) for x in store.list("t").sessions] == [(id, None) for id in ids if id != "expired"]
    assert store.lease("t", "taken", "other").fence > leases[-1].fence
    assert isinstance(store.commit([Change(leases[-1], 0, [1])])[0], StaleError)
    store.rollback("t", "back", 0)
    store.delete("t", "deleted")
    clock.now += 86_400  # the response has expired too
    evicted = store.evict()
    assert (evicted.sessions, evicted.responses) == (1, 1)
    store.close()


def test_files_are_written_anew_but_never_one_that_a_session_refers_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, other = SQLiteStore(tmp_path / "s.db"), SQLiteStore(tmp_path / "s.db")
    store.create("t", "s", replace(SETTINGS, retain=0))
    lease, at = store.lease("t", "s", "w", 60), 0

    def cross() -> None:
        nonlocal at
        place = at // 4 * 4 + 4
        data = bytes([place // 4]) * ((1 << 20) + 1 + place)
        assert isinstance(store.commit([Change(lease, at, range(at, place + 1), Snapshot(place, data))])[0], Committed)
        at = place + 1

    forks: dict[str, bytes | None] = {}
    for number in range(8):
        cross()
        if number % 3 == 0:
            store.fork("t", "s", f"f{number}")
            forks[f"f{number}"] = store.snapshot(store.get("t", "s"))
    for id, data in forks.items():
        assert other.snapshot(other.get("t", id)) == data
    assert list(other.verify()) == []
    named = {file for (file,) in store._query("SELECT file FROM blobs WHERE file IS NOT NULL")}
    assert len(os.listdir(tmp_path / "s.db-blobs")) <= len(named) + 2  # of the snapshots that are gone one file or two are left
    # one that reads while its file is written anew is told that the snapshot is gone, not that it is damaged
    seen, read = other.get("t", "s"), other._files.get

    def slow(name: str) -> bytes | None:
        half = read(name)
        cross()
        cross()
        return half and half[: len(half) // 2] + (read(name) or b"")[len(half) // 2 :]

    monkeypatch.setattr(other._files, "get", slow)
    with pytest.raises(NotFoundError, match="any more"):
        other.snapshot(seen)
    store.release([lease])
    for id in ("s", *forks):
        store.delete("t", id)
    assert os.listdir(tmp_path / "s.db-blobs") == []  # what is deleted is gone from every file
    store.close()
    other.close()
