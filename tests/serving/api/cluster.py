"""A real `pmi serve` with 2 engine replicas in a process group of its own, for tests: started, watched, stopped, killed."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

from lm.machine import free_port
from serving.sessions.opening import open_store
from tests.serving.api.conftest import read_events
from tests.serving.engine.conftest import checkpoint, greedy

ROOT = Path(__file__).parents[3]


class Cluster:
    """`pmi serve` as a user starts it."""

    def __init__(self, folder: Path, model: Path, port: int, *more: str) -> None:
        self.folder, self.model, self.port, self.more = folder, model, port, more
        self.metrics_port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.process: subprocess.Popen[str] | None = None
        self.output, self.seconds = "", 0.0
        """What it has printed; how long its start took, and may take."""
        self.configure([{"checkpoint": str(model)}])

    def configure(self, models: list[dict[str, str]], revision: str = "1") -> None:
        """Write its configuration; a running one takes it up at once."""
        (self.folder / "serve.yaml").write_text(json.dumps({"revision": revision, "models": models}))
        if self.process is not None:
            self.process.send_signal(signal.SIGHUP)

    def line(self, start: str) -> str:
        """The next line of its output that starts so."""
        assert self.process is not None
        assert self.process.stdout is not None
        while line := self.process.stdout.readline():
            self.output += line
            if line.startswith(start):
                return line
        raise RuntimeError(f"no line {start!r}: {self.output}")

    def start(self, patience: float = 240) -> float:
        """Start it and wait for its address; the seconds that took. Where the machine is too busy for Ray, a second time."""
        try:
            return self._start(patience)
        except RuntimeError as error:
            if "Ray did not start" not in str(error):
                raise
            return self._start(patience)

    def _start(self, patience: float) -> float:
        began = time.monotonic()
        environment = os.environ | {
            "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "COLUMNS": "200",
            "XDG_DATA_HOME": str(self.folder / "data"),
        }  # fmt: skip
        command = [
            sys.executable, "-m", "serving.cli", "serve", "--config", str(self.folder / "serve.yaml"), "--replicas", "2",
            "--store", f"sqlite:///{self.folder}/sessions.db", "--port", str(self.port), "--metrics-port", str(self.metrics_port),
            "--set", "scaling.drain=20", "--set", "engine.lanes=16", "--set", "engine.queue=16", "--set", "engine.lease=2.0",
            *self.more,
        ]  # fmt: skip
        self.log = (self.folder / "serve.log").open("a")
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=self.log, text=True, start_new_session=True
        )
        assert self.process.stdout is not None
        while time.monotonic() - began < patience:
            line = self.process.stdout.readline()
            self.output += line
            if line.startswith("try: "):
                return time.monotonic() - began
            if not line and self.process.poll() is not None:
                break
        raise RuntimeError(f"pmi serve did not start: {self.output}\n{(self.folder / 'serve.log').read_text()[-3000:]}")

    def stop(self) -> int:
        """Ask it to stop, as Ctrl-C does, and wait; its exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(90)
        self._sweep()
        return code

    def kill(self) -> None:
        """kill -9 of everything, Ray included: no goodbye to anyone."""
        self._sweep()
        if self.process is not None:
            self.process.wait(30)

    def _sweep(self) -> None:
        """What is left of its own processes."""
        assert self.process is not None
        for process in self.processes():
            with psutil_gone():
                process.kill()

    def processes(self) -> list[psutil.Process]:
        """Its own process and all below it: Ray's daemons stay in its session."""
        assert self.process is not None
        found = []
        for process in psutil.process_iter():
            try:
                if os.getsid(process.pid) == self.process.pid or str(self.folder) in process.environ().get(
                    "PMI_TEST_CLUSTER", ""
                ):
                    found.append(process)
            except (psutil.Error, OSError):
                continue
        return found

    def engines(self) -> list[psutil.Process]:
        """The processes of the engine replicas."""
        return self.replicas("engine")

    def replicas(self, deployment: str) -> list[psutil.Process]:
        """The processes of a deployment's replicas."""
        found = []
        for process in self.processes():
            with psutil_gone():
                if any(f"ServeReplica:pmi:{deployment}" in part for part in process.cmdline()):
                    found.append(process)
        return found

    def times(self) -> list[Any]:
        """Processor times of its processes."""
        found = []
        for process in self.processes():
            with psutil_gone():
                found.append(process.cpu_times())
        return found

    def http(self, **more: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=120, **more)

    def metrics(self) -> dict[str, float]:
        """Sums over all series, by name."""
        sums: dict[str, float] = {}
        for line in httpx.get(f"http://127.0.0.1:{self.metrics_port}/metrics").text.splitlines():
            if line.startswith("ray_pmi"):
                name, _, value = line.partition("{")[0], None, line.rsplit(" ", 1)[1]
                sums[name] = sums.get(name, 0.0) + float(value)
        return sums


@contextmanager
def psutil_gone() -> Iterator[None]:
    with contextlib.suppress(psutil.NoSuchProcess):
        yield


def check_drain(cluster: Cluster, session: str, tokens: int = 1500) -> None:
    """Stop the service in the middle of a session's stream: that ends whole, or with an error event that says how to go on."""
    body = {"prompt": "The whale", "max_tokens": tokens, "temperature": 0, "session_id": session, "stream": True}
    text, last, finish, error = "", "", None, None
    with cluster.http() as http, http.stream("POST", "/v1/completions", json=body) as response:
        events = read_events(response)
        last, first = next(events)
        text += first["choices"][0]["text"]
        with ThreadPoolExecutor(1) as pool:
            stopping = pool.submit(cluster.stop)
            for id, data in events:
                if "error" in data:
                    error = data["error"]
                elif data["choices"]:
                    text, last, finish = text + data["choices"][0]["text"], id, data["choices"][0]["finish_reason"]
            assert stopping.result() == 0
    response_id, _, count = last.rpartition(":")
    if error is None:
        assert (finish, int(count)) == ("length", tokens)
    else:
        assert error["resume"] == f"/v1/streams/{response_id}"
    with contextlib.closing(open_store(f"sqlite:///{cluster.folder}/sessions.db")) as store:
        found = store.get("local", session)
        assert found.position >= 10 + int(count)
        assert found.owner is None or finish is None
    # a test of a rolling update may have left other weights behind
    served = next(x for x in (checkpoint(), checkpoint(seed=1)) if x.fingerprint == found.settings.model)
    whole = served.tokenizer.decode(greedy(served, list(b"The whale"), int(count))[0])
    assert whole.startswith(text)
