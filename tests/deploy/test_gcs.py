"""Ray's control store in Redis, as in rayservice.yaml: killed while the service serves, it comes back knowing all."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml

from lm.config import load_model_config
from lm.data.tokenizer import ByteTokenizer
from lm.machine import free_port
from lm.model import PMI
from lm.model.pretrained import save_pretrained
from serving.auth import Keys

from .schemas import DEPLOY, ROOT, documents

APP = """
import json
import sys
import ray
from ray import serve
from serving.app import build
address, port, arguments = sys.argv[1:]
ray.init(address=address, log_to_driver=False)
serve.start(http_options={"host": "0.0.0.0", "port": int(port)})
serve.run(build(json.loads(arguments)), name="pmi", route_prefix="/")
"""


def within(seconds: float, check: Callable[[], Any]) -> Any:
    """What `check` gives, once it gives something without an error."""
    deadline, last = time.monotonic() + seconds, None
    while time.monotonic() < deadline:
        try:
            found = check()
            if found:
                return found
        except Exception as error:
            last = error
        time.sleep(0.5)
    raise AssertionError(f"not within {seconds} s: {last!r}")


class Cluster:
    """`ray start --head` with its control store in Redis, and on it the application of rayservice.yaml."""

    def __init__(self, folder: Path) -> None:
        self.temp = Path(tempfile.mkdtemp(prefix="pmi-gcs-"))  # short: Ray puts sockets there
        self.redis_port, self.gcs_port, self.http = free_port(), free_port(), free_port()
        conf = str(DEPLOY / "serve/redis.conf")
        self.redis = subprocess.Popen(
            ["redis-server", conf, "--port", str(self.redis_port), "--dir", str(folder)], stdout=subprocess.DEVNULL
        )
        self.environment = {
            **os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_REDIS_ADDRESS": f"127.0.0.1:{self.redis_port}",
            "PYTHONPATH": str(ROOT), "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64, "OMP_NUM_THREADS": "1",
            "RAY_worker_niceness": "0",
        }  # fmt: skip
        torch.manual_seed(0)
        save_pretrained(PMI(load_model_config("tiny")), ByteTokenizer(), folder / "model")
        within(20, lambda: socket.create_connection(("127.0.0.1", self.redis_port), 1).close() or True)
        ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", f"--port={self.gcs_port}"]
        more = ["--include-dashboard=false", "--num-cpus=4", f"--temp-dir={self.temp}", "--object-store-memory=100000000"]
        more += [f"--dashboard-agent-listen-port={free_port()}", f"--ray-client-server-port={free_port()}"]
        subprocess.run([*ray, *more, "--disable-usage-stats"], env=self.environment, check=True, capture_output=True, timeout=120)
        store = f"redis://127.0.0.1:{self.redis_port}/1"
        self.key = Keys(folder / "keys.json").create("ada")
        (manifest, *_) = documents("serve/rayservice.yaml")
        (application,) = yaml.safe_load(manifest["spec"]["serveConfigV2"])["applications"]
        own = {"models": [{"checkpoint": str(folder / "model")}], "keys": str(folder / "keys.json"), "store": store}
        scaling = application["args"]["scaling"] | {"max_replicas": 2, "engine_cpus": 0.1}  # this machine is smaller
        arguments = json.dumps(application["args"] | own | {"scaling": scaling})
        done = subprocess.run(
            [sys.executable, "-c", APP, f"127.0.0.1:{self.gcs_port}", str(self.http), arguments],
            env=self.environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]

    def processes(self) -> list[psutil.Process]:
        """Ours, by the folder that only we use."""
        found = []
        for process in psutil.process_iter(["cmdline"]):
            if any(str(self.temp) in part for part in process.info["cmdline"] or []):
                found.append(process)
        return found

    def gcs(self) -> psutil.Process:
        return next(p for p in self.processes() if p.info["cmdline"][0].endswith("gcs_server"))

    def replicas(self) -> list[psutil.Process]:
        """The processes of the service's deployments."""
        raylets = [p for p in self.processes() if p.info["cmdline"][0].endswith("raylet")]
        return [child for p in raylets for child in p.children() if child.cmdline()[0].startswith("ray::ServeReplica:pmi:")]

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.key}"}
        request = urllib.request.Request(f"http://127.0.0.1:{self.http}/v1/{path}", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return dict(json.loads(answer.read()))

    def ask(self) -> dict[str, Any]:
        return self.post("completions", prompt="The whale", max_tokens=8, session_id="ada")

    def close(self) -> None:
        ours = self.processes()
        ours += [child for process in ours for child in process.children(recursive=True)]
        for process in set(ours):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.redis.send_signal(signal.SIGKILL)
        self.redis.wait()
        shutil.rmtree(self.temp, ignore_errors=True)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster.__new__(Cluster)
    try:
        made.__init__(tmp_path)  # type: ignore[misc]
        yield made
    finally:
        made.close()


@pytest.mark.full
@pytest.mark.needs("redis-server")
def test_the_service_outlives_its_control_store_and_is_mended_by_the_next_one(cluster: Cluster) -> None:
    assert cluster.post("sessions", id="ada")["id"] == "ada"
    assert cluster.ask()["choices"]
    gcs = cluster.gcs()
    command, environment, folder = gcs.cmdline(), gcs.environ(), gcs.cwd()
    gcs.send_signal(signal.SIGKILL)
    gcs.wait(10)
    for _ in range(3):  # nothing of a request passes through it
        assert cluster.ask()["choices"]
    again = subprocess.Popen(command, env=environment, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        assert within(30, lambda: cluster.ask()["choices"])
        # the new one knows the actors of the old: a killed replica is replaced
        replicas = cluster.replicas()
        assert len(replicas) >= 2
        replicas[0].send_signal(signal.SIGKILL)
        assert within(60, lambda: cluster.ask()["choices"])
        gone = replicas[0].pid
        assert within(90, lambda: len([p for p in cluster.replicas() if p.pid != gone]) >= len(replicas))
        assert again.poll() is None
    finally:
        again.kill()
        again.wait()
