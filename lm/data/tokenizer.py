"""Tokenizers: text to ids and back, saved as one folder entry `tokenizer.json` (+ a model file where there is one).

Every tokenizer has a BOS id, which stands at position 0 of a document and is never a target, and a fingerprint that
snapshots, checkpoints and prepared data carry. The kinds: `bytes` (here), `words` (words.py), `pieces` (pieces.py).
"""

import hashlib
import importlib
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from lm.data.files import write_atomically
from lm.errors import UserError

FILE = "tokenizer.json"


class Tokenizer(ABC):
    """Text to ids and back. Subclasses register themselves by `kind`."""

    kind: ClassVar[str]
    kinds: ClassVar[dict[str, type["Tokenizer"]]] = {}
    lossless: ClassVar[bool] = True
    """Whether decode(encode(text)) == text for every text; `pmi data prepare` checks it on every document."""
    unknown: int | None = None
    """The id that stands for what the vocabulary lacks, where there is one."""

    vocab_size: int
    """Number of ids, BOS included."""
    bos: int
    """The id at position 0 of every document; never a target."""

    def __init_subclass__(cls) -> None:
        Tokenizer.kinds[cls.kind] = cls

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """The ids of `text`, without BOS. Cutting `text` after a newline and joining the ids gives the same ids."""

    def encode_prompt(self, text: str) -> list[int]:
        """The ids of a text that is to go on: a line that it has not ended stays open."""
        return self.encode(text)

    @abstractmethod
    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """The bytes that `ids` stand for (BOS stands for none); may end inside a UTF-8 character."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text that `ids` stand for."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def encode_bytes(self, data: bytes) -> NDArray[Any]:
        """The ids of UTF-8 `data` as an array: what preparing data uses."""
        return np.asarray(self.encode(data.decode("utf-8")), dtype=np.uint32)

    def gives_back(self, data: bytes, ids: NDArray[Any]) -> bool:
        """Whether `ids`, which `encode_bytes(data)` gave, decode to `data`."""
        return self.decode_bytes(ids.tolist()) == data

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest type that holds every id a text can have (BOS is in no text, so bytes need one byte)."""
        largest = self.vocab_size - 2 if self.bos == self.vocab_size - 1 else self.vocab_size - 1
        return np.min_scalar_type(largest)

    def description(self) -> dict[str, Any]:
        """What `tokenizer.json` holds: enough, with the files beside it, to load the tokenizer again."""
        return {"kind": self.kind, "vocab_size": self.vocab_size, "bos": self.bos}

    def fingerprint(self) -> str:
        """A short hash of everything that decides which ids a text gets."""
        return hashlib.sha256(json.dumps(self.description(), sort_keys=True).encode()).hexdigest()[:16]

    def save(self, folder: Path) -> None:
        """Write the tokenizer into `folder`; `tokenizer.json` last, so that a folder that has it is whole."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.files().items():
            write_atomically(folder / name, content)
        write_atomically(folder / FILE, (json.dumps(self.description(), indent=2) + "\n").encode())

    def files(self) -> dict[str, bytes]:
        """The model files that stand beside `tokenizer.json`, by name."""
        return {}

    @classmethod
    def restore(cls, description: dict[str, Any], folder: Path) -> "Tokenizer":
        """The tokenizer that `description` (and files in `folder`) stand for."""
        return cls()


class ByteTokenizer(Tokenizer):
    """Bytes 0..255 as they are; BOS is 256."""

    kind = "bytes"
    vocab_size = 257
    bos = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def encode_bytes(self, data: bytes) -> NDArray[Any]:
        return np.frombuffer(data, dtype=np.uint8)

    def gives_back(self, data: bytes, ids: NDArray[Any]) -> bool:
        return ids.tobytes() == data

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        array = np.asarray(ids, dtype=np.uint16)
        return bytes(array[array != self.bos].astype(np.uint8))


def tokenizer_kinds() -> dict[str, type[Tokenizer]]:
    """Every kind of tokenizer there is, by name."""
    for module in ("lm.data.words", "lm.data.pieces"):
        importlib.import_module(module)
    return Tokenizer.kinds


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer saved in `folder`; UserError if there is none, its kind is unknown, or its files have changed."""
    path = folder / FILE
    if not path.is_file():
        raise UserError(f"{folder}: no {FILE} there; point at a checkpoint or prepared-data folder that has one")
    try:
        description = json.loads(path.read_text())
        kind = description["kind"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: not a tokenizer description ({error!r}); save the tokenizer again") from error
    kinds = tokenizer_kinds()
    if kind not in kinds:
        raise UserError(f"{path}: tokenizer kind {kind!r} is unknown; known kinds: {sorted(kinds)}")
    tokenizer = kinds[kind].restore(description, folder)
    found = tokenizer.description()
    if found != description:
        raise UserError(f"{path}: describes {description}, but the files beside it give {found}; restore the folder")
    return tokenizer


def read_model_file(folder: Path, name: str) -> bytes:
    """The content of a model file beside `tokenizer.json`; UserError where it is missing."""
    try:
        return (folder / name).read_bytes()
    except FileNotFoundError as error:
        raise UserError(f"{folder / name}: missing, and {FILE} needs it; restore the folder") from error
