"""`ray job submit ... -- python -m lm eval --ray auto`, as the README has it, on a cluster that runs already."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from lm.machine import free_port
from tests.conftest import Pmi

from .conftest import ROOT, result_of

RAY = [sys.executable, "-m", "ray.scripts.scripts"]
TOKEN = "0" * 64


@pytest.fixture
def head() -> Iterator[tuple[str, dict[str, str]]]:
    """Where `ray start --head` takes jobs, and the environment of who may submit them."""
    temp = Path(tempfile.mkdtemp(prefix="pmi-job-"))  # short: Ray puts sockets there
    environment = {
        **os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN,
        "RAY_worker_niceness": "0", "OMP_NUM_THREADS": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }  # fmt: skip
    address = f"http://127.0.0.1:{(port := free_port())}"
    command = [*RAY, "start", "--head", "--block", "--num-cpus=2", f"--port={free_port()}", f"--temp-dir={temp}"]
    command += ["--include-dashboard=true", f"--dashboard-port={port}", f"--dashboard-agent-listen-port={free_port()}"]
    command += [f"--ray-client-server-port={free_port()}", "--object-store-memory=100000000"]
    with (temp / "head.log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        request = urllib.request.Request(f"{address}/api/jobs/", headers={"Authorization": f"Bearer {TOKEN}"})
        deadline = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=5):
                break
            time.sleep(0.5)
        else:
            raise RuntimeError((temp / "head.log").read_text())
        yield address, environment
    finally:
        for mine in [*psutil.Process(process.pid).children(recursive=True), process]:
            with contextlib.suppress(psutil.NoSuchProcess):
                mine.kill()
        process.wait(30)
        shutil.rmtree(temp, ignore_errors=True)


def test_an_evaluation_can_be_submitted_as_a_job_to_a_cluster(
    head: tuple[str, dict[str, str]], pmi: Pmi, checkpoint_folder: Path, books: Path, tmp_path: Path
) -> None:
    address, environment = head
    call = ["eval", "--checkpoint", str(checkpoint_folder), "--data", str(books)]
    entry = ["python", "-m", "lm", *call, "--ray", "auto", "--out", str(tmp_path / "job")]
    submitted = subprocess.run(
        [*RAY, "job", "submit", "--address", address, "--working-dir", ".", "--", *entry],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert submitted.returncode == 0, submitted.stdout[-3000:] + submitted.stderr[-3000:]
    assert "nats per token" in submitted.stdout, submitted.stdout[-3000:]
    code, alone, err = pmi(*call, "--json")
    assert code == 0, err
    mine = result_of(tmp_path / "job")["passes"]["on"]
    assert mine["nats"] == pytest.approx(json.loads(alone)["passes"]["on"]["nats"], rel=1e-5)
