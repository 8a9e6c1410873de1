"""Shared by the evaluation tests: a small checkpoint whose memory matters, texts, the command line."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lm.config import load_model_config
from lm.data.tokenizer import ByteTokenizer
from lm.model import PMI
from lm.model.pretrained import Checkpoint, from_pretrained, save_pretrained
from lm.model.proofs import draw_zeros

ROOT = Path(__file__).parents[2]
SIZES = ["segment=8", "window=8", "width=32", "heads=2", "feedforward=64", "layers=2", "memory.heads=2"]


def make_model(*overrides: str) -> PMI:
    """A small model with every weight drawn, so that all its parts are felt."""
    torch.manual_seed(5)
    return draw_zeros(PMI(load_model_config("tiny", [*SIZES, *overrides]))).eval()


@pytest.fixture(scope="session")
def checkpoint_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "model"
    save_pretrained(make_model(), ByteTokenizer(), folder)
    return folder


@pytest.fixture
def checkpoint(checkpoint_folder: Path) -> Checkpoint:
    return from_pretrained(checkpoint_folder)


@pytest.fixture(scope="session")
def books(tmp_path_factory: pytest.TempPathFactory, moby_dick: str) -> Path:
    """A folder of 7 texts, shorter and longer than a segment, one of a single byte."""
    folder, at = tmp_path_factory.mktemp("books"), 3000
    for number, length in enumerate((200, 1, 8, 9, 64, 350, 123)):
        (folder / f"book{number}.txt").write_text(moby_dick[at : at + length].encode("ascii", "replace").decode())
        at += length
    return folder


def result_of(folder: Path) -> dict[str, Any]:
    """The result that an evaluation left."""
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return found
