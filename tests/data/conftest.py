"""Shared by the data tests: a small trained tokenizer, the command line, the real files."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from lm.cli import app, run
from lm.data.pieces import PieceTokenizer

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def pmi(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
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
