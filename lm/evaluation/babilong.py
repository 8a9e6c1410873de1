"""BABILong samples: bAbI facts hidden in the text of books, a question at the end, a one-word answer.

Built as in the paper (Kuratov et al., 2024): a story's facts keep their order and go to random borders between the
sentences of a book, and facts and book together have the length asked for. docs/tasks.md says where this differs.
Everything is a line: a sentence of the book, a fact, the question; the answer is the line that is to follow.
"""

import codecs
import hashlib
import itertools
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lm.data.prepared import MANIFEST, SPLITS, open_prepared
from lm.data.sources import BLOCK, is_archive, texts
from lm.data.tokenizer import Tokenizer
from lm.errors import UserError, collecting

FILE = re.compile(r"qa(\d+)_(?:[\w-]+_)?(train|valid|test)\.txt")
BOOKS = {"train": "train", "valid": "validation", "test": "test"}
"""bAbI's name of a split, and that of books."""
SHORTEST = 10
"""Tokens that a sentence of a book must have, as in the paper's code."""
LONGEST = 1 << 16
"""Characters after which a text without any border between sentences is cut."""
IN_MEMORY = 1 << 20
"""Bytes of a sample that are held in memory while it is made; beyond, they wait in a temporary file."""
BORDER = re.compile(
    r"(?<!\bMr\.)(?<!\bMrs\.)(?<!\bDr\.)(?<!\bSt\.)(?<!\b[A-Z]\.)"  # not behind a title or an initial
    r"(?<=[.!?])[\"'\u201d\u2019)\]]*\s+(?=[\"'\u201c\u2018(\[_]*[A-Z])|\n\s*\n"
)


class Question(NamedTuple):
    """A question of a bAbI story with all that was told before it."""

    task: str
    facts: tuple[str, ...]
    question: str
    answer: str
    supporting: tuple[int, ...]
    """Which of the facts the answer rests on."""


class Made(NamedTuple):
    """What was written of a sample."""

    tokens: int
    facts: list[int]
    """Where each fact begins, in tokens."""


OTHERS = {"hn", "hn-10k", "shuffled", "shuffled-10k"}
"""Folders of the public archive that hold the same tasks in Hindi and in letters without meaning."""


def read_questions(source: Path, tasks: list[str], split: str, flag: str = "--facts") -> dict[str, list[Question]]:
    """The questions of each of `tasks` in a folder or archive of bAbI files; `flag` is what the source was given with."""
    found: dict[str, list[Question]] = {}
    seen = set()
    for text in texts(source, "qa*.txt"):
        match = FILE.fullmatch(Path(text.name).name)
        if not match or OTHERS & {*Path(text.name).parts}:
            continue
        task = f"qa{match[1]}"
        seen.add(f"{task} {match[2]}")
        if task in tasks and match[2] == split:
            questions = list(_questions(task, text.stream.read().decode("utf-8", errors="replace"), text.name))
            if len(questions) > len(found.get(task, [])):  # several versions of a task: the largest
                found[task] = questions
    with collecting() as problems:
        if not seen:
            problems.append(f"{flag} {source}: no bAbI files there (qa1_train.txt, qa1_single-supporting-fact_test.txt, ...)")
        for task in tasks if seen else ():
            if task not in found:
                has = sorted({entry.split()[0] for entry in seen if entry.endswith(split)}, key=lambda x: int(x[2:]))
                problems.append(f"{flag} {source}: no {split} file of {task}; it has {', '.join(has) or 'none of this split'}")
    return {task: found[task] for task in tasks}


def _questions(task: str, text: str, name: str) -> Iterator[Question]:
    facts: dict[int, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        index, _, rest = line.partition(" ")
        said, *answer = rest.split("\t")
        numbers = [*index.split(), *(answer[1].split() if len(answer) == 2 else [])]
        if not index.isdigit() or len(answer) not in (0, 2) or not all(x.isdigit() for x in numbers):
            raise UserError(f"{name}, line {number}: {line[:60]!r} is neither 'N fact' nor 'N question<tab>answer<tab>facts'")
        if int(index) == 1:
            facts = {}
        if answer:
            order = list(facts)
            supporting = tuple(order.index(int(i)) for i in answer[1].split() if int(i) in facts)
            yield Question(task, tuple(facts.values()), said.strip(), answer[0].strip(), supporting)
        else:
            facts[int(index)] = said.strip()


class Books:
    """The text that facts are hidden in: prepared data, or a file, folder or archive of texts. Read from disk as needed."""

    def __init__(self, sizes: list[int], read: Callable[[int, int, int], bytes], fingerprint: str) -> None:
        self.sizes, self.read, self.fingerprint = sizes, read, fingerprint

    @classmethod
    def open(cls, source: Path, split: str) -> "Books":
        """The books of a split: where files lie in folders named after splits, those of this one. UserError if there are none."""
        if (source / MANIFEST).is_file():
            return cls._prepared(source, split)
        spool = tempfile.TemporaryFile()  # noqa: SIM115 (kept as long as the books)
        digest, ends, size = hashlib.sha256(), [0], 0
        others = set()
        for text in texts(source):
            named = {part.split("_")[0] for part in Path(text.name).parent.parts} & {*SPLITS}  # train, train_extra, ...
            if named and split not in named:
                others |= named
                continue
            if Path(text.name).suffix not in (".txt", "") and (source.is_dir() or is_archive(source.name)):
                continue
            while block := text.stream.read(BLOCK):
                spool.write(block)
                digest.update(block)
                size += len(block)
            if size > ends[-1]:
                ends.append(size)
                digest.update(b"\0")
        if len(ends) == 1:
            has = f"; it has {', '.join(sorted(others))}: choose one with --text-split" if others else ""
            raise UserError(f"--text {source}: no .txt file there of split {split!r}{has or '; give prepared data or books'}")

        def read(book: int, start: int, stop: int) -> bytes:
            spool.seek(ends[book] + start)
            return spool.read(min(stop, ends[book + 1] - ends[book]) - start)

        return cls([b - a for a, b in itertools.pairwise(ends)], read, digest.hexdigest()[:16])

    @classmethod
    def _prepared(cls, source: Path, split: str) -> "Books":
        data = open_prepared(source)
        documents = data.split(split)

        def read(book: int, start: int, stop: int) -> bytes:
            return data.tokenizer.decode_bytes(documents[book].tokens(start, stop).tolist())

        return cls(documents.lengths.tolist(), read, f"{data.fingerprint}-{split}")

    def lines(self, rng: np.random.Generator) -> Iterator[str]:
        """Sentences without end, each a line: the first book from a random place on, then the others in random order."""
        first = True
        while True:
            for book in rng.permutation(len(self.sizes)).tolist():
                start = int(rng.integers(self.sizes[book])) if first else 0
                found = sentences(self._blocks(book, start))
                if first:
                    next(found, None)  # begun in its middle
                    first = False
                yield from (line for line in (" ".join(sentence.split()) for sentence in found) if line)

    def _blocks(self, book: int, start: int) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8")("ignore")
        for at in range(start, self.sizes[book], LONGEST):
            yield decoder.decode(self.read(book, at, at + LONGEST))


def sentences(blocks: Iterator[str]) -> Iterator[str]:
    """The text in `blocks` cut at the borders of sentences and paragraphs."""
    rest = ""
    for block in blocks:
        *whole, rest = _split(rest + block)
        yield from whole
        while len(rest) > LONGEST:
            yield rest[:LONGEST]
            rest = rest[LONGEST:]
    if rest:
        yield rest


def _split(text: str) -> list[str]:
    cuts = [0, *(match.end() for match in BORDER.finditer(text)), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(cuts)]


class Maker:
    """Makes samples of one tokenizer from books."""

    def __init__(self, books: Books, tokenizer: Tokenizer) -> None:
        self.books, self.tokenizer = books, tokenizer
        self.dtype = tokenizer.dtype.newbyteorder("<")

    def line(self, text: str) -> NDArray[Any]:
        """The ids of a line."""
        return np.asarray(self.tokenizer.encode_bytes(text.encode() + b"\n"), dtype=self.dtype)

    def fact_tokens(self, question: Question) -> int:
        """Tokens of a question's facts: the shortest context it can have."""
        return sum(len(self.line(fact)) for fact in question.facts)

    def make(self, question: Question, length: int, rng: np.random.Generator, sink: IO[bytes]) -> Made:
        """Write a sample's ids: a context of `length` tokens (0: the facts alone) and the question, but not the answer."""
        facts = [self.line(fact) for fact in question.facts]
        with tempfile.SpooledTemporaryFile(IN_MEMORY) as background:
            borders = self._background(length - sum(map(len, facts)), rng, background)
            places = np.sort(rng.choice(borders, len(facts)))
            background.seek(0)
            at, done, begins = 0, 0, []
            for fact, place in zip(facts, places.tolist(), strict=True):
                _copy(background, sink, (place - at) * self.dtype.itemsize)
                begins.append(place + done)
                sink.write(fact.tobytes())
                at, done = place, done + len(fact)
            _copy(background, sink, (int(borders[-1]) - at) * self.dtype.itemsize)
        asked = self.line(question.question)
        sink.write(asked.tobytes())
        return Made(int(borders[-1]) + done + len(asked), begins)

    def _background(self, budget: int, rng: np.random.Generator, sink: Any) -> NDArray[np.int64]:
        """Write `budget` tokens of sentences; returns the borders between them, from 0 on."""
        borders = [0]
        lines = self.books.lines(rng)
        useless = 0
        while (left := budget - borders[-1]) > SHORTEST:
            ids = self.line(next(lines))
            useless = 0 if len(ids) >= SHORTEST else useless + 1
            if useless > LONGEST:
                raise UserError(f"--text: {LONGEST:,} sentences in a row of less than {SHORTEST} tokens; give books")
            if len(ids) < SHORTEST:
                continue
            if len(ids) > left:
                ids = self._cut(ids, left)
            sink.write(ids.tobytes())
            borders.append(borders[-1] + len(ids))
            if len(ids) == left or left - len(ids) <= SHORTEST:
                break
        return np.asarray(borders)

    def _cut(self, ids: NDArray[Any], length: int) -> NDArray[Any]:
        """A line's beginning as a line of at most `length` tokens."""
        end = self.line("")
        for kept in range(length - len(end), -1, -1):
            data = self.tokenizer.decode_bytes(ids[:kept].tolist())
            try:
                data.decode("utf-8")
            except UnicodeDecodeError:  # inside a character
                continue
            return np.concatenate([ids[:kept], end])
        return end


def _copy(source: Any, sink: IO[bytes], size: int) -> None:
    while size:
        block = source.read(min(size, BLOCK))
        sink.write(block)
        size -= len(block)


def parse_length(name: str) -> int:
    """`0k`, `4k`, `1M`, or a plain number of tokens."""
    match = re.fullmatch(r"(\d+)([kM]?)", name)
    if not match:
        raise UserError(f"--lengths {name!r}: must be a number of tokens such as 0k, 500, 4k or 1M")
    return int(match[1]) * {"": 1, "k": 1_000, "M": 1_000_000}[match[2]]
