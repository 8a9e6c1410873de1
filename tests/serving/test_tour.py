"""What `make run` ends with: a service of its own, two turns of one session over HTTP."""

import subprocess
import sys
from pathlib import Path

import pytest

from lm.data.tokenizer import ByteTokenizer
from lm.model.pretrained import save_pretrained
from tests.serving.engine.conftest import checkpoint


def tour(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "serving.cli", "tour", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, errors="replace")


@pytest.mark.timeout(400)
def test_the_tour_streams_two_turns_of_a_session_that_stays_on_disk(tmp_path: Path) -> None:
    save_pretrained(checkpoint().model, ByteTokenizer(), tmp_path / "model")
    done = tour("--checkpoint", tmp_path / "model", "--store", tmp_path / "sessions.db", "--tokens", 10)
    assert done.returncode == 0, done.stderr
    position = len("The whale And then the captain") + 20 + 1  # two turns, two answers, BOS
    assert f"at position {position}, on disk" in done.stdout
    assert (tmp_path / "sessions.db").stat().st_size


def test_a_tour_without_a_model_says_what_is_missing(tmp_path: Path) -> None:
    done = tour("--checkpoint", tmp_path / "nowhere", "--store", tmp_path / "sessions.db")
    assert done.returncode == 2
    assert "no config.json there" in done.stderr
    assert "Traceback" not in done.stderr
