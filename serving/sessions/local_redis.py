"""A redis-server of one's own, with the settings that the store requires: for tests, benchmarks and first steps."""

import shutil
import socket
import subprocess
import time
from pathlib import Path

import redis

from serving.sessions.errors import UnavailableError

DURABLE = ("--appendonly", "yes", "--appendfsync", "always", "--maxmemory-policy", "noeviction", "--save", "")
START_SECONDS = 10.0


class LocalRedis:
    """A server on a free port of this machine; its data stays in `folder` when it is killed and started again."""

    def __init__(self, folder: Path, *options: str) -> None:
        if shutil.which("redis-server") is None:
            raise UnavailableError("redis-server is not on PATH; install Debian's package redis-server")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.folder, self.options = folder, options
        folder.mkdir(parents=True, exist_ok=True)
        self.start()

    @property
    def url(self) -> str:
        """What `open_store` takes."""
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Start the server and wait until it has read its data."""
        command = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder)]
        self.process = subprocess.Popen([*command, *DURABLE, *self.options], stdout=subprocess.DEVNULL)
        client = redis.Redis(port=self.port)
        began = time.monotonic()
        while True:
            try:
                client.ping()
                break
            except (redis.exceptions.ConnectionError, redis.exceptions.BusyLoadingError):
                if time.monotonic() - began > START_SECONDS or self.process.poll() is not None:
                    self.kill()
                    raise UnavailableError(f"redis-server did not start on port {self.port}") from None
                time.sleep(0.02)
        client.close()

    def kill(self) -> None:
        """End it as a crash would."""
        self.process.kill()
        self.process.wait()
