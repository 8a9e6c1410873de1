"""Shared by the data tests: a small trained tokenizer, the command line, the real files."""

import os
from pathlib import Path

import pytest
from made_data import REPOSITORY, Pmi, write

from lm.cli import app, run
from lm.data.pieces import PieceTokenizer


@pytest.fixture
def pmi(capfd: pytest.CaptureFixture[str]) -> Pmi:
    """Run `pmi` with these arguments in this process: exit code, standard output, standard error."""

    def call(*arguments: object) -> tuple[int, str, str]:
        capfd.readouterr()
        code = run(app, [str(argument) for argument in arguments])
        return code, *capfd.readouterr()

    return call


@pytest.fixture(scope="session")
def moby_dick() -> str:
    """The bundled text."""
    return (REPOSITORY / "lm/data/text/moby-dick.txt").read_text("utf-8")


@pytest.fixture
def books(tmp_path: Path, moby_dick: str) -> Path:
    """A source with named splits: 12 documents for training, 2 and 1 held out."""
    parts = [moby_dick[i * 10_000 : (i + 1) * 10_000] for i in range(15)]
    names = [*(f"train/{i}.txt" for i in range(12)), "validation/a.txt", "validation/b.txt", "test/c.txt"]
    return write(tmp_path / "books", dict(zip(names, parts, strict=True)))


@pytest.fixture(scope="session")
def pieces(moby_dick: str) -> PieceTokenizer:
    """A small SentencePiece tokenizer."""
    return PieceTokenizer.train([moby_dick[:200_000]], vocab_size=1500, model_type="unigram", threads=1)


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real data sets; the test is skipped where there is none."""
    folder = Path(os.environ.get("PMI_TEST_DATA", REPOSITORY.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no real data sets in {folder} (PMI_TEST_DATA names another place)")
    return folder
