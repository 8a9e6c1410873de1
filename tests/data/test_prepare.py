"""`pmi data prepare` and `inspect`, as a user runs them: what comes out, what is kept, and what each mistake says."""

import gzip
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from lm.data import originals, shards
from lm.data.originals import Original, Sum
from lm.data.prepared import open_prepared
from lm.errors import UserError

Pmi = Callable[..., tuple[int, str, str]]
REPOSITORY = Path(__file__).parents[2]


def write(folder: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def whole_text(folder: Path, split: str) -> bytes:
    data = open_prepared(folder)
    return b"".join(data.tokenizer.decode_bytes(document.tokens().tolist()) for document in data.documents(split))


@pytest.fixture
def books(tmp_path: Path, moby_dick: str) -> Path:
    """A source with named splits: 12 documents for training, 2 and 1 held out."""
    parts = [moby_dick[i * 10_000 : (i + 1) * 10_000] for i in range(15)]
    names = [*(f"train/{i}.txt" for i in range(12)), "validation/a.txt", "validation/b.txt", "test/c.txt"]
    return write(tmp_path / "books", dict(zip(names, parts, strict=True)))


@pytest.mark.parametrize("tokenizer", ["bytes", "words", "pieces"])
def test_own_text_goes_to_the_splits_its_folders_name(pmi: Pmi, books: Path, tmp_path: Path, tokenizer: str) -> None:
    out = tmp_path / "out"
    options = ["--tokenizer", tokenizer, "--vocab-size", 800, "--processes", 1]
    code, stdout, _ = pmi("data", "prepare", "text", "--source", books, "--out", out, *options)
    assert code == 0
    assert "train" in stdout
    data = open_prepared(out, verify=True)
    assert {name: split.documents for name, split in data.manifest.splits.items()} == {
        "train": 12,
        "validation": 2,
        "test": 1,
    }
    assert not (out / ".work").exists()
    for split in data.manifest.splits:
        for document in data.documents(split):
            text = (books / document.name).read_bytes()
            assert document.bytes == len(text)
            assert document.words == len(text.split())
            if data.tokenizer.lossless:
                assert data.tokenizer.decode_bytes(document.tokens().tolist()) == text
            else:
                assert document.tokens().tolist() == data.tokenizer.encode(text.decode())
    assert data.manifest.partial is False


def test_a_text_without_split_folders_is_held_out_at_its_end_by_lines(pmi: Pmi, tmp_path: Path, moby_dick: str) -> None:
    source = write(tmp_path, {"whale.txt": moby_dick})
    code, _, _ = pmi(
        "data", "prepare", "text", "--source", source / "whale.txt", "--out", tmp_path / "out", "--tokenizer", "bytes"
    )
    assert code == 0
    parts = [whole_text(tmp_path / "out", split) for split in ("train", "validation", "test")]
    assert b"".join(parts) == moby_dick.encode()
    assert all(part.endswith(b"\n") for part in parts[:2])
    assert [round(len(part) / len(moby_dick.encode()), 2) for part in parts] == [0.9, 0.05, 0.05]


def test_enwik8_is_cut_at_the_byte_and_another_text_is_marked_partial(pmi: Pmi, tmp_path: Path) -> None:
    content = bytes(np.random.default_rng(0).integers(0, 256, 100_000, dtype=np.uint8))
    (tmp_path / "enwik8.gz").write_bytes(gzip.compress(content))
    code, stdout, _ = pmi("data", "prepare", "enwik8", "--source", tmp_path, "--out", tmp_path / "out")
    assert code == 0
    assert whole_text(tmp_path / "out", "train") == content[:90_000]
    assert whole_text(tmp_path / "out", "validation") == content[90_000:95_000]
    assert whole_text(tmp_path / "out", "test") == content[95_000:]
    manifest = open_prepared(tmp_path / "out").manifest
    assert manifest.partial
    assert manifest.differences == ["all: 100,000 bytes, the original has 100,000,000"]
    assert "partial, figures are not comparable" in stdout


WIKI = {
    "wiki.train.tokens": " \n = One = \n \n the cat sat . \n \n = = Part = = \n \n the mat . \n"
    " \n = Two = \n \n the dog . \n",
    "wiki.valid.tokens": " \n = Three = \n \n the cat <unk> . \n",
    "wiki.test.tokens": " \n = Four = \n \n the zebra . \n",
}


def test_wikitext_has_one_document_per_split_or_per_article(pmi: Pmi, tmp_path: Path) -> None:
    source = write(tmp_path / "wiki", WIKI)
    assert pmi("data", "prepare", "wikitext2", "--source", source, "--out", tmp_path / "whole")[0] == 0
    assert pmi("data", "prepare", "wikitext2", "--source", source, "--out", tmp_path / "parts", "--articles")[0] == 0
    whole, parts = open_prepared(tmp_path / "whole"), open_prepared(tmp_path / "parts")
    assert [document.name for document in whole.documents("train")] == ["wiki.train.tokens"]
    assert [document.name for document in parts.documents("train")] == [
        "wiki.train.tokens: One",
        "wiki.train.tokens: Two",
    ]
    assert (
        whole_text(tmp_path / "parts", "train")
        == whole_text(tmp_path / "whole", "train")
        == WIKI["wiki.train.tokens"].encode()
    )
    assert whole_text(tmp_path / "whole", "test") == b" \n = <unk> = \n \n the <unk> . \n"
    assert whole.manifest.splits["test"].unknown == 2
    assert whole.manifest.splits["train"].tokens == len(WIKI["wiki.train.tokens"].split()) + 12
    assert whole.manifest.partial


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """A data set whose original is known: ten bytes."""
    import hashlib

    sums = {"all": Sum(10, hashlib.md5(b"0123456789").hexdigest())}
    original = Original("known", "bytes", "*", split_of=None, whole_lines=False, sums=sums)
    monkeypatch.setitem(originals.ORIGINALS, "known", original)


@pytest.mark.usefixtures("known")
def test_the_original_is_known_by_its_checksum_and_a_damaged_one_refused(pmi: Pmi, tmp_path: Path) -> None:
    write(tmp_path, {"good": "0123456789" * 1, "bad": "012345678X", "other": "0123456789" * 9})
    pmi("data", "prepare", "known", "--source", tmp_path / "good", "--split", "train", "--out", tmp_path / "1")
    assert open_prepared(tmp_path / "1").manifest.differences == ["no validation, test split"]
    code, _, stderr = pmi("data", "prepare", "known", "--source", tmp_path / "bad", "--out", tmp_path / "2")
    assert code == 2
    assert "has the original's size (10 bytes) but MD5" in stderr
    assert "get it again" in stderr
    assert not (tmp_path / "2" / "manifest.json").exists()
    pmi("data", "prepare", "known", "--source", tmp_path / "other", "--out", tmp_path / "3")
    assert open_prepared(tmp_path / "3").manifest.partial


@pytest.mark.usefixtures("known")
def test_a_fetched_original_that_is_damaged_is_removed(
    pmi: Pmi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, {"fetched": "012345678X"})
    original = originals.ORIGINALS["known"]
    object.__setattr__(original, "fetch", lambda folder: tmp_path / "fetched")
    code, _, stderr = pmi("data", "prepare", "known", "--out", tmp_path / "out")
    assert code == 2
    assert "damaged" in stderr
    assert not (tmp_path / "fetched").exists()


DRIVER = """
import sys
from lm.data import shards
shards.SHARD_BYTES = 1 << 15
from lm.cli import app, run
sys.exit(run(app, sys.argv[1:]))
"""


def start(*arguments: object) -> subprocess.Popen:
    """`pmi data prepare` with small shards, as a process of its own."""
    command = [sys.executable, "-c", DRIVER, "data", "prepare", *map(str, arguments)]
    return subprocess.Popen(
        command,
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_killed_half_way_and_run_again_it_keeps_the_finished_shards(tmp_path: Path, moby_dick: str, how: int) -> None:
    write(tmp_path / "source", {f"train/{i:03}.txt": moby_dick[i * 500 : i * 500 + 100_000] for i in range(100)})
    out = tmp_path / "out"
    arguments = ("text", "--source", tmp_path / "source", "--out", out, "--tokenizer", "words", "--processes", 2)
    process = start(*arguments)
    deadline = time.monotonic() + 60
    while len(list((out / ".work").glob("train-*.json"))) < 5:
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    workers = psutil.Process(process.pid).children(recursive=True)
    if how == signal.SIGINT:
        os.killpg(process.pid, how)  # as a terminal sends Ctrl-C: to every process of the command
    else:
        process.kill()
    output, _ = process.communicate(timeout=30)
    assert process.returncode == (-how if how == signal.SIGKILL else 130), output
    assert "Traceback" not in output
    assert how == signal.SIGKILL or "the same command goes on" in output
    _, alive = psutil.wait_procs(workers, timeout=10)
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
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert {name: (out / name).stat().st_mtime_ns for name in kept} == kept
    assert "building the word vocabulary" not in output
    data = open_prepared(out, verify=True)
    assert len(data.manifest.splits["train"].shards) > len(kept)
    words = [data.tokenizer.encode(path.read_text()) for path in sorted((tmp_path / "source/train").iterdir())]
    assert [document.tokens().tolist() for document in data.documents("train")] == words


def test_a_finished_folder_is_left_alone_and_a_different_request_refused(pmi: Pmi, books: Path, tmp_path: Path) -> None:
    base = ("data", "prepare", "text", "--source", books, "--out", tmp_path / "out", "--tokenizer")
    assert pmi(*base, "bytes")[0] == 0
    stamp = (tmp_path / "out/train-00000.bin").stat().st_mtime_ns
    code, _, stderr = pmi(*base, "bytes")
    assert code == 0
    assert "prepared already" in stderr
    code, _, stderr = pmi(*base, "words")
    assert code == 2
    assert "{'tokenizer': 'bytes'}" in stderr
    assert "--force" in stderr
    assert (tmp_path / "out/train-00000.bin").stat().st_mtime_ns == stamp
    assert pmi(*base, "words", "--force")[0] == 0
    assert open_prepared(tmp_path / "out", verify=True).tokenizer.kind == "words"


def test_force_with_a_bad_source_leaves_the_old_data_whole(pmi: Pmi, books: Path, tmp_path: Path) -> None:
    base = ("data", "prepare", "text", "--out", tmp_path / "out", "--tokenizer", "bytes", "--source")
    assert pmi(*base, books)[0] == 0
    assert pmi(*base, tmp_path / "nowhere", "--force")[0] == 2
    open_prepared(tmp_path / "out", verify=True)


def test_shards_of_an_earlier_attempt_are_removed(
    pmi: Pmi, books: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards, "SHARD_BYTES", 20_000)
    base = (
        "data",
        "prepare",
        "text",
        "--source",
        books,
        "--out",
        tmp_path / "out",
        "--tokenizer",
        "bytes",
        "--processes",
        1,
    )
    assert pmi(*base)[0] == 0
    assert len(list((tmp_path / "out").glob("train-*.bin"))) == 6
    monkeypatch.setattr(shards, "SHARD_BYTES", 60_000)
    assert pmi(*base, "--force")[0] == 0
    assert len(list((tmp_path / "out").glob("train-*.bin"))) == 2
    open_prepared(tmp_path / "out", verify=True)


def test_a_document_may_run_over_several_shards(
    pmi: Pmi, tmp_path: Path, moby_dick: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lm.data import sources

    monkeypatch.setattr(sources, "BLOCK", 10_000)
    monkeypatch.setattr(shards, "SHARD_BYTES", 20_000)
    write(tmp_path, {"train.txt": moby_dick})
    base = ("data", "prepare", "text", "--source", tmp_path / "train.txt", "--out", tmp_path / "out", "--processes", 1)
    assert pmi(*base, "--tokenizer", "bytes")[0] == 0
    data = open_prepared(tmp_path / "out")
    (document,) = data.documents("train")
    assert len(data.manifest.splits["train"].shards) > 20
    text = moby_dick.encode()
    assert document.tokens().tobytes() == text
    for start, stop in ((0, 5), (19_990, 20_500), (100, 70_000), (len(text) - 3, len(text)), (7, 7), (9, 3)):
        assert document.tokens(start, stop).tobytes() == text[start:stop]


def test_a_tokenizer_is_taken_from_a_folder_and_then_needs_no_train_split(
    pmi: Pmi, books: Path, tmp_path: Path
) -> None:
    base = ("data", "prepare", "text", "--source", books)
    assert pmi(*base, "--out", tmp_path / "1", "--vocab-size", 700, "--sample-megabytes", 1)[0] == 0
    assert pmi(*base, "--out", tmp_path / "2", "--tokenizer", tmp_path / "1", "--split", "test")[0] == 0
    one, two = open_prepared(tmp_path / "1"), open_prepared(tmp_path / "2")
    assert one.manifest.tokenizer == two.manifest.tokenizer
    assert {name: split.documents for name, split in two.manifest.splits.items()} == {"test": 15}
    with pytest.raises(UserError, match="the model needs 0123"):
        open_prepared(tmp_path / "1", tokenizer="0123")
    code, _, stderr = pmi(*base, "--out", tmp_path / "3", "--split", "test")
    assert code == 2
    assert "there is no train split to learn it from; give --tokenizer FOLDER" in stderr


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
        "type 'char' is unknown; allowed: unigram, bpe",
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


def test_names_may_be_strange(pmi: Pmi, tmp_path: Path) -> None:
    names = ["train/a\rb.txt", "train/c\nd.txt", "train/naïve 戦.txt", "train/[red]e.txt"]
    write(tmp_path / "source", dict.fromkeys(names, "text\n"))
    source, out = tmp_path / "source", tmp_path / "out"
    assert pmi("data", "prepare", "text", "--source", source, "--out", out, "--tokenizer", "bytes")[0] == 0
    found = [document.name for document in open_prepared(out).documents("train")]
    assert found == sorted(name.replace("\n", " ") for name in names)
    code, stdout, _ = pmi("data", "inspect", out)
    assert code == 0
    assert "[red]e.txt" in stdout


def test_two_runs_into_one_folder_do_not_mix(pmi: Pmi, books: Path, tmp_path: Path) -> None:
    import fcntl

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


@pytest.mark.parametrize(("copies", "while_"), [(5, "Generating"), (2, "Tokenizing")])
def test_a_full_disk_is_a_message_and_room_lets_it_go_on(
    small_disk: Path, tmp_path: Path, moby_dick: str, copies: int, while_: str
) -> None:
    """Five copies of the text do not fit even when staged; two do, but not their shards beside them."""
    write(tmp_path, {"train.txt": moby_dick * copies})
    out = small_disk / "out"
    arguments = ("text", "--source", tmp_path / "train.txt", "--tokenizer", "bytes", "--out", out)
    process = start(*arguments)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 2, output
    assert "the disk is full" in output
    assert "run the same command again: finished shards are kept" in output
    assert "Traceback" not in output
    assert while_ in output
    assert not (out / "manifest.json").exists()
    kept = {path: path.stat().st_mtime_ns for path in out.glob("train-*.bin")}

    subprocess.run(["mount", "-o", "remount,size=50m", str(small_disk)], check=True)
    process = start(*arguments)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert whole_text(out, "train") == (moby_dick * copies).encode()


def prepared(pmi: Pmi, books: Path, out: Path, tokenizer: str = "bytes") -> Path:
    assert pmi("data", "prepare", "text", "--source", books, "--out", out, "--tokenizer", tokenizer)[0] == 0
    return out


def test_every_damage_to_prepared_data_is_named(pmi: Pmi, books: Path, tmp_path: Path) -> None:
    folder = prepared(pmi, books, tmp_path / "out")
    shard, good = folder / "train-00000.bin", (folder / "train-00000.bin").read_bytes()
    shard.write_bytes(good[:-1])
    with pytest.raises(UserError, match=r"train-00000\.bin: 120,\d+ bytes, the manifest says 120,\d+; restore it"):
        open_prepared(folder)
    shard.write_bytes(good[:-1] + b"!")
    open_prepared(folder)
    code, _, stderr = pmi("data", "inspect", folder, "--verify")
    assert code == 2
    assert "checksum is not the manifest's" in stderr
    shard.unlink()
    (folder / "test.names.txt").unlink()
    with pytest.raises(UserError) as error:
        open_prepared(folder)
    assert len(error.value.problems) == 2
    shard.write_bytes(good)
    (folder / "manifest.json").write_text("{}")
    with pytest.raises(UserError, match="dataset"):
        open_prepared(folder)


def test_a_tokenizer_that_is_not_the_datas_own_is_refused(pmi: Pmi, books: Path, tmp_path: Path) -> None:
    one = prepared(pmi, books, tmp_path / "1", "words")
    two = prepared(pmi, books, tmp_path / "2", "bytes")
    shutil.copy(two / "tokenizer.json", one / "tokenizer.json")
    with pytest.raises(UserError, match="its tokens were made with"):
        open_prepared(one)


def test_inspect_shows_everything_and_draws_a_picture(pmi: Pmi, books: Path, tmp_path: Path) -> None:
    folder = prepared(pmi, books, tmp_path / "out")
    code, stdout, _ = pmi("data", "inspect", folder, "--segment", 4096, "--plot", tmp_path / "lengths.png", "--verify")
    assert code == 0
    for part in (
        "train",
        "validation",
        "test",
        "padding at T=4096: 18",
        "train/0.txt",
        "Call me Ishmael",
        "all as in the manifest",
    ):
        assert part in stdout, part
    assert (tmp_path / "lengths.png").read_bytes()[:4] == b"\x89PNG"
    code, _, stderr = pmi("data", "inspect", folder, "--plot", tmp_path / "lengths.doc")
    assert code == 2
    assert "must be one of png, pdf, svg" in stderr
    code, _, stderr = pmi("data", "inspect", tmp_path)
    assert code == 2
    assert "no prepared data" in stderr


def test_the_manifest_holds_what_is_needed_to_know_the_data(pmi: Pmi, books: Path, tmp_path: Path) -> None:
    folder = prepared(pmi, books, tmp_path / "out")
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["source"]["all"]["size"] == sum(split["bytes"] for split in manifest["splits"].values())
    assert re.fullmatch("[0-9a-f]{32}", manifest["source"]["train/0.txt"]["md5"])
    assert manifest["partial"] is False
    assert manifest["request"]["tokenizer"] == "bytes"


@pytest.mark.parametrize("command", [("--help",), ("prepare", "--help"), ("inspect", "--help")])
def test_help_is_quick_and_each_command_has_a_worked_example(pmi: Pmi, command: tuple[str, ...]) -> None:
    code, stdout, _ = pmi("data", *command)
    assert code == 0
    assert len(command) == 1 or "Example: pmi data" in stdout
    heavy = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", "import lm.cli"], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert not re.search(r"\| +(torch|datasets|sentencepiece|numpy)$", heavy.stderr, re.MULTILINE)
