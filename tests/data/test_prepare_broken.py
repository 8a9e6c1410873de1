"""`pmi data prepare` broken off: killed, interrupted, out of room; and what each mistake says."""

import fcntl
import gzip
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from made_data import DRIVER, REPOSITORY, start, whole_text, write

from lm.data.prepared import open_prepared
from lm.errors import UserError
from tests.conftest import Pmi


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_killed_half_way_and_run_again_it_keeps_the_finished_shards(tmp_path: Path, moby_dick: str, how: int) -> None:
    write(tmp_path / "source", {f"train/{i:03}.txt": moby_dick[i * 500 : i * 500 + 100_000] for i in range(100)})
    out = tmp_path / "out"
    arguments = ("text", "--source", tmp_path / "source", "--out", out, "--tokenizer", "words", "--processes", 2)
    process = start(*arguments)
    deadline = time.monotonic() + 300
    while len(list((out / ".work").glob("train-*.json"))) < 5:
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    workers = psutil.Process(process.pid).children(recursive=True)
    if how == signal.SIGINT:
        os.killpg(process.pid, how)  # as a terminal sends Ctrl-C: to every process of the command
    else:
        process.kill()
    output, _ = process.communicate(timeout=300)
    assert process.returncode == (-how if how == signal.SIGKILL else 130), output
    assert "Traceback" not in output
    assert how == signal.SIGKILL or "the same command goes on" in output
    _, alive = psutil.wait_procs(workers, timeout=60)
    assert not alive, "workers outlive the command"

    assert not (out / "manifest.json").exists()
    with pytest.raises(UserError, match="prepared data that is not whole"):
        open_prepared(out)
    kept = {
        path.name.removesuffix(".json"): (out / path.name.removesuffix(".json")).stat().st_mtime_ns
        for path in (out / ".work").glob("train-*.json")
    }
    assert 5 <= len(kept) < 300

    process = start(*arguments)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert {name: (out / name).stat().st_mtime_ns for name in kept} == kept
    assert "building the word vocabulary" not in output
    data = open_prepared(out, verify=True)
    assert len(data.manifest.splits["train"].shards) > len(kept)
    words = [data.tokenizer.encode(path.read_text()) for path in sorted((tmp_path / "source/train").iterdir())]
    assert [document.tokens().tolist() for document in data.documents("train")] == words


def test_two_runs_into_one_folder_do_not_mix(pmi: Pmi, books: Path, tmp_path: Path) -> None:
    (tmp_path / "out/.work").mkdir(parents=True)
    with (tmp_path / "out/.work/lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        code, _, stderr = pmi("data", "prepare", "text", "--source", books, "--out", tmp_path / "out")
    assert code == 2
    assert "another `pmi data prepare` is writing there" in stderr


LIMITED = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, 600_000))\n" + DRIVER


def test_a_file_that_may_not_grow_is_a_message_and_room_lets_it_go_on(tmp_path: Path, moby_dick: str) -> None:
    write(tmp_path, {"train.txt": moby_dick})
    arguments = [
        "data",
        "prepare",
        "text",
        "--source",
        tmp_path / "train.txt",
        "--tokenizer",
        "bytes",
        "--out",
        tmp_path / "out",
    ]
    command = [sys.executable, "-c", LIMITED, *map(str, arguments)]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert result.returncode == 2, result.stderr
    assert "the disk is full or a file may not grow" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "out/manifest.json").exists()
    command[2] = DRIVER
    assert subprocess.run(command, cwd=REPOSITORY, capture_output=True).returncode == 0
    assert whole_text(tmp_path / "out", "train") == moby_dick.encode()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MB; skipped where none may be mounted."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = shutil.which("mount") and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)], capture_output=True
    )
    if not mounted or mounted.returncode:
        pytest.skip("a small file system can be mounted only by root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize(("copies", "last"), [(5, "reading"), (2, "tokenizing")])
def test_a_full_disk_is_a_message_and_room_lets_it_go_on(
    small_disk: Path, tmp_path: Path, moby_dick: str, copies: int, last: str
) -> None:
    """Five copies of the text do not fit even when staged; two do, but not their shards beside them."""
    write(tmp_path, {"train.txt": moby_dick * copies})
    out = small_disk / "out"
    arguments = ("text", "--source", tmp_path / "train.txt", "--tokenizer", "bytes", "--out", out)
    process = start(*arguments)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 2, output
    assert "the disk is full" in output
    assert "run the same command again: finished shards are kept" in output
    assert "Traceback" not in output
    assert output[: output.index("error:")].splitlines()[-1].startswith(last)
    assert not (out / "manifest.json").exists()
    kept = {path: path.stat().st_mtime_ns for path in out.glob("train-*.bin")}

    subprocess.run(["mount", "-o", "remount,size=50m", str(small_disk)], check=True)
    process = start(*arguments)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert whole_text(out, "train") == (moby_dick * copies).encode()


MISTAKES: dict[str, tuple[dict[str, str | bytes], list[str], str]] = {
    "unknown data set": ({"a.txt": "x"}, ["enwik9"], "'enwik9' is unknown; allowed: enwik8, wikitext103"),
    "no source": ({}, ["text", "--source", "nowhere"], "nowhere: there is no such file or folder"),
    "no such pattern": ({"a.md": "x\n"}, ["text"], "no file in it fits '*.txt'"),
    "twice": ({"enwik8": "x\n", "enwik8.gz": gzip.compress(b"x\n")}, ["enwik8"], "'enwik8' is in the source twice"),
    "latin 1": ({"train/a.txt": "café\n".encode("latin1")}, ["text"], "byte 3 (0xe9) is not UTF-8"),
    "empty split": (
        {"train/a.txt": "x\n", "test/b.txt": ""},
        ["text"],
        "the split 'test' is empty ('test/b.txt' has no text)",
    ),
    "no text": ({"a.txt": ""}, ["text"], "the split 'train' is empty"),
    "missing split": (
        {"wiki.train.tokens": " a \n"},
        ["wikitext2"],
        "the split 'validation' is empty; found: train (1",
    ),
    "no split": ({"train/a.txt": "x\n", "b.txt": "y\n"}, ["text"], "'b.txt' (1 such) belongs to no split"),
    "too small": ({"a.txt": "one line\n"}, ["text"], "the split 'validation' is empty"),
    "tokenizer": (
        {"a.txt": "x\n"},
        ["text", "--tokenizer", "runes"],
        "neither one of bytes, pieces, words nor a folder",
    ),
    "split name": (
        {"a.txt": "x\n"},
        ["text", "--split", "val"],
        "'val': unknown; allowed: train, validation, test, dev",
    ),
    "holdout": ({"a.txt": "x\n"}, ["text", "--holdout", "0.5"], "--holdout 0.5: must be at least 0 and below 0.5"),
    "holdout enwik8": ({"enwik8": "x\n"}, ["enwik8", "--holdout", "0.1"], "only for text"),
    "pieces of enwik8": (
        {"enwik8": "x\n" * 99},
        ["enwik8", "--tokenizer", "pieces"],
        "enwik8 is cut inside characters",
    ),
    "articles": ({"a.txt": "x\n"}, ["text", "--articles"], "--articles: only for wikitext103 and wikitext2"),
    "processes": ({"a.txt": "x\n"}, ["text", "--processes", "0"], "--processes 0: must be at least 1"),
    "vocabulary": (
        {"train/a.txt": "a small text\n" * 9},
        ["text"],
        "--vocab-size 32000: the training split is too small",
    ),
    "model type": (
        {"train/a.txt": "x\n"},
        ["text", "--model-type", "char"],
        "--model-type 'char': unknown; allowed: unigram, bpe",
    ),
    "truncated": (
        {"enwik8.gz": gzip.compress(os.urandom(99_999))[:50_000]},
        ["enwik8"],
        "enwik8.gz: cut short or damaged",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_each_mistake_is_a_message_and_leaves_nothing_that_looks_whole(pmi: Pmi, tmp_path: Path, name: str) -> None:
    files, arguments, message = MISTAKES[name]
    source = write(tmp_path / "source", files)
    source.mkdir(exist_ok=True)
    if "--source" not in arguments:
        arguments = [*arguments, "--source", str(source)]
    code, _, stderr = pmi("data", "prepare", *arguments, "--out", tmp_path / "out")
    assert code == 2
    assert message in stderr
    assert "Traceback" not in stderr
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_your_own_text_needs_a_source(pmi: Pmi, tmp_path: Path) -> None:
    code, _, stderr = pmi("data", "prepare", "text", "--out", tmp_path / "out")
    assert code == 2
    assert "text: needs --source" in stderr


def test_a_folder_with_other_files_is_not_written_into(pmi: Pmi, books: Path, tmp_path: Path) -> None:
    write(tmp_path / "mine", {"letter.txt": "dear"})
    code, _, stderr = pmi("data", "prepare", "text", "--source", books, "--out", tmp_path / "mine")
    assert code == 2
    assert "holds other files; name an empty or new folder" in stderr
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["letter.txt"]


def test_a_place_where_nothing_can_be_written_is_named(pmi: Pmi, books: Path, tmp_path: Path) -> None:
    write(tmp_path, {"file": "x"})
    code, _, stderr = pmi("data", "prepare", "text", "--source", books, "--out", tmp_path / "file" / "out")
    assert code == 2
    assert "Not a directory" in stderr


def test_all_mistakes_in_the_flags_are_told_at_once_and_before_anything_is_read(pmi: Pmi, tmp_path: Path) -> None:
    write(tmp_path, {"file": "x"})
    flags = {
        "--source": tmp_path / "nowhere",
        "--out": tmp_path / "file",
        "--tokenizer": tmp_path,
        "--model-type": "char",
        "--split": "val",
        "--holdout": 2,
        "--vocab-size": 0,
        "--sample-megabytes": -1,
        "--processes": 0,
    }
    code, _, stderr = pmi("data", "prepare", "enwik9", "--articles", *(part for item in flags.items() for part in item))
    assert code == 2
    assert "data set 'enwik9' is unknown; allowed: enwik8" in stderr
    for flag in ("--articles", *flags):
        assert f"error: {flag}" in stderr, flag
    assert len(stderr.splitlines()) == len(flags) + 2


def test_a_name_too_long_and_a_vocabulary_too_large_for_a_number_are_messages(pmi: Pmi, books: Path, tmp_path: Path) -> None:
    code, _, stderr = pmi("data", "prepare", "text", "--source", books, "--out", tmp_path / ("x" * 300))
    assert code == 2
    assert "File name too long" in stderr
    base = ("data", "prepare", "text", "--source", books, "--out", tmp_path / "out", "--vocab-size")
    assert pmi(*base, 10**12)[0] == 2
    code, _, stderr = pmi(*base, 260)
    assert code == 2
    assert re.search(r"--vocab-size 260: too few pieces .* at least \d+ here", stderr)
    assert not list((tmp_path / "out/.work").glob("staged*")), "the staged text is left behind"


def test_a_worker_that_is_killed_is_a_message(tmp_path: Path, moby_dick: str) -> None:
    write(tmp_path / "source", {f"train/{i:03}.txt": moby_dick for i in range(30)})
    process = start("text", "--source", tmp_path / "source", "--out", tmp_path / "out", "--tokenizer", "words", "--processes", 2)
    deadline = time.monotonic() + 300
    while not list((tmp_path / "out/.work").glob("train-*.json")):
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    psutil.Process(process.pid).children()[0].kill()  # the first of the pool; the last is the server of its queue
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 2, output
    assert "was killed, most often for want of memory; run the same command again with fewer --processes" in output
    assert "Traceback" not in output


def test_force_removes_no_file_but_its_own(pmi: Pmi, books: Path, tmp_path: Path) -> None:
    base = ("data", "prepare", "text", "--source", books, "--out", tmp_path / "out", "--tokenizer", "bytes")
    assert pmi(*base)[0] == 0
    write(tmp_path / "out", {"test.txt": "a note", "train-plan.bin": "another"})
    assert pmi(*base, "--split", "train", "--force")[0] == 0
    left = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"test.txt", "train-plan.bin"} <= left
    assert not {"test.index.npy", "test.names.txt", "test-00000.bin"} & left
