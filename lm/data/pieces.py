"""The SentencePiece tokenizer: trained on the training split, lossless for every text.

Trained by `pmi data prepare pg19|text ...`; saved as `tokenizer.json` + `pieces.model` (SentencePiece's own format).

- identity normalisation, all whitespace kept, no dummy prefix: pieces joined are the text;
- byte fallback: what the vocabulary lacks, newlines included, is spelt in bytes, so nothing is unknown;
- U+2581, which SentencePiece writes for a space, is spelt in bytes too: otherwise it would come back as a space.
"""

import hashlib
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import sentencepiece

from lm.data.tokenizer import Tokenizer, read_model_file
from lm.errors import UserError

FILE = "pieces.model"
TYPES = ("unigram", "bpe")
SPACE = "\u2581"
LINE = 4096
"""Characters of a training line; longer ones are cut, for SentencePiece leaves long lines out."""


class PieceTokenizer(Tokenizer):
    """SentencePiece ids; BOS is SentencePiece's own."""

    kind = "pieces"

    def __init__(self, model: bytes) -> None:
        self.model = model
        self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        self.vocab_size = self._processor.vocab_size()
        self.bos = self._processor.bos_id()
        self._bytes = [self._bytes_of(i) for i in range(self.vocab_size)]
        byte_ids = [self._processor.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE.encode()]
        if self.bos < 0 or not all(self._processor.is_byte(i) for i in byte_ids):
            raise UserError(f"{FILE}: this model has no BOS or no byte fallback; train one with `pmi data prepare`")
        self._space_ids = byte_ids

    def _bytes_of(self, i: int) -> bytes:
        piece = self._processor.id_to_piece(i)
        if self._processor.is_byte(i):
            return bytes([int(piece[3:5], 16)])
        if self._processor.is_control(i) or self._processor.is_unknown(i):
            return b""
        return bytes(piece.replace(SPACE, " ").encode())

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int, model_type: str, threads: int = 2) -> "PieceTokenizer":
        """A tokenizer of `vocab_size` pieces learned from `texts`; UserError where they are too few for it."""
        if model_type not in TYPES:
            raise UserError(f"SentencePiece type {model_type!r} is unknown; allowed: {', '.join(TYPES)}")
        model = io.BytesIO()
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=_lines(texts),
                model_writer=model,
                vocab_size=vocab_size,
                model_type=model_type,
                normalization_rule_name="identity",
                remove_extra_whitespaces=False,
                add_dummy_prefix=False,
                allow_whitespace_only_pieces=True,
                byte_fallback=True,
                split_digits=True,
                character_coverage=0.9999,
                max_sentence_length=4 * LINE,
                unk_id=0,
                bos_id=1,
                eos_id=-1,
                pad_id=-1,
                num_threads=threads,
                minloglevel=2,
            )
        except (RuntimeError, OSError, ValueError) as error:
            raise _explained(error, vocab_size) from error
        return cls(model.getvalue())

    def encode(self, text: str) -> list[int]:
        if SPACE not in text:
            return list(self._processor.encode(text))
        ids: list[int] = []
        for i, part in enumerate(text.split(SPACE)):
            ids += (self._space_ids if i else []) + self._processor.encode(part)
        return ids

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        table = self._bytes
        return b"".join([table[i] for i in ids])

    def files(self) -> dict[str, bytes]:
        return {FILE: self.model}

    def description(self) -> dict[str, Any]:
        return super().description() | {"sha256": hashlib.sha256(self.model).hexdigest()}

    @classmethod
    def restore(cls, description: dict[str, Any], folder: Path) -> "PieceTokenizer":
        model = read_model_file(folder, FILE)
        try:
            return cls(model)
        except (RuntimeError, OSError) as error:
            raise UserError(f"{folder / FILE}: not a SentencePiece model ({error}); restore the folder") from error


def _lines(texts: Iterable[str]) -> Iterator[str]:
    """What SentencePiece learns from: lines, without tabs (it would leave out a line that has one)."""
    for text in texts:
        for line in text.replace("\t", " ").split("\n"):
            for start in range(0, len(line), LINE):
                yield line[start : start + LINE]


def _explained(error: Exception, vocab_size: int) -> UserError:
    message = str(error)
    limit = re.search(r"value <= (\d+)", message)
    if limit:
        return UserError(
            f"--vocab-size {vocab_size}: the training split is too small for so many pieces; "
            f"at most {limit.group(1)} here, or use --tokenizer bytes"
        )
    needed = re.search(r"required_chars\. \d+ vs (\d+)", message)
    if needed:
        return UserError(
            f"--vocab-size {vocab_size}: too few pieces for the characters of the training split; "
            f"at least {needed.group(1)} here, or use --tokenizer bytes"
        )
    return UserError(f"SentencePiece could not be trained with --vocab-size {vocab_size}: {message.strip()}")
