"""Shell scripts, the Dockerfile and the systemd unit: linted by the tools that people use for them."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .schemas import DEPLOY, ROOT

BIN = Path(sys.executable).parent


def tool(name: str) -> str:
    """A program that a package of the test extra brings, in the environment or on PATH."""
    found = shutil.which(name, path=f"{BIN}") or shutil.which(name)
    assert found, f"{name}: install the extra `test`"
    return found


def test_shellcheck_finds_nothing() -> None:
    scripts = [str(path) for path in DEPLOY.rglob("*.sh")] + [str(ROOT / ".ci/run")]
    assert len(scripts) >= 4
    result = subprocess.run([tool("shellcheck"), *scripts], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout


def test_hadolint_finds_nothing() -> None:
    result = subprocess.run([tool("hadolint"), str(DEPLOY / "serve/Dockerfile")], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout


def test_the_image_is_not_root_and_is_made_of_what_the_build_may_see() -> None:
    lines = (DEPLOY / "serve/Dockerfile").read_text().splitlines()
    user = [line.split()[1] for line in lines if line.startswith("USER ")][-1]
    assert user.split(":")[0].isdigit(), "Kubernetes can only tell a number from root"
    assert int(user.split(":")[0]) > 0
    allowed = {x[1:] for x in (DEPLOY / "serve/Dockerfile.dockerignore").read_text().splitlines() if x.startswith("!")}
    copied = {x for line in lines if re.match(r"COPY (?!--from)", line) for x in line.split()[1:-1]}
    assert copied <= allowed
    for source in copied:
        assert (ROOT / source).exists(), source


@pytest.mark.needs("systemd-analyze")
def test_systemd_accepts_the_unit_and_calls_its_exposure_ok(tmp_path: Path) -> None:
    unit = tmp_path / "pmi.service"
    unit.write_text((DEPLOY / "serve/pmi.service").read_text().replace("/opt/pmi/bin/pmi", sys.executable))
    verified = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
    assert verified.stderr == ""
    judged = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", str(unit)], capture_output=True, text=True, check=False
    )
    level = re.search(r"exposure level for pmi.service: ([0-9.]+)", judged.stdout)
    assert level
    assert float(level[1]) < 3


def test_slurm_tasks_become_ranks() -> None:
    """The inner shell of slurm.sh, as srun would start it."""
    script = (DEPLOY / "train/slurm.sh").read_text()
    inner = re.search(r"bash -c '([^']+)'", script)
    assert inner
    shown = subprocess.run(
        ["bash", "-c", inner[1], "pmi", "env"],
        env={"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NTASKS": "4", "PATH": "/usr/bin:/bin"},
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    assert {"RANK=3", "LOCAL_RANK=1", "WORLD_SIZE=4"} <= set(shown.splitlines())
