"""What set-up promises: compiled operators in place, bfloat16 that does not trap, an allocator that keeps its pages."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lm import machine

ROOT = Path(__file__).parent.parent


def python(script: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env={**os.environ, **env}, check=False, cwd=ROOT
    )


@pytest.mark.needs("g++")
@pytest.mark.parametrize("operator", ["deepspeed_shm_comm", "cpu_adam"])
def test_deepspeeds_operators_were_built_at_set_up(operator: str) -> None:
    assert machine.extension_built(operator), f"run deploy/setup.sh: {operator} is not in {machine.extensions_folder()}"


def test_extensions_are_built_by_the_environments_own_ninja_whatever_the_path() -> None:
    script = "import shutil; from lm import machine; machine.extensions_folder(); print(shutil.which('ninja'))"
    result = python(script, PATH="/usr/bin:/bin")
    assert result.stdout.strip() == str(Path(sys.prefix) / "bin" / "ninja"), result.stderr


def test_a_lock_that_a_killed_compilation_left_is_found_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    (tmp_path / "op").mkdir()
    (tmp_path / "op" / "op.so").touch()
    (tmp_path / "op" / "lock").touch()
    assert not machine.extension_built("op")
    assert machine.remove_extension_locks() == [tmp_path / "op" / "lock"]
    assert machine.extension_built("op")


def test_bfloat16_products_work_once_lm_is_imported() -> None:
    result = python("import lm, torch; a = torch.ones(64, 64).bfloat16(); print(float((a @ a)[0, 0]))")
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "64.0"


def test_freed_pages_are_kept_so_that_large_tensors_do_not_fault_again() -> None:
    script = (
        "import resource, torch; from lm import machine; kept = machine.keep_pages()\n"
        "faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "for _ in range(16): x = torch.ones(16 * 2**20); del x\n"
        "before = faults()\n"
        "for _ in range(5): x = torch.ones(16 * 2**20); del x\n"
        "print(kept, faults() - before)"
    )
    kept, faults = python(script).stdout.split()
    if kept == "False":
        pytest.skip("this C library has no mallopt")
    assert int(faults) < 5 * 16 * 4 * 2**20 / 4096 / 10  # a tenth of what mapping anew each time would cost
