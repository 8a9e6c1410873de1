"""Tokenizers: text to ids and back, saved as one folder entry `tokenizer.json` (+ a model file where there is one).

Every tokenizer has a BOS id, which stands at position 0 of a document and is never a target, and a fingerprint that
snapshots, checkpoints and prepared data carry.
"""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from lm.errors import UserError

FILE = "tokenizer.json"


class Tokenizer(ABC):
    """Text to ids and back. Subclasses register themselves by `kind`."""

    kind: ClassVar[str]
    kinds: ClassVar[dict[str, type["Tokenizer"]]] = {}

    vocab_size: int
    """Number of ids, BOS included."""
    bos: int
    """The id at position 0 of every document; never a target."""

    def __init_subclass__(cls) -> None:
        Tokenizer.kinds[cls.kind] = cls

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """The ids of `text`, without BOS."""

    @abstractmethod
    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        """The bytes that `ids` stand for (BOS stands for none); may end inside a UTF-8 character."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text that `ids` stand for."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def description(self) -> dict[str, Any]:
        """What `tokenizer.json` holds: enough, with the files beside it, to load the tokenizer again."""
        return {"kind": self.kind, "vocab_size": self.vocab_size, "bos": self.bos}

    def fingerprint(self) -> str:
        """A short hash of everything that decides which ids a text gets."""
        return hashlib.sha256(json.dumps(self.description(), sort_keys=True).encode()).hexdigest()[:16]

    def save(self, folder: Path) -> None:
        """Write the tokenizer into `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / FILE).write_text(json.dumps(self.description(), indent=2) + "\n")

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

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        return bytes(i for i in ids if i != self.bos)


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer saved in `folder`; UserError if there is none or its kind is unknown."""
    path = folder / FILE
    if not path.is_file():
        raise UserError(f"{folder}: no {FILE} there; point at a checkpoint or prepared-data folder that has one")
    try:
        description = json.loads(path.read_text())
        kind = description["kind"]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: not a tokenizer description ({error!r}); save the tokenizer again") from error
    if kind not in Tokenizer.kinds:
        raise UserError(f"{path}: tokenizer kind {kind!r} is unknown; known kinds: {sorted(Tokenizer.kinds)}")
    return Tokenizer.kinds[kind].restore(description, folder)
