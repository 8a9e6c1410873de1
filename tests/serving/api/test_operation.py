"""Ray's throughput mode with HAProxy and autoscaling, on a real cluster; and the service on a cluster that ran before it."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from lm.machine import free_port
from tests.serving.api.breakable import BREAK
from tests.serving.api.cluster import ROOT, Cluster, check_drain, psutil_gone, read_events
from tests.serving.api.conftest import GREEDY
from tests.serving.api.test_cluster import expected, make, stream

pytestmark = [pytest.mark.timeout(900), pytest.mark.full]
ASK = {"model": "tiny", "prompt": "The whale", **GREEDY}


def within(seconds: float, check: Callable[[], Any], what: str) -> float:
    """Wait until `check` holds; how long that took."""
    began = time.monotonic()
    while not check():
        assert time.monotonic() - began < seconds, what
        time.sleep(0.2)
    return time.monotonic() - began


# --- throughput mode, 1 to 2 replicas ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    changes = [
        "http.throughput=true", "scaling.replicas=1", "scaling.max_replicas=2", "scaling.target_ongoing=2",
        "scaling.grow_after=1", "scaling.shrink_after=3",
    ]  # fmt: skip
    made = Cluster(
        tmp_path_factory.mktemp("throughput"), folder, free_port(), *(part for change in changes for part in ("--set", change))
    )
    try:
        made.start()
        yield made
    finally:
        made.kill()


def test_throughput_mode_serves_behind_haproxy_on_this_machine_only(cluster: Cluster) -> None:
    names = [" ".join(process.cmdline()) for process in cluster.processes()]
    assert any("haproxy" in name for name in names)
    listening = {
        connection.laddr.ip
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == cluster.port
    }
    assert listening == {"127.0.0.1"}
    client = openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0)
    assert client.completions.create(**ASK, max_tokens=12).choices[0].text == expected("The whale", 12)
    make(cluster, "fast")
    assert stream(cluster, "fast", 300) == (expected("The whale", 300), 0)


def test_throughput_mode_frees_the_lane_of_a_client_that_leaves(cluster: Cluster) -> None:
    make(cluster, "leaving")
    with cluster.http() as http:
        body = ASK | {"max_tokens": 9000, "session_id": "leaving", "stream": True}
        with http.stream("POST", "/v1/completions", json=body) as response:
            next(read_events(response))
        within(5, lambda: not http.get("/v1/sessions/leaving").json()["busy"], "the lane is still held")


def test_replicas_rise_under_load_and_fall_after(cluster: Cluster) -> None:
    assert len(cluster.engines()) == 1
    over, codes = threading.Event(), []

    def load(_: int) -> None:
        while not over.is_set():
            codes.append(cluster.http().post("/v1/completions", json=ASK | {"max_tokens": 200}).status_code)

    with ThreadPoolExecutor(8) as pool:
        loads = [pool.submit(load, number) for number in range(8)]
        try:
            rose = within(90, lambda: len(cluster.engines()) == 2, "no second replica")
        finally:
            over.set()
        for each in loads:
            each.result()
    fell = within(120, lambda: len(cluster.engines()) == 1, "the second replica stays")
    assert set(codes) == {200}
    assert cluster.http().post("/v1/completions", json=ASK | {"max_tokens": 5}).status_code == 200
    print(f"2 replicas after {rose:.0f} s of load, 1 again {fell:.0f} s after it")


def test_a_stop_lets_streams_finish_in_throughput_mode(cluster: Cluster) -> None:
    """It must be the last test of its cluster."""
    make(cluster, "draining")
    check_drain(cluster, "draining")


def test_limits_are_counted_over_all_ingress_replicas(folder: Path, tmp_path: Path) -> None:
    changes = ["scaling.replicas=1", "scaling.ingress_replicas=2", "limits.requests_per_minute=20"]
    made = Cluster(tmp_path, folder, free_port(), *(part for change in changes for part in ("--set", change)))
    try:
        made.start()
        assert len(made.replicas("ingress")) == 2
        before = {process.pid: sum(process.cpu_times()[:2]) for process in made.replicas("ingress")}
        with ThreadPoolExecutor(8) as pool:
            asked = pool.map(lambda _: made.http().post("/v1/completions", json=ASK | {"max_tokens": 2}), range(60))
            began, codes = time.monotonic(), [answer.status_code for answer in asked]
        passed = time.monotonic() - began
        worked = [sum(process.cpu_times()[:2]) - before[process.pid] for process in made.replicas("ingress")]
        assert min(worked) > 0.05  # both had their share
        assert set(codes) == {200, 429}
        assert 20 <= codes.count(200) <= 21 + passed / 3  # what is used up comes back, a request every 3 s
    finally:
        made.kill()


# --- a cluster that runs already -----------------------------------------------------------------------------------


class RunningRay:
    """`ray start --head`, as an operator starts it."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="pmi-ray-"))  # short: Ray puts sockets there
        self.gcs, self.dashboard, self.port = free_port(), free_port(), free_port()
        self.environment = os.environ | {
            "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0",
            "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "1" * 64, "RAY_ADDRESS": f"127.0.0.1:{self.gcs}",
            "RAY_DASHBOARD_ADDRESS": f"http://127.0.0.1:{self.dashboard}",
        }  # fmt: skip
        self.run(
            "ray.scripts.scripts", "start", "--head", f"--port={self.gcs}", f"--dashboard-port={self.dashboard}",
            "--include-dashboard=true", "--num-cpus=4", "--object-store-memory=100000000", f"--temp-dir={self.folder}",
            f"--dashboard-agent-listen-port={free_port()}", f"--ray-client-server-port={free_port()}",
        )  # fmt: skip

    def run(self, module: str, *arguments: str) -> str:
        """A command to its end, which must be a good one; what it printed."""
        done = subprocess.run(
            [sys.executable, "-m", module, *arguments], env=self.environment, cwd=ROOT, capture_output=True, text=True,
            check=False, timeout=180,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return done.stdout + done.stderr

    def processes(self) -> list[psutil.Process]:
        """Ours, by the folder that only we use, and all below."""
        found = []
        for process in psutil.process_iter():
            with psutil_gone(), contextlib.suppress(psutil.AccessDenied):
                if any(str(self.folder) in part for part in process.cmdline()):
                    found += [process, *process.children(recursive=True)]
        return list(set(found))

    def engines(self) -> set[int]:
        found = set()
        for process in self.processes():
            with psutil_gone():
                if any("ServeReplica:pmi:engine" in part for part in process.cmdline()):
                    found.add(process.pid)
        return found

    def ask(self, **more: Any) -> httpx.Response:
        return httpx.post(f"http://127.0.0.1:{self.port}/v1/completions", json=ASK | {"max_tokens": 12} | more, timeout=60)

    def answers(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return self.ask().status_code == 200
        return False

    def close(self) -> None:
        for process in self.processes():
            with psutil_gone():
                process.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture
def ray_cluster() -> Iterator[RunningRay]:
    made = RunningRay.__new__(RunningRay)
    try:
        made.__init__()  # type: ignore[misc]
        yield made
    finally:
        made.close()


def test_serve_run_and_serve_deploy_work_a_dead_loop_is_replaced_and_sqlite_is_refused_on_two_nodes(
    ray_cluster: RunningRay, folder: Path, tmp_path: Path
) -> None:
    ray, store = ray_cluster, f"sqlite:///{tmp_path}/sessions.db"
    ray.run("ray.serve.scripts", "start", "--http-host=127.0.0.1", f"--http-port={ray.port}")
    command = [sys.executable, "-m", "ray.serve.scripts", "run", "serving.app:build", "--name=pmi"]
    command += [f"checkpoint={folder}", f"store={store}"]
    with subprocess.Popen(command, env=ray.environment, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as run:
        try:
            within(120, ray.answers, "`serve run` does not serve")
            assert ray.ask().json()["choices"][0]["text"] == expected("The whale", 12)
        finally:
            run.send_signal(signal.SIGINT)
    arguments = {"checkpoint": str(folder), "store": store, "scaling.replicas": 2, "scaling.health_period": 1.0}
    config = {
        "proxy_location": "EveryNode", "http_options": {"host": "127.0.0.1", "port": ray.port},
        "applications": [
            {
                "name": "pmi", "route_prefix": "/", "import_path": "tests.serving.api.breakable:build", "args": arguments,
                "runtime_env": {"env_vars": {"PYTHONPATH": str(ROOT)}},
            }
        ],
    }  # fmt: skip
    (tmp_path / "cluster.yaml").write_text(json.dumps(config))
    ray.run("ray.serve.scripts", "deploy", str(tmp_path / "cluster.yaml"))
    within(120, ray.answers, "`serve deploy` does not serve")
    within(60, lambda: len(ray.engines()) == 2, "there are not two replicas")
    before = ray.engines()
    assert ray.ask(prompt=BREAK).status_code == 503
    seconds = within(60, lambda: len(ray.engines() - before) == 1 and len(ray.engines()) == 2, "the broken replica stays")
    within(30, lambda: all(ray.answers() for _ in range(6)), "not all requests are answered again")
    assert ray.ask().json()["choices"][0]["text"] == expected("The whale", 12)
    print(f"a replica whose loop had ended was replaced after {seconds:.0f} s")
    # a second node: now the replicas could not share the file
    ray.run("ray.scripts.scripts", "start", f"--address=127.0.0.1:{ray.gcs}", "--num-cpus=1", "--object-store-memory=100000000")
    ray.run("ray.serve.scripts", "shutdown", "--yes")
    # Ray's command says why, and returns 0 all the same
    said = ray.run("ray.serve.scripts", "run", "serving.app:build", "--name=pmi", f"checkpoint={folder}", f"store={store}")
    assert "SQLite serves the replicas of one machine only" in said, said
    assert not ray.answers()
