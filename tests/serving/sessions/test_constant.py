"""A session costs the same however long it has been going on."""

from pathlib import Path

import pytest

from serving.sessions.base import BaseStore
from serving.sessions.redis import RedisStore
from serving.sessions.sqlite import SQLiteStore
from serving.sessions.store import Change, Committed, Settings, Snapshot
from tests.serving.sessions.conftest import BACKENDS, maker

SEGMENT = 512
SNAPSHOT = 200_000


def grow(store: BaseStore, tokens: int) -> None:
    """Read so many tokens, as a long prefill writes them: a snapshot every few segments."""
    store.create("t", "s", Settings("m", "k", SEGMENT, retain=0))
    lease = store.lease("t", "s", "w")
    for at in range(0, tokens, 8 * SEGMENT):
        ids = range(at, min(at + 8 * SEGMENT, tokens))
        end = ids[-1] // SEGMENT * SEGMENT
        snapshot = Snapshot(end, end.to_bytes(8, "little") + bytes(SNAPSHOT)) if end else None
        (outcome,) = store.commit([Change(lease, at, [x % 1000 for x in ids], snapshot, turn=at == 0)])
        assert isinstance(outcome, Committed)
    store.release([lease])


def stored(store: BaseStore) -> int:
    """Bytes that the store really uses."""
    if isinstance(store, SQLiteStore):
        ((pages,), (free,), (size,)) = (store._query(f"PRAGMA {x}")[0] for x in ("page_count", "freelist_count", "page_size"))
        return (pages - free) * size + sum(x.stat().st_size for x in store._files.folder.iterdir())
    assert isinstance(store, RedisStore)
    return sum(store._redis.memory_usage(key) for key in store._redis.keys(f"{store.prefix}:*"))


@pytest.mark.parametrize("backend", BACKENDS[:2])
def test_a_million_tokens_take_no_more_bytes_than_ten_thousand_neither_to_keep_nor_to_resume(
    backend: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    figures = []
    for tokens in (10_000, 1_000_000):
        store = maker(backend, tmp_path / str(tokens), request)()
        grow(store, tokens)
        session = store.get("t", "s")
        assert session.position == tokens
        assert len(session.tail) <= SEGMENT  # all that is read again
        (raw,) = store.load([("t", "s")])
        assert raw is not None
        read = len(raw.head) + len(raw.bounds) + len(store.snapshot(session) or b"")
        figures.append((stored(store), session.bytes, read))
        store.close()
    for young, old in zip(*figures, strict=True):
        assert old <= 1.01 * young
