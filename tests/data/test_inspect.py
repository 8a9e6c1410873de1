"""Prepared data opened and inspected: what is shown, and how every damage is named."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from made_data import REPOSITORY

from lm.data.prepared import open_prepared
from lm.errors import UserError
from tests.conftest import Pmi


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
    index, names = folder / "train.index.npy", folder / "train.names.txt"
    for path, message in ((index, "not an index of the 12 documents"), (names, "names for 12 documents")):
        whole = path.read_bytes()
        path.write_bytes(whole[:100])
        code, _, stderr = pmi("data", "inspect", folder)
        assert code == 2
        assert message in stderr
        path.write_bytes(whole)
    shard.unlink()
    (folder / "test.names.txt").unlink()
    with pytest.raises(UserError) as error:
        open_prepared(folder)
    assert len(error.value.problems) == 2
    shard.write_bytes(good)
    (folder / "manifest.json").write_text("{}")
    with pytest.raises(UserError, match="dataset"):
        open_prepared(folder)


def test_a_manifest_that_leads_out_of_its_folder_is_refused(pmi: Pmi, books: Path, tmp_path: Path) -> None:
    folder = prepared(pmi, books, tmp_path / "out")
    text = (folder / "manifest.json").read_text()
    for honest, hostile in (('"train-00000.bin"', '"../train-00000.bin"'), ('"train": {', '"../train": {')):
        (folder / "manifest.json").write_text(text.replace(honest, hostile))
        with pytest.raises(UserError, match="should match pattern"):
            open_prepared(folder)


def test_all_mistakes_in_the_flags_of_inspect_are_told_at_once(pmi: Pmi, tmp_path: Path) -> None:
    flags = {"--segment": 0, "--longest": -1, "--sample": -1, "--plot": tmp_path / "nowhere/x.doc"}
    code, stdout, stderr = pmi("data", "inspect", tmp_path, *(part for item in flags.items() for part in item))
    assert code == 2
    assert not stdout
    for part in (*flags, "must be one of .png", "there is no folder", "no prepared data"):
        assert part in stderr, part


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
    assert "must be one of .png, .pdf, .svg" in stderr
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
