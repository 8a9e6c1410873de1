"""What is evaluated: the documents of a prepared split, of a text file, or of a folder of .txt files.

    corpus = open_corpus(Path("data/enwik8"), "test", tokenizer)
    corpus.items[0].read(0, 512)

Every count that a figure is divided by is taken here, of exactly the documents that are evaluated.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lm.data.files import sha256_of
from lm.data.prepared import MANIFEST, WORK, Document, Prepared, open_prepared
from lm.data.sources import Reading, decoded, texts
from lm.data.tokenizer import Tokenizer
from lm.errors import UserError, collecting

CONTINUATION = 0x80
"""A byte of the form 10xxxxxx continues a character of UTF-8."""


@dataclass(frozen=True)
class Item:
    """One document to be read from its start, or a part of one that is read as if it were a document."""

    number: int
    name: str
    length: int
    """Tokens, without BOS: as many as there are predictions."""
    words: int
    bytes: int
    read: Callable[[int, int], NDArray[Any]] = field(repr=False, compare=False)
    """Tokens from a first to a last (exclusive)."""

    def segments(self, segment: int) -> int:
        """How many segments it takes."""
        return -(-self.length // segment)

    def parts(self, count: int, segment: int) -> "list[Item]":
        """Up to `count` contiguous parts of whole segments (but for the last)."""
        segments = self.segments(segment)
        cuts = sorted({segments * i // count * segment for i in range(count)} - {self.length})
        return [
            Item(i, f"{self.name} [{first}:{last}]", last - first, 0, 0, _shifted(self.read, first))
            for i, (first, last) in enumerate(zip(cuts, [*cuts[1:], self.length], strict=True))
        ]

    def in_memory(self) -> "Item":
        """The same document with its tokens held as an array, so that it can be sent to another process."""
        return replace(self, read=InMemory(np.array(self.read(0, self.length))))


@dataclass(frozen=True)
class InMemory:
    """Reads from an array."""

    tokens: NDArray[Any]

    def __call__(self, start: int, stop: int) -> NDArray[Any]:
        return self.tokens[start:stop]


@dataclass(frozen=True)
class Corpus:
    """The documents of one evaluation, and what must be said about them."""

    name: str
    """Data set and split, or the path of a text."""
    items: list[Item]
    fingerprint: str
    tokenizer: Tokenizer
    words_are: str
    """What the denominator of word-level perplexity counts."""
    not_comparable: list[str]
    """Why figures on it must not stand beside published ones; empty: they may."""
    unknown: int
    """Tokens that are the tokenizer's unknown id."""
    notes: list[str]

    @property
    def tokens(self) -> int:
        """Tokens of all documents."""
        return sum(item.length for item in self.items)

    def characters(self) -> int | None:
        """Characters (code points) of all documents, where the tokenizer gives the text back."""
        if not self.tokenizer.lossless:
            return None
        return sum(_characters(self.tokenizer, item.read(0, item.length)) for item in self.items)


def open_corpus(path: Path, split: str, tokenizer: Tokenizer, documents: list[str] | None = None) -> Corpus:
    """The documents in `path` for a model with this tokenizer; UserError for whatever makes a figure doubtful."""
    if path.is_dir() and ((path / MANIFEST).exists() or (path / WORK).exists()):
        corpus = _prepared(open_prepared(path, tokenizer=tokenizer.fingerprint()), split)
    elif path.exists():
        corpus = _text(path, tokenizer)
    else:
        raise UserError(
            f"--data {path}: there is no such file or folder; give prepared data, a text file or a folder of .txt files"
        )
    return corpus if documents is None else _only(corpus, documents)


def _prepared(data: Prepared, split: str) -> Corpus:
    found, counts, manifest = data.split(split), data.manifest.splits.get(split), data.manifest
    assert counts is not None
    with collecting() as problems:
        # of this split alone: a training split may take minutes to read
        for name, checksum in ((f"{split}.index.npy", counts.index_sha256), *((x.file, x.sha256) for x in counts.shards)):
            if sha256_of(data.folder / name) != checksum:
                problems.append(
                    f"{data.folder / name}: its checksum is not the manifest's {checksum[:16]}; "
                    "restore it or prepare the data again with --force"
                )
    wikitext = manifest.dataset.startswith("wikitext")
    by_tokens = wikitext and data.tokenizer.kind == "words"
    items = []
    for document in found:
        words = document.words
        if by_tokens:
            words = document.length
        elif wikitext:
            words += data.tokenizer.decode_bytes(document.tokens().tolist()).count(b"\n")
        items.append(Item(document.number, document.name, document.length, words, document.bytes, _Tokens(document)))
    reasons = [f"partial data: {difference}" for difference in manifest.differences] if manifest.partial else []
    if manifest.dataset == "text":
        reasons.append("own text, not a public data set")
    if wikitext and manifest.request.get("articles"):
        reasons.append("memory starts anew at each article")
    words_are = "words and one <eos> per line" if wikitext else "whitespace-separated words of the text"
    name = f"{manifest.dataset} {split}"
    notes = ["what is published as Enwik8's bpc is bits per byte"] if manifest.dataset == "enwik8" else []
    return _counted(name, items, data.fingerprint, data.tokenizer, words_are, reasons, notes)


def _text(path: Path, tokenizer: Tokenizer) -> Corpus:
    items: list[Item] = []
    notes, digest = [], hashlib.sha256(tokenizer.fingerprint().encode())
    for text in texts(path, "*.txt"):
        reading, parts, words, offset = Reading(text), [], 0, 0
        for block in reading.blocks():
            if tokenizer.kind != "bytes":
                decoded(block, reading.name, offset)
            offset += len(block)
            words += len(block.split())
            parts.append(tokenizer.encode_bytes(block).astype(tokenizer.dtype))
        tokens = np.concatenate(parts) if parts else np.zeros(0, tokenizer.dtype)
        digest.update(f"{reading.name}\0{reading.md5}".encode(errors="surrogateescape"))
        if len(tokens):
            name = "".join(character if character.isprintable() else "\ufffd" for character in reading.name)
            items.append(Item(len(items), name, len(tokens), words, offset, InMemory(tokens)))
        else:
            notes.append(f"left out, no text in it: {reading.name}")
    if not items:
        raise UserError(f"--data {path}: no text there; give a text file that is not empty or a folder that has such .txt files")
    words_are = "whitespace-separated words of the text"
    return _counted(str(path), items, digest.hexdigest()[:16], tokenizer, words_are, ["own text, not a public data set"], notes)


def _counted(
    name: str, items: list[Item], fingerprint: str, tokenizer: Tokenizer, words_are: str, reasons: list[str], notes: list[str]
) -> Corpus:
    unknown = 0
    if tokenizer.unknown is not None:
        unknown = sum(int(np.count_nonzero(item.read(0, item.length) == tokenizer.unknown)) for item in items)
    empty = [item.name for item in items if not item.length]
    single = sum(item.length == 1 for item in items)
    if empty:
        notes = [*notes, f"left out, no tokens: {', '.join(empty[:3])}{' and more' if empty[3:] else ''}"]
    if single:
        notes = [*notes, f"{single} of {len(items)} documents have one token; it is predicted from BOS alone, and counted"]
    kept = [item for item in items if item.length]
    if not kept:
        raise UserError(f"{name}: no document there has a token; there is nothing to predict")
    return Corpus(name, kept, fingerprint, tokenizer, words_are, reasons, unknown, notes)


def _only(corpus: Corpus, wanted: list[str]) -> Corpus:
    """The documents named: by name, or by the last part of the name without its suffix where only one has it."""
    chosen: dict[int, Item] = {}
    with collecting() as problems:
        for name in wanted:
            found = [item for item in corpus.items if item.name == name]
            found = found or [item for item in corpus.items if PurePosixPath(item.name).stem == name]
            if len(found) == 1:
                chosen[found[0].number] = found[0]
            elif found:
                problems.append(
                    f"--documents {name!r}: {len(found)} documents end in it; give the whole name, as {found[0].name!r}"
                )
            else:
                some = ", ".join(repr(item.name) for item in corpus.items[:5])
                problems.append(f"--documents {name!r}: not in {corpus.name}; its {len(corpus.items)} documents are {some}, ...")
    items = [chosen[number] for number in sorted(chosen)]
    if len(items) == len(corpus.items):
        return corpus
    reason = f"{len(items)} of the {len(corpus.items)} documents"
    return _counted(
        corpus.name, items, corpus.fingerprint, corpus.tokenizer, corpus.words_are, [*corpus.not_comparable, reason], []
    )


@dataclass(frozen=True)
class _Tokens:
    document: Document

    def __call__(self, start: int, stop: int) -> NDArray[Any]:
        return self.document.tokens(start, stop)


def _shifted(read: Callable[[int, int], NDArray[Any]], by: int) -> Callable[[int, int], NDArray[Any]]:
    return lambda start, stop: read(by + start, by + stop)


def _characters(tokenizer: Tokenizer, tokens: NDArray[Any]) -> int:
    data = tokens if tokenizer.kind == "bytes" else np.frombuffer(tokenizer.decode_bytes(tokens.tolist()), np.uint8)
    return int(np.count_nonzero(data & 0xC0 != CONTINUATION))
