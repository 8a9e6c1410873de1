"""Shared by the data tests: a small trained tokenizer, the command line, the real files."""

from pathlib import Path

import pytest
from made_data import write

from lm.data.pieces import PieceTokenizer


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
