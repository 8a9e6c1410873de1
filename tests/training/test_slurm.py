"""deploy/train/slurm.sh as an operator submits it: a real Slurm on two nodes, and what may happen to a job there."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from lm.machine import free_port

from .conftest import ROOT, TWO_NODES, environment, losses
from .test_commands import wait_for
from .test_resume import train_command

pytestmark = [pytest.mark.full, pytest.mark.needs("ip", "slurmctld", "slurmd", "sbatch"), pytest.mark.timeout(900)]

CONFIGURATION = """
ClusterName=pmi
SlurmctldHost=pmi-node-0
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
# a job that is queued again waits until its old credentials are void
AuthInfo=cred_expire=6
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
MpiDefault=none
MailProg=/bin/true
ReturnToService=2
SlurmdParameters=config_overrides
NodeName=pmi-node-0 NodeAddr=10.77.0.1 Port={ports[1]}
NodeName=pmi-node-1 NodeAddr=10.77.0.2 Port={ports[2]}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE
"""


class Slurm:
    """A controller and two nodes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "state").mkdir()
        (folder / "slurm.conf").write_text(CONFIGURATION.format(folder=folder, ports=[free_port() for _ in range(3)]))
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")  # not used, but looked for
        self.environment = environment() | {
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PMI": str(Path(sys.executable).parent / "pmi"),
        }
        daemons = [(0, ["slurmctld"]), (0, ["slurmd", "-N", "pmi-node-0"]), (1, ["slurmd", "-N", "pmi-node-1"])]
        self.processes = [
            subprocess.Popen(
                [TWO_NODES, "run", str(node), *command, "-D"], env=self.environment,
                stdout=(folder / f"{number}.log").open("w"), stderr=subprocess.STDOUT,
            )
            for number, (node, command) in enumerate(daemons)
        ]  # fmt: skip
        wait_for(lambda: self("sinfo", "--noheader", "--states=idle", "--format=%D", check=False).strip() == "2", 60)

    def __call__(self, *command: str, check: bool = True) -> str:
        """A command on the first node, its output."""
        done = subprocess.run(
            [TWO_NODES, "run", "0", *command], env=self.environment, cwd=self.folder, capture_output=True, text=True, check=False
        )
        assert not check or done.returncode == 0, done.stderr
        return done.stdout

    def submit(self, arguments: list[str]) -> str:
        """A run of one process on each node; the job's number."""
        script = str(ROOT / "deploy/train/slurm.sh")
        return self("sbatch", "--parsable", "--nodes=2", "--ntasks-per-node=1", script, *arguments).strip()

    def shown(self, job: str, key: str) -> str:
        """One of the job's properties."""
        found = re.search(rf"\b{key}=(\S+)", self("scontrol", "show", "job", job))
        assert found
        return found[1]

    def log(self, job: str) -> str:
        """What the job has written so far, all its attempts."""
        path = self.folder / f"pmi-{job}.out"
        return path.read_text() if path.exists() else ""

    def tasks(self, out: Path) -> list[psutil.Process]:
        """The training's own processes, by rank."""
        found = {}
        for process in psutil.process_iter(["cmdline"]):
            command = process.info["cmdline"] or []
            if str(out) in command and command[0].endswith("python"):
                found[process.environ()["SLURM_PROCID"]] = process
        return [found[rank] for rank in sorted(found)]

    def close(self) -> None:
        """End the daemons; first what they run."""
        self("scancel", "--user=root", check=False)
        wait_for(lambda: not self("squeue", "--noheader", check=False).strip(), 60)
        for process in self.processes:
            process.terminate()
            process.wait(20)


@pytest.fixture(scope="module")
def slurm(hostfile: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    made = Slurm.__new__(Slurm)
    try:
        made.__init__(tmp_path_factory.mktemp("slurm"))  # type: ignore[misc]
        yield made
    finally:
        made.close()


def checkpoints(out: Path) -> list[int]:
    return sorted(int(folder.name.removeprefix("step-")) for folder in (out / "checkpoints").glob("step-*"))


def test_a_preempted_and_a_crashed_job_queue_themselves_again_and_go_on(slurm: Slurm, experiment: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    settings = [f"training.deepspeed={experiment.parent / 'zero2.json'}", "checkpoint.interval=20", "evaluation.sample=0"]
    endless = train_command(experiment, out, *settings, "training.steps=100000", "evaluation.interval=100000")
    job = slurm.submit(endless[1:])
    wait_for(lambda: checkpoints(out))
    assert {process.environ()["MASTER_ADDR"] for process in slurm.tasks(out)} == {"pmi-node-0"}
    slurm("scancel", "--signal=TERM", job)  # as preemption does: the processes get it, not the script
    wait_for(lambda: slurm.shown(job, "Restarts") == "1")
    wait_for(lambda: "resuming" in slurm.log(job))
    saved = int(re.findall(r"resuming \S+ behind step (\d+)", slurm.log(job).replace("\n", " "))[0])
    assert saved in checkpoints(out), "the step that the signal came in was finished and saved"
    wait_for(lambda: checkpoints(out)[-1] > saved)
    slurm.tasks(out)[1].send_signal(signal.SIGKILL)
    wait_for(lambda: slurm.shown(job, "Restarts") == "2")
    assert "ended with" in slurm.log(job)
    wait_for(lambda: slurm.log(job).count("resuming") == 2)
    slurm("scancel", job)
    wait_for(lambda: slurm.shown(job, "JobState") == "CANCELLED")
    wait_for(lambda: not slurm.tasks(out))
    done = checkpoints(out)[-1]
    last = slurm.submit([*train_command(experiment, out, *settings, f"training.steps={done + 3}")[1:], "--resume"])
    wait_for(lambda: slurm.shown(last, "JobState") not in ("PENDING", "RUNNING", "COMPLETING"))
    assert slurm.shown(last, "JobState") == "COMPLETED", slurm.log(last)[-3000:]
    assert len(losses(out)) == done + 3


def test_a_mistake_in_the_flags_ends_the_job_for_good(slurm: Slurm, experiment: Path, tmp_path: Path) -> None:
    job = slurm.submit(train_command(experiment, tmp_path / "run", "training.stepps=3")[1:])
    wait_for(lambda: slurm.shown(job, "JobState") not in ("PENDING", "RUNNING", "COMPLETING"))
    assert (slurm.shown(job, "JobState"), slurm.shown(job, "ExitCode")) == ("FAILED", "2:0")
    assert slurm.shown(job, "Restarts") == "0"
    assert "stepps" in slurm.log(job)
    assert os.listdir(tmp_path) == []
