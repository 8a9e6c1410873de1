"""Two nodes with addresses of their own, a hostfile, and DeepSpeed's launcher in both."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from .conftest import TWO_NODES, losses
from .test_commands import start, wait_for
from .test_resume import train_command

BOUND = 60
"""Seconds in which the surviving node must have ended."""


@contextmanager
def nodes(hostfile: Path, port: int, arguments: list[str]) -> Iterator[list[subprocess.Popen[str]]]:
    """The same run, started on both nodes; what is left of it at the end is killed."""
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", str(hostfile), "--no_ssh"]
    where = ["--master_addr", "10.77.0.1", "--master_port", str(port)]
    processes = [
        start([TWO_NODES, "run", str(n), *launcher, "--node_rank", str(n), *where, "--module", "lm", *arguments])
        for n in range(2)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.mark.needs("ip")
@pytest.mark.parametrize(
    ("stage", "resumed", "lost"),  # node 0 is where the processes meet
    [(2, 3, 1), pytest.param(2, 2, 0, marks=pytest.mark.full), pytest.param(3, 3, 0, marks=pytest.mark.full)],
)
def test_two_nodes_train_a_lost_node_ends_the_other_and_both_resume(
    experiment: Path, hostfile: Path, tmp_path: Path, stage: int, resumed: int, lost: int
) -> None:
    out = tmp_path / "run"
    before, after = (f"training.deepspeed={experiment.parent / f'zero{n}.json'}" for n in (stage, resumed))
    settings = ["checkpoint.interval=5", "evaluation.sample=0"]
    endless = train_command(experiment, out, before, *settings, "training.steps=100000", "evaluation.interval=100000")
    port = 29500 + 20 * stage + 4 * resumed
    with nodes(hostfile, port, endless) as processes:
        survivor = processes[1 - lost]
        wait_for(lambda: list((out / "checkpoints").glob("step-*")))
        os.killpg(processes[lost].pid, signal.SIGKILL)
        _, errors = survivor.communicate(timeout=BOUND)
        assert survivor.returncode != 0
        assert "another process was lost" in errors, errors[-3000:]
    done = max(int(folder.name.removeprefix("step-")) for folder in (out / "checkpoints").glob("step-*"))
    last = train_command(experiment, out, after, *settings, f"training.steps={done + 3}")
    with nodes(hostfile, port + 1, [*last, "--resume"]) as both:
        ended = [process.communicate(timeout=300) for process in both]
    assert [process.returncode for process in both] == [0, 0], ended
    assert f"resuming {out} behind step {done}" in ended[0][0]
    assert len(losses(out)) == done + 3
