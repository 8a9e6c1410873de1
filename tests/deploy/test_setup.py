"""deploy/setup.sh on machines that lack something: what is missing is named once, with what is not run for it."""

import shutil
import subprocess
from pathlib import Path

import pytest

from .schemas import DEPLOY

USUAL = ["bash", "sh", "cat", "cksum", "cp", "dirname", "env", "mkdir"]
PYTHON = """#!/bin/sh
case "$2" in
  *version_info\\ \\<*) exit 0 ;;
  *ensurepip*) exit {ensurepip} ;;
  *-venv*) echo python3.11-venv ;;
  *-dev*) echo python3.11-dev ;;
  *include*) echo {include}/Python.h ;;
esac
[ "$2" = venv ] && mkdir -p "$3/bin" && cp "$0" "$3/bin/python"
exit 0
"""


class Machine:
    """A folder of programs that is all of PATH, and a checkout with nothing but what setup.sh reads."""

    def __init__(self, folder: Path) -> None:
        self.programs, self.checkout, self.include = folder / "bin", folder / "checkout", folder / "include"
        for made in self.programs, self.checkout / "deploy", self.include:
            made.mkdir(parents=True)
        for name in USUAL:
            (self.programs / name).symlink_to(str(shutil.which(name)))
        for name in "setup.sh", "apt-packages.txt":
            shutil.copy(DEPLOY / name, self.checkout / "deploy")
        for name in "pyproject.toml", "constraints.txt":
            (self.checkout / name).write_text("")
        (self.include / "Python.h").touch()
        self.python()

    def add(self, name: str, script: str = "#!/bin/sh\n") -> None:
        """A program."""
        (self.programs / name).write_text(script)
        (self.programs / name).chmod(0o755)

    def python(self, ensurepip: bool = True) -> None:
        """A python3 that answers what is asked of it."""
        self.add("python3", PYTHON.format(ensurepip=int(not ensurepip), include=self.include))

    def setup(self, **env: str) -> subprocess.CompletedProcess[str]:
        """Run setup.sh."""
        return subprocess.run(
            [str(shutil.which("bash")), "deploy/setup.sh"], cwd=self.checkout, capture_output=True, text=True, check=False,
            env={"PATH": str(self.programs), **env},
        )  # fmt: skip


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    made = Machine(tmp_path)
    made.add("id", "#!/bin/sh\necho 1000\n")
    return made


def test_what_is_missing_is_named_once_with_what_is_not_run_for_it(machine: Machine) -> None:
    result = machine.setup()
    assert result.returncode == 0, result.stderr
    command = next(line for line in result.stdout.splitlines() if "apt-get install" in line)
    assert command.split().count("prometheus") == 1
    assert "python3.11-dev" not in command
    assert "promtool: alert rules" in result.stdout
    assert "prometheus: a test scrapes" in result.stdout


def test_the_header_is_asked_for_only_where_it_is_missing(machine: Machine) -> None:
    (machine.include / "Python.h").unlink()
    machine.add("g++")
    result = machine.setup()
    assert result.returncode == 0, result.stderr
    assert "python3.11-dev" in result.stdout
    assert "Python.h: compiling DeepSpeed's operators" in result.stdout
    assert "DeepSpeed's operators are not built" in result.stdout


def test_root_without_a_mirror_goes_on_outside_ci(machine: Machine) -> None:
    machine.add("id", "#!/bin/sh\necho 0\n")
    machine.add("apt-get", "#!/bin/sh\nexit 100\n")
    result = machine.setup()
    assert result.returncode == 0, result.stdout + result.stderr
    for part in (
        "apt-get could not install them",
        "sudo apt-get install",
        "without them this is not run",
        "redis-server: sessions",
    ):
        assert part in result.stdout
    assert machine.setup(CI="1").returncode == 1


def test_a_python_without_ensurepip_is_called_that(machine: Machine) -> None:
    machine.python(ensurepip=False)
    result = machine.setup()
    assert result.returncode == 1
    assert "python3.11-venv" in result.stdout
    assert "ensurepip is missing" in result.stdout
    assert "needs Python 3.11 or newer" not in result.stdout


def test_a_machine_without_python_is_told_which_it_needs(machine: Machine) -> None:
    (machine.programs / "python3").unlink()
    result = machine.setup()
    assert result.returncode == 1
    assert "needs Python 3.11 or newer" in result.stdout
