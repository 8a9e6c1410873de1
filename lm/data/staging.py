"""Staging: a source read once into a `datasets` table of text blocks, and the plan of what goes into which split.

A block is about a megabyte of one document, cut after a newline; a span is the part of a block that one document of
one split takes. Tokenizing works on blocks, so one document of 100 MB is as parallel as a hundred of 1 MB.
"""

import hashlib
import re
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import datasets

from lm.data.originals import Original, Sum
from lm.data.prepared import SPLITS
from lm.data.sources import Reading, decoded, texts
from lm.errors import UserError

ARTICLE = re.compile(rb" = [^=].* = \n")
"""WikiText's first-level heading; it opens an article where an empty line stands before and after it."""
HOLDOUT = 0.05
"""The share of the validation split and of the test split where they are cut from the end (Enwik8: 90M/5M/5M)."""
ROWS_AT_A_TIME = 16
"""Blocks held in memory while staging."""


class Span(NamedTuple):
    """Bytes `start` to `stop` of block `block`."""

    block: int
    start: int
    stop: int


@dataclass
class Planned:
    """One document of one split: where its text is."""

    name: str
    file: str
    """The text file it comes from."""
    spans: list[Span] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """The size of its text."""
        return sum(span.stop - span.start for span in self.spans)


@dataclass
class Staged:
    """A staged source: the blocks (`datasets` table with the column `text`), its documents and its files."""

    blocks: Any
    documents: list[Planned]
    files: dict[str, Sum]
    empty: list[str]
    """Names of documents without text; they are left out."""


def stage(source: Path, folder: Path, pattern: str, articles: bool, utf8: bool) -> Staged:
    """Read `source` into blocks under `folder`; with `utf8` the text must be that."""
    documents: list[Planned] = []
    blocks_read = 0
    files: dict[str, Sum] = {}
    empty: list[str] = []

    def rows() -> Iterator[dict[str, bytes]]:
        nonlocal blocks_read
        for text in texts(source, pattern):
            reading = Reading(text._replace(name=_shown(text.name)))
            if reading.name in files:
                raise UserError(f"{text.path}: {reading.name!r} is in the source twice; keep one of them, or rename it")
            offset = 0
            before = len(documents)
            whole: Iterable[tuple[str | None, bytes]] = ((None, block) for block in reading.blocks())
            for title, block in _articles(reading.blocks()) if articles else whole:
                if utf8:
                    decoded(block, reading.name, offset)
                offset += len(block)
                if title is not None or len(documents) == before:
                    name = reading.name if title is None else f"{reading.name}: {title}"
                    documents.append(Planned(_shown(name), reading.name))
                documents[-1].spans.append(Span(blocks_read, 0, len(block)))
                blocks_read += 1
                yield {"text": block}
            files[reading.name] = Sum(reading.size, reading.md5)
            if len(documents) == before:
                empty.append(reading.name)

    blocks = datasets.Dataset.from_generator(
        lambda: _or_placeholder(rows),
        features=datasets.Features({"text": datasets.Value("large_binary")}),
        cache_dir=str(folder),
        split=datasets.NamedSplit("text"),  # only its progress bar shows the name
        fingerprint=uuid.uuid4().hex,
        writer_batch_size=ROWS_AT_A_TIME,
    )
    return Staged(blocks, documents, files, empty)


def _shown(name: str) -> str:
    """A name that fits on a line: what is not printable, or not UTF-8 in the file system, becomes U+FFFD."""
    return "".join(character if character.isprintable() else "\ufffd" for character in name)


def _or_placeholder(rows: Callable[[], Iterator[dict[str, bytes]]]) -> Iterator[dict[str, bytes]]:
    # `datasets` cannot make a table of no rows; the placeholder belongs to no document.
    found = False
    for row in rows():
        found = True
        yield row
    if not found:
        yield {"text": b""}


def _articles(blocks: Iterable[bytes]) -> Iterator[tuple[str, bytes]]:
    """The articles of a WikiText file in their order, each with its title and the empty line before its heading."""
    title = ""
    lines: list[bytes] = []
    for line in (line for block in blocks for line in block.splitlines(keepends=True)):
        lines.append(line)
        if not line.strip() and len(lines) > 2 and ARTICLE.fullmatch(lines[-2]) and not lines[-3].strip():
            before, lines = lines[:-3], lines[-3:]
            if before:
                yield title, b"".join(before)
            title = lines[1].strip(b" =\n").decode("utf-8", errors="replace")
    if lines:
        yield title, b"".join(lines)


def assign(
    staged: Staged, original: Original, source: Path, pattern: str, split: str | None, holdout: float | None
) -> dict[str, list[Planned]]:
    """The documents of each split: by the user's word, by their names, or cut from the end of the text."""
    if not staged.files:
        raise UserError(f"--source {source}: no file in it fits {pattern!r}; name the right ones with --pattern")
    if split is not None:
        return _checked({split: staged.documents}, staged, source)
    by_name: dict[str, list[Planned]] = {}
    nowhere: list[str] = []
    split_of = original.split_of
    if split_of is not None:
        named = {name: split_of(name) for name in staged.files}
        nowhere = [name for name, found in named.items() if found is None]
        if len(nowhere) == len(named) and not original.required:
            split_of = None
    if split_of is None:
        return _checked(_cut(staged, HOLDOUT if holdout is None else holdout, original.whole_lines), staged, source)
    if nowhere:
        raise UserError(
            f"--source {source}: {nowhere[0]!r} ({len(nowhere)} such) belongs to no split by its name; put it under "
            f"{', '.join(f'{name}/' for name in SPLITS)}, or name one with --split"
        )
    for name in SPLITS:
        if name in original.required or name in named.values():
            by_name[name] = []
    for document in staged.documents:
        by_name[str(named[document.file])].append(document)
    return _checked(by_name, staged, source)


def _checked(splits: dict[str, list[Planned]], staged: Staged, source: Path) -> dict[str, list[Planned]]:
    found = ", ".join(f"{name} ({len(documents)} documents)" for name, documents in splits.items() if documents)
    for name, documents in splits.items():
        if not documents:
            because = f" ({staged.empty[0]!r} has no text)" if staged.empty else ""
            raise UserError(
                f"--source {source}: the split {name!r} is empty{because}; found: {found or 'no text at all'}. "
                "Add its files, or put everything into one split with --split"
            )
    return splits


def _cut(staged: Staged, holdout: float, whole_lines: bool) -> dict[str, list[Planned]]:
    """The last `holdout` of the text is the test split, the same share before it validation, the rest train."""
    total = sum(document.bytes for document in staged.documents)
    held = round(total * holdout)
    ends = {"train": total - 2 * held, "validation": total - held, "test": total} if holdout else {"train": total}
    splits: dict[str, list[Planned]] = {name: [] for name in ends}
    order = iter(ends)
    split = next(order)
    position = 0
    for document in staged.documents:
        current = Planned(document.name, document.file)
        for span in document.spans:
            start = span.start
            while position + span.stop - start > ends[split] and split != "test":
                stop = start + max(0, ends[split] - position)
                if whole_lines and stop > 0:
                    newline = staged.blocks[span.block]["text"].find(b"\n", stop - 1)
                    stop = newline + 1 if newline >= 0 else span.stop
                if stop > start:
                    current.spans.append(Span(span.block, start, stop))
                if current.spans:
                    splits[split].append(current)
                    current = Planned(document.name, document.file)
                position += stop - start
                start = stop
                split = next(order)
            if start < span.stop:
                current.spans.append(Span(span.block, start, span.stop))
                position += span.stop - start
        if current.spans:
            splits[split].append(current)
    return splits


def sums_by_split(staged: Staged, original: Original) -> dict[str, Sum]:
    """Size and MD5 by split and of `all`; of several files, the MD5 of their MD5s."""
    groups: dict[str, list[Sum]] = {"all": list(staged.files.values())}
    for name, found in staged.files.items():
        split = original.split_of(name) if original.split_of else None
        if split is not None:
            groups.setdefault(split, []).append(found)
    return {name: _together(group) for name, group in groups.items()}


def _together(files: list[Sum]) -> Sum:
    if len(files) == 1:
        return files[0]
    joined = "".join(file.md5 for file in files).encode()
    return Sum(sum(file.size for file in files), hashlib.md5(joined, usedforsecurity=False).hexdigest())
