"""The architecture in one place: who may import whom, and what the repository must not name."""

import ast
import os
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def test_lm_never_imports_serving() -> None:
    for path in (ROOT / "lm").rglob("*.py"):
        assert not [name for name in imports(path) if name.split(".")[0] == "serving"], path


def test_model_files_never_mention_deepspeed_or_ray() -> None:
    for path in (ROOT / "lm" / "model").rglob("*.py"):
        assert not imports(path) & {"deepspeed", "ray"}, path
        assert "deepspeed" not in path.read_text().lower(), path


def test_the_model_imports_nothing_that_is_built_on_it() -> None:
    for path in (ROOT / "lm" / "model").rglob("*.py"):
        for name in imports(path):
            assert not name.startswith(("lm.training", "lm.evaluation", "lm.generation", "lm.reasoning")), path


def test_the_wheel_ships_configs_and_the_bundled_text(tmp_path: Path) -> None:
    build = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert build.returncode == 0, build.stderr
    names = zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist()
    assert "lm/configs/model/small.yaml" in names
    assert "lm/data/text/moby-dick.txt" in names
    assert not [name for name in names if name.startswith(("tests/", "configs/"))]


def test_tests_of_real_data_are_named_where_it_is_missing(tmp_path: Path) -> None:
    """In a process of its own, for the folder is read when the tests are collected."""
    test = "tests/reasoning/test_tasks.py::test_the_real_babi_says_that_task_3_is_the_small_version"
    result = subprocess.run(
        [sys.executable, "-m", "pytest", test, "-p", "no:cacheprovider"], cwd=ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, "PMI_TEST_DATA": str(tmp_path / "none")},
    )  # fmt: skip
    assert "1 skipped" in result.stdout, result.stdout
    assert "NOT RUN" in result.stdout
    assert f"{test} (needs the real data sets" in result.stdout
