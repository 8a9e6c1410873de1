"""Real stores for the tests: a SQLite file, and a redis-server of Debian's package on a free port."""

import itertools
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from serving.sessions.base import BaseStore
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


class RedisServer:
    """A redis-server whose data survives being killed."""

    def __init__(self, folder: Path, *options: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.folder, self.options = folder, options
        folder.mkdir(parents=True, exist_ok=True)
        self.process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        durable = ("--appendonly", "yes", "--appendfsync", "always", "--maxmemory-policy", "noeviction", "--save", "")
        command = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder)]
        self.process = subprocess.Popen([*command, *durable, *self.options], stdout=subprocess.DEVNULL)
        client = redis.Redis(port=self.port)
        for _ in range(200):
            try:
                client.ping()
                break
            except redis.exceptions.ConnectionError:
                time.sleep(0.02)
        else:
            raise RuntimeError("redis-server did not start")
        client.close()

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
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


@pytest.fixture(params=BACKENDS)
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
