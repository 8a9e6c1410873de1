"""Shared by all tests: one thread for torch, and `needs(command)` for what a machine may lack."""

import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from lm.cli import app, run

Pmi = Callable[..., tuple[int, str, str]]
"""`pmi` with arguments: exit code, standard output, standard error."""

ROOT = Path(__file__).parent.parent

REAL_DATA = Path(os.environ.get("PMI_TEST_DATA") or ROOT.parent / "shared" / "data")
"""The folder of real data sets (babi/, enwik8/, pg19/, wikitext-2/, wikitext-103/), beside the checkout unless named."""

torch.set_num_threads(1)
_not_run: set[str] = set()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if "real_data" in getattr(item, "fixturenames", ()) and not REAL_DATA.is_dir():
        _not_run.add(f"{item.nodeid} (needs the real data sets; PMI_TEST_DATA names their folder)")
        pytest.skip(f"no real data sets in {REAL_DATA} (PMI_TEST_DATA names another place)")
    for marker in item.iter_markers("needs"):
        for command in marker.args:
            if shutil.which(command) is None:
                _not_run.add(f"{item.nodeid} (needs {command})")
                reason = f"{command} is not on PATH; deploy/apt-packages.txt names the package that brings it"
                (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)


def pytest_terminal_summary(terminalreporter) -> None:
    if _not_run:
        terminalreporter.section("NOT RUN: a program or data that they need is missing")
        for line in sorted(_not_run):
            terminalreporter.line(line)


@pytest.fixture
def pmi(capfd: pytest.CaptureFixture[str]) -> Pmi:
    """Run `pmi` with these arguments in this process: exit code, standard output, standard error."""

    def call(*arguments: object) -> tuple[int, str, str]:
        capfd.readouterr()
        code = run(app, [str(argument) for argument in arguments])
        return code, *capfd.readouterr()

    return call


@pytest.fixture(scope="session")
def moby_dick() -> str:
    """The bundled text."""
    return (ROOT / "lm/data/text/moby-dick.txt").read_text("utf-8")


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real data sets; where there is none, the test is skipped and named at the end."""
    return REAL_DATA


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[int]:
    """One Ray cluster of two workers for the whole session (starting one takes ten seconds); its metrics port."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S"] = "1"
    import ray

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ray.init(
        address="local", num_cpus=2, include_dashboard=False, object_store_memory=200 * 2**20, _metrics_export_port=port,
        runtime_env={"env_vars": environment}, log_to_driver=False, logging_level="error",
        _system_config={"metrics_report_interval_ms": 1000, "worker_niceness": 0},
    )  # fmt: skip
    yield port
    ray.shutdown()
