"""A folder of BABILong tasks: `pmi babilong make` writes it, `pmi babilong eval` reads it.

DIR/manifest.json       what it was made of; a folder made otherwise is refused rather than mixed
DIR/tokenizer.json ...  the tokenizer that lengths are counted in
DIR/qa1-4k.bin          the samples' ids one after the other, little-endian; BOS and answers are not in it
DIR/qa1-4k.jsonl        one line a sample: where it begins, its question, its answer, where its facts are. Written last
"""

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console

from lm.data.files import write_atomically
from lm.data.tokenizer import Tokenizer, load_tokenizer
from lm.errors import UserError
from lm.evaluation.babilong import BOOKS, Books, Maker, Question, parse_length, read_questions
from lm.evaluation.tasks_report import progress

FORMAT = 1
MANIFEST = "babilong.json"
SINGLE = 10_000_000
"""From this length on, one sample is made of each task."""


@dataclass(frozen=True)
class Sample:
    """One sample of a task at a length."""

    file: Path
    dtype: str
    start: int
    tokens: int
    question: str
    answer: str
    supporting: list[int]
    """Where the facts begin that the answer rests on, in tokens."""

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Its ids from `start` to `stop`, read from disk."""
        dtype = np.dtype(self.dtype)
        count = max(0, min(stop, self.tokens) - start)
        return np.fromfile(self.file, dtype, count, offset=(self.start + start) * dtype.itemsize)


class Tasks:
    """A folder of tasks. `sets` are its pairs of task and length, shortest first."""

    def __init__(self, folder: Path) -> None:
        path = folder / MANIFEST
        if not path.is_file():
            raise UserError(f"{folder}: no {MANIFEST} there; make tasks with `pmi babilong make ... --out {folder}`")
        self.folder, self.manifest = folder, _json(path, path.read_text())
        self.tokenizer = load_tokenizer(folder)
        names = [file.stem.split("-") for file in folder.glob("qa*-*.jsonl")]
        self.sets = sorted(((task, length) for task, length in names), key=lambda x: (parse_length(x[1]), int(x[0][2:])))
        if not self.sets:
            raise UserError(f"{folder}: no task is whole yet; run the same `pmi babilong make` again to go on")

    def samples(self, task: str, length: str) -> list[Sample]:
        """The samples of a set."""
        file = self.folder / f"{task}-{length}.bin"
        index = file.with_suffix(".jsonl")
        rows = [_json(index, line) for line in index.read_text().splitlines()]
        dtype = self.tokenizer.dtype.newbyteorder("<")
        size = sum(row["tokens"] for row in rows) * dtype.itemsize
        if not file.is_file() or file.stat().st_size != size:
            raise UserError(f"{file}: missing or not the {size:,} bytes that {task}-{length}.jsonl counts; make the tasks again")
        keys = ("start", "tokens", "question", "answer", "supporting")
        return [Sample(file, dtype.str, **{key: row[key] for key in keys}) for row in rows]

    def fingerprint(self) -> str:
        """A short hash of what the samples of all tasks were made of; with `facts` it decides every sample."""
        made = {key: value for key, value in self.manifest.items() if key != "facts"}  # those grow as tasks are added
        return hashlib.sha256(json.dumps(made, sort_keys=True).encode()).hexdigest()[:16]

    def facts(self) -> dict[str, str]:
        """For each task a short hash of the stories it asks about."""
        return {f"facts of {task}": told for task, told in self.manifest["facts"].items()}


def make(
    facts: Path, text: Path, tasks: list[str], lengths: list[str], samples: int, seed: int, split: str,
    tokenizer: Tokenizer, out: Path, console: Console, text_split: str | None = None,
) -> list[str]:  # fmt: skip
    """Make what is missing of tasks x lengths in `out`; returns notes on what was left out."""
    questions = read_questions(facts, tasks, split)
    books = Books.open(text, text_split or BOOKS[split])
    maker = Maker(books, tokenizer)
    _check_answers(questions, tokenizer)
    about = {"format": FORMAT, "seed": seed, "split": split, "samples": samples, "tokenizer": tokenizer.fingerprint()}
    told = {task: hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16] for task, asked in questions.items()}
    _begin(out, {**about, "text": books.fingerprint}, told, tokenizer)
    todo = [(task, name) for name in lengths for task in tasks if not (out / f"{task}-{name}.jsonl").is_file()]
    counts = {name: min(samples, 1) if parse_length(name) >= SINGLE else samples for name in lengths}
    total = sum(counts[name] * max(1, parse_length(name)) for _, name in todo)
    notes = []
    with progress(console, "making", total, "tokens") as advance:
        for task, name in todo:
            length = parse_length(name)
            chosen, skipped = choose(questions[task], length, counts[name], seed, maker)
            if skipped:
                notes.append(f"{task} at {name}: {skipped} question(s) left out, their facts alone are longer")
            rows, file = [], out / f"{task}-{name}.bin"
            part, start = file.with_suffix(".part"), 0
            with part.open("wb") as sink:
                for number, question in enumerate(chosen):
                    made = maker.make(question, length, sample_rng(seed, task, length, number), sink)
                    supporting = [made.facts[i] for i in question.supporting]
                    rows.append({
                        "start": start, "tokens": made.tokens, "question": question.question, "answer": question.answer,
                        "facts": made.facts, "supporting": supporting,
                    })  # fmt: skip
                    start += made.tokens
                    advance(max(1, length), f"{task} {name}")
            os.replace(part, file)
            write_atomically(file.with_suffix(".jsonl"), "".join(json.dumps(row) + "\n" for row in rows).encode())
    return notes


def sample_rng(seed: int, task: str, length: int, number: int) -> np.random.Generator:
    """What is random about a sample: its book, the place in it, the places of the facts. Not which others are made."""
    return np.random.default_rng([seed, int(task[2:]), length, number])


def choose(questions: list[Question], length: int, count: int, seed: int, maker: Maker) -> tuple[list[Question], int]:
    """`count` questions in an order that the seed decides, the same at every length; without those whose facts do not fit."""
    chosen: list[Question] = []
    skipped = 0
    task = questions[0].task
    for number in np.random.default_rng([seed, int(task[2:])]).permutation(len(questions)).tolist():
        if len(chosen) == count:
            break
        fits = length == 0 or maker.fact_tokens(questions[number]) <= length
        chosen += [questions[number]] if fits else []
        skipped += not fits
    if len(chosen) < count:
        raise UserError(
            f"--samples {count}: {task} has {len(chosen)} questions whose facts fit into {length:,} tokens "
            f"({len(questions)} in all); ask for fewer, or a greater length"
        )
    return chosen, skipped


def _json(path: Path, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise UserError(f"{path}: damaged ({error}); delete the folder and make the tasks again") from error
    return dict(value)


def _check_answers(questions: dict[str, list[Question]], tokenizer: Tokenizer) -> None:
    words = sorted({question.answer for asked in questions.values() for question in asked})
    lost = [word for word in words if tokenizer.decode(tokenizer.encode(word + "\n")).strip() != word]
    if lost:
        raise UserError(f"the tokenizer cannot spell the answers {', '.join(lost[:8])}; use one of bytes or pieces")


def _begin(out: Path, request: dict[str, Any], facts: dict[str, str], tokenizer: Tokenizer) -> None:
    path = out / MANIFEST
    had: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {**request, "facts": {}}
    other = [f"{key} {had.get(key)!r}, now {request[key]!r}" for key in request if had.get(key) != request[key]]
    other += [f"other facts of {task}" for task in facts if had["facts"].get(task, facts[task]) != facts[task]]
    if other:
        raise UserError(f"{out}: holds tasks made with {'; '.join(other)}. Choose another --out, or delete it")
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(out)
    write_atomically(path, (json.dumps({**request, "facts": had["facts"] | facts}, indent=2) + "\n").encode())
