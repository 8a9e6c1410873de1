"""The real data sets, where they are at hand: the counts and checksums the literature knows them by.

PMI_TEST_DATA=DIR python -m pytest tests/data/test_real_data.py
"""

import csv
import hashlib
import tarfile
from pathlib import Path

import pytest

from lm.data.lanes import Lanes
from lm.data.prepared import open_prepared
from tests.conftest import Pmi

pytestmark = pytest.mark.full


def test_enwik8_is_the_original_in_90_5_and_5_million_bytes(pmi: Pmi, real_data: Path, tmp_path: Path) -> None:
    assert pmi("data", "prepare", "enwik8", "--source", real_data / "enwik8", "--out", tmp_path / "out")[0] == 0
    data = open_prepared(tmp_path / "out", verify=True)
    splits = data.manifest.splits
    assert [splits[name].tokens for name in ("train", "validation", "test")] == [90_000_000, 5_000_000, 5_000_000]
    assert [splits[name].documents for name in splits] == [1, 1, 1]
    digest = hashlib.md5()
    for name in ("train", "validation", "test"):
        for document in data.documents(name):
            digest.update(document.tokens().tobytes())
    assert digest.hexdigest() == "a1fa5ffddb56f4953e226637dabbb36a"
    assert not data.manifest.partial
    lanes = Lanes(data, "train", lanes=16, segment=512)
    first = lanes.next_batch()
    assert first.starts.all()
    for lane in range(16):
        part = 512 * (-(-90_000_000 // 512) * lane // 16)
        assert bytes(first.targets[lane].tolist()) == data.split("train").read(part, part + 512).tobytes()


def test_wikitext2_has_the_known_counts(pmi: Pmi, real_data: Path, tmp_path: Path) -> None:
    source = real_data / "wikitext-2"
    assert pmi("data", "prepare", "wikitext2", "--source", source, "--out", tmp_path / "out")[0] == 0
    manifest = open_prepared(tmp_path / "out").manifest
    assert [split.tokens for split in manifest.splits.values()] == [2_088_628, 217_646, 245_569]
    assert manifest.vocab_size == 33_278 + 1
    assert not manifest.partial
    assert pmi("data", "prepare", "wikitext2", "--source", source, "--out", tmp_path / "articles", "--articles")[0] == 0
    manifest = open_prepared(tmp_path / "articles").manifest
    assert [split.documents for split in manifest.splits.values()] == [600, 60, 60]
    assert [split.tokens for split in manifest.splits.values()] == [2_088_628, 217_646, 245_569]
    assert not manifest.partial


def test_wikitext103_with_a_part_of_the_training_file_is_marked_partial(pmi: Pmi, real_data: Path, tmp_path: Path) -> None:
    source = real_data / "wikitext-103"
    code, stdout, _ = pmi("data", "prepare", "wikitext103", "--source", source, "--out", tmp_path / "out")
    assert code == 0
    manifest = open_prepared(tmp_path / "out").manifest
    assert [split.tokens for split in manifest.splits.values()] == [551_525, 217_646, 245_569]
    assert manifest.partial
    assert "train: 551,525 tokens, the original has 103,227,021" in manifest.differences
    assert "not comparable" in stdout
    options = ("--tokenizer", "bytes", "--out", tmp_path / "bytes")
    assert pmi("data", "prepare", "wikitext103", "--source", source, *options)[0] == 0
    assert open_prepared(tmp_path / "bytes").manifest.differences == ["train: 541,783 words, the original has 101,425,671"]


def test_pg19_has_the_words_of_its_index_and_every_book_survives_its_pieces(pmi: Pmi, real_data: Path, tmp_path: Path) -> None:
    source = real_data / "pg19"
    assert pmi("data", "prepare", "pg19", "--source", source, "--out", tmp_path / "out")[0] == 0
    data = open_prepared(tmp_path / "out")
    with (source / "INDEX.tsv").open() as file:
        index = {f"{row['split']}/{row['gutenberg_id']}.txt": row for row in csv.DictReader(file, delimiter="\t")}
    texts = {}
    for path in source.glob("*.tar.xz"):
        with tarfile.open(path) as archive:
            texts |= {member.name: archive.extractfile(member).read() for member in archive if member.isfile()}
    seen = set()
    for split in data.manifest.splits:
        for document in data.documents(split):
            row = index[document.name]
            assert (document.words, document.bytes) == (int(row["whitespace_words"]), int(row["bytes"]))
            decoded = data.tokenizer.decode_bytes(document.tokens().tolist())
            assert decoded == texts[document.name]
            assert hashlib.sha256(decoded).hexdigest() == row["sha256"]
            seen.add(document.name)
    assert seen == set(index)
    assert len(data.split("train")) == 239
    assert data.manifest.vocab_size == 32_000
    assert data.manifest.partial
