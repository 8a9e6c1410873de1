"""Which stores are opened, and which are refused by name."""

import sqlite3
from pathlib import Path

import pytest

from serving.sessions.errors import DamagedError, InvalidError, UnavailableError
from serving.sessions.local_redis import LocalRedis
from serving.sessions.redis import RedisStore
from serving.sessions.sqlite import SQLiteStore
from tests.serving.sessions.test_damage import one_of_everything


@pytest.mark.needs("redis-server")
def test_a_redis_that_could_lose_answers_is_refused_unless_that_is_accepted(tmp_path: Path) -> None:
    server = LocalRedis(tmp_path / "redis")
    store = RedisStore(server.url, durability="relaxed")
    try:
        for name, value in (("appendonly", "no"), ("appendfsync", "everysec"), ("maxmemory-policy", "allkeys-lru")):
            before = store._redis.config_get(name)[name]
            store._redis.config_set(name, value)
            with pytest.raises(InvalidError, match=f"{name} is '{value}'.*--durability relaxed"):
                RedisStore(server.url)
            RedisStore(server.url, durability="relaxed").close()
            store._redis.config_set(name, before)
        RedisStore(server.url).close()
        store._redis.execute_command("ACL", "SETUSER", "default", "-config")
        with pytest.raises(InvalidError, match=r"settings cannot be read.*--durability relaxed"):
            RedisStore(server.url)
        server.kill()
        store.patience = 0.2
        with pytest.raises(UnavailableError, match="does not answer"):
            store.get("t", "s")
    finally:
        store.close()
        server.kill()


def test_what_users_wrote_is_readable_by_nobody_else(tmp_path: Path) -> None:
    store = SQLiteStore(tmp_path / "new" / "s.db")
    one_of_everything(store)
    for path in (tmp_path / "new").rglob("*"):
        if path.parent.name != "s.db-blobs":  # the folder is closed
            assert path.stat().st_mode & 0o077 == 0, path
    store.close()


def test_a_file_that_is_no_store_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "x.db").write_bytes(b"not a database" * 1000)
    with pytest.raises(DamagedError, match=r"x\.db: file is not a database"):
        SQLiteStore(tmp_path / "x.db")
    SQLiteStore(tmp_path / "y.db").close()
    db = sqlite3.connect(tmp_path / "y.db")
    db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(InvalidError, match="format 99"):
        SQLiteStore(tmp_path / "y.db")
