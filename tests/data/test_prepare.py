"""`pmi data prepare`, as a user runs it: what comes out of each kind of source, and what is left alone."""

import gzip
import hashlib
import os
from pathlib import Path

import numpy as np
import pytest
from made_data import whole_text, write

from lm.data import originals, shards, sources
from lm.data.originals import Original, Sum
from lm.data.prepared import open_prepared
from lm.errors import UserError
from tests.conftest import Pmi


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
    "wiki.train.tokens": " \n = One = \n \n the cat sat . \n \n = = Part = = \n \n the mat . \n \n = Two = \n \n the dog . \n",
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
        whole_text(tmp_path / "parts", "train") == whole_text(tmp_path / "whole", "train") == WIKI["wiki.train.tokens"].encode()
    )
    assert whole_text(tmp_path / "whole", "test") == b" \n = <unk> = \n \n the <unk> . \n"
    assert whole.manifest.splits["test"].unknown == 2
    assert whole.manifest.splits["train"].tokens == len(WIKI["wiki.train.tokens"].split()) + 12
    assert whole.manifest.partial


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    """A data set whose original is known: ten bytes."""
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
def test_a_fetched_original_that_is_damaged_is_removed(pmi: Pmi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {"fetched": "012345678X"})
    original = originals.ORIGINALS["known"]
    object.__setattr__(original, "fetch", lambda folder: tmp_path / "fetched")
    code, _, stderr = pmi("data", "prepare", "known", "--out", tmp_path / "out")
    assert code == 2
    assert "damaged" in stderr
    assert not (tmp_path / "fetched").exists()


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


def test_shards_of_an_earlier_attempt_are_removed(pmi: Pmi, books: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_tokenizer_is_taken_from_a_folder_and_then_needs_no_train_split(pmi: Pmi, books: Path, tmp_path: Path) -> None:
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


def test_names_may_be_strange(pmi: Pmi, tmp_path: Path) -> None:
    names = ["train/a\rb.txt", "train/c\nd.txt", "train/naïve 戦.txt", "train/[red]e.txt", os.fsdecode(b"train/caf\xe9.txt")]
    write(tmp_path / "source", dict.fromkeys(names, "text\n"))
    source, out = tmp_path / "source", tmp_path / "out"
    assert pmi("data", "prepare", "text", "--source", source, "--out", out, "--tokenizer", "bytes")[0] == 0
    found = [document.name for document in open_prepared(out).documents("train")]
    assert found == ["train/[red]e.txt", "train/a\ufffdb.txt", "train/c\ufffdd.txt", "train/caf\ufffd.txt", "train/naïve 戦.txt"]
    code, stdout, _ = pmi("data", "inspect", out)
    assert code == 0
    assert "[red]e.txt" in stdout
