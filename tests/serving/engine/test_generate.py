"""`pmi generate`: one text over many calls and processes, long files, mistakes."""

import hashlib
import os
import signal
import subprocess
import sys
import time
import uuid
from array import array
from pathlib import Path

import pytest

from lm.commands import run
from lm.model.pretrained import save_pretrained
from serving.cli import app
from serving.sessions.opening import open_store
from serving.sessions.store import LOCAL, Change, Response
from tests.serving.engine.conftest import SEGMENT, checkpoint, greedy


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    found = checkpoint()
    save_pretrained(found.model, found.tokenizer, tmp_path / "model")
    monkeypatch.setenv("PMI_STORE", f"sqlite:///{tmp_path / 'sessions.db'}")
    return tmp_path


def generate(folder: Path, *args: str) -> int:
    return run(app, ["generate", "--checkpoint", str(folder / "model"), *args])


def history(folder: Path, name: str) -> tuple[int, int]:
    store = open_store()
    session = store.get(LOCAL, name)
    store.close()
    return session.position, len(session.tail)


def test_a_session_goes_on_in_another_process_as_one_long_call_would(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    settings, tokenizer = ["--temperature", "0", "--prompt", "Ahab"], checkpoint().tokenizer
    ids = greedy(checkpoint(), tokenizer.encode("Ahab"), 40)[0]
    # not inside a character: its half would be shown by the first call and completed by the second
    cut = next(n for n in range(8, 40) if ids[n - 1] < 128)
    assert generate(folder, *settings, "--tokens", "40") == 0
    whole = capfd.readouterr().out
    assert generate(folder, *settings, "--tokens", str(cut), "--session", "ada") == 0
    first = capfd.readouterr()
    command = [sys.executable, "-m", "serving.cli", "generate", "--checkpoint", str(folder / "model"), "--session", "ada"]
    second = subprocess.run([*command, "--tokens", str(40 - cut)], capture_output=True, text=True, check=True, env={**os.environ})
    assert first.out.removesuffix("\n") + second.stdout == whole
    assert "45 tokens" in second.stderr  # BOS, the prompt and 40
    assert f"{(5 + cut) % SEGMENT or SEGMENT} tokens replayed" in second.stderr
    assert history(folder, "ada") == (45, 45 % SEGMENT or SEGMENT)


def test_the_first_calls_settings_are_the_sessions_defaults(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert generate(folder, "--temperature", "0", "--seed", "5", "--tokens", "3", "--session", "s") == 0
    assert "seed 5" in capfd.readouterr().err
    assert generate(folder, "--tokens", "20", "--session", "s") == 0
    drawn = capfd.readouterr()
    assert "seed 5" in drawn.err
    assert generate(folder, "--temperature", "0", "--tokens", "23") == 0
    assert capfd.readouterr().out.endswith(drawn.out)


def test_a_session_keeps_its_history_where_asked_at_its_beginning(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert generate(folder, "--prompt", "Ahab", "--tokens", "9", "--temperature", "0", "--session", "s", "--keep-history") == 0
    assert generate(folder, "--tokens", "20", "--session", "s", "--keep-history") == 0
    store = open_store()
    ids = [256, *b"Ahab"]
    assert list(store.history(LOCAL, "s")) == [*ids, *greedy(checkpoint(), ids[1:], 29)[0]]
    store.close()
    assert generate(folder, "--tokens", "1", "--session", "t") == 0
    assert generate(folder, "--tokens", "1", "--session", "t", "--keep-history") == 2
    assert "only a new session" in capfd.readouterr().err


def test_stop_strings_end_the_text(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert generate(folder, "--temperature", "0", "--tokens", "60") == 0
    whole = capfd.readouterr().out
    stop = whole[10:12]
    assert generate(folder, "--temperature", "0", "--tokens", "60", "--stop", stop, "--stop", "never") == 0
    assert capfd.readouterr().out == whole[: whole.find(stop)] + "\n"


def test_a_file_is_read_into_a_session_and_a_killed_reading_goes_on(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    book = folder / "book.txt"
    book.write_text("Call me Ishmael. " * 500)
    size = len(book.read_bytes())
    command = [sys.executable, "-m", "serving.cli", "generate", "--checkpoint", str(folder / "model"), "--session", "b"]
    with subprocess.Popen([*command, "--file", str(book), "--tokens", "0"], stderr=subprocess.DEVNULL) as process:
        give_up = time.monotonic() + 240
        while time.monotonic() < give_up and process.poll() is None:
            try:
                if history(folder, "b")[0] > 0:
                    break
            except Exception:
                time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
    before, tail = history(folder, "b")
    assert 0 < before < size
    assert tail == 1
    time.sleep(4.2)  # the killed process's lease
    assert generate(folder, "--session", "b", "--file", str(book), "--tokens", "2", "--temperature", "0") == 0
    assert f"behind the {before - 1:,} tokens" in capfd.readouterr().err
    assert history(folder, "b")[0] == 1 + size + 2


def test_a_reading_that_another_turn_has_followed_begins_anew_and_a_second_one_is_resumable_too(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ids = list(range(60, 100)) * 20
    (folder / "book.txt").write_text("".join(map(chr, ids)))

    def read_halfway() -> None:
        """As a reading that was killed leaves it: some ids in a turn of its own, its response still running."""
        store = open_store()
        session = store.get(LOCAL, "b")
        digest = hashlib.sha256(array("q", ids).tobytes()).hexdigest()
        store.begin(Response(LOCAL, uuid.uuid4().hex, "b", None, digest, {}, session.position))
        lease = store.lease(LOCAL, "b", "killed", 1)
        first = [256] if session.position == 0 else []
        store.commit([Change(lease, session.position, [*first, *ids[:5]], turn=True)])
        store.release([lease])
        store.close()

    file = ["--session", "b", "--keep-history", "--file", str(folder / "book.txt"), "--tokens", "0"]
    assert generate(folder, "--session", "b", "--keep-history", "--tokens", "1", "--prompt", "x", "--temperature", "0") == 0
    start = history(folder, "b")[0]
    for round_ in (1, 2):
        read_halfway()
        assert generate(folder, *file) == 0
        assert "behind the 5 tokens" in capfd.readouterr().err
        assert history(folder, "b")[0] == start + round_ * len(ids)
    read_halfway()
    assert generate(folder, "--session", "b", "--prompt", "yz", "--tokens", "1", "--temperature", "0") == 0
    assert generate(folder, *file) == 0
    assert "tokens that were read before" not in capfd.readouterr().err
    store = open_store()
    assert list(store.history(LOCAL, "b"))[-len(ids) :] == ids
    store.close()


def test_every_mistake_is_named_at_once(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "bad.txt").write_bytes(b"ok \xff")
    wrong = ["--tokens", "0", "--top-p", "0", "--device", "gpu", "--keep-history"]
    assert generate(folder, "--file", str(folder / "bad.txt"), *wrong) == 2
    error = capfd.readouterr().err
    for part in ("UTF-8", "byte 3", "--tokens 0", "--session", "--top-p: 0", "'gpu'", "--keep-history"):
        assert part in error
    assert generate(folder, "--file", str(folder / "none.txt"), "--session", "a b", "--store", "nowhere") == 2
    error = capfd.readouterr().err
    assert "none.txt" in error
    assert "'nowhere'" in error
    assert generate(folder, "--session", "a b") == 2
    assert "'a b'" in capfd.readouterr().err
    assert "Traceback" not in error
