"""Real stores for the tests: a SQLite file, and a redis-server of Debian's package on a free port."""

import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from serving.sessions.base import BaseStore
from serving.sessions.local_redis import LocalRedis
from serving.sessions.redis import RedisStore
from serving.sessions.sqlite import SQLiteStore
from serving.sessions.store import Limits, Settings

SETTINGS = Settings(model="model-1", tokenizer="bytes-1", segment=4)
Make = Callable[..., BaseStore]


class Clock:
    """Time that tests move."""

    def __init__(self) -> None:
        self.now = time.time()

    def __call__(self) -> float:
        return self.now


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalRedis]:
    server = LocalRedis(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()


BACKENDS = ["sqlite", pytest.param("redis", marks=pytest.mark.needs("redis-server")),
            pytest.param("redis+folder", marks=pytest.mark.needs("redis-server"))]  # fmt: skip
numbers = itertools.count()


def maker(backend: str, folder: Path, request: pytest.FixtureRequest) -> Make:
    """Opens one store, again and again: the same data every time."""
    prefix = f"test{next(numbers)}"

    def make(limits: Limits | None = None, clock: Clock | None = None, **more: object) -> BaseStore:
        if backend == "sqlite":
            more.update({"clock": clock} if clock else {})
            return SQLiteStore(folder / "sessions.db", limits, **more)  # type: ignore[arg-type]
        server = request.getfixturevalue("redis_server")
        blobs = folder / "blobs" if backend == "redis+folder" else None
        return RedisStore(server.url, limits, prefix=prefix, blobs=blobs, clock=clock, **more)  # type: ignore[arg-type]

    return make


# the third differs from the second in where snapshots are: it runs where that matters
@pytest.fixture(params=BACKENDS[:2])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    return maker(request.param, tmp_path, request)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(make: Make) -> Iterator[BaseStore]:
    made = make()
    yield made
    made.close()
