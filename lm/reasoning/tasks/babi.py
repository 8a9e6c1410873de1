"""bAbI (Weston et al., 2015): stories as sequences of sentences, all tasks in one training set, the answer a class.

A sentence is words of a vocabulary; a story is a run of rows in one table of distinct sentences. An answer of several words
("milk,football") is a class of its own.
"""

import re
from collections import Counter
from pathlib import Path

import numpy as np

from lm.errors import UserError
from lm.evaluation.babilong import Question, read_questions
from lm.reasoning.config import BabiData
from lm.reasoning.tasks.dataset import Array, Dataset, Split, cached, files_in

NAMES = (
    "Single Supporting Fact", "Two Supporting Facts", "Three Supporting Facts", "Two Arg. Relations", "Three Arg. Relations",
    "Yes/No Questions", "Counting", "Lists/Sets", "Simple Negation", "Indefinite Knowledge", "Basic Coreference", "Conjunction",
    "Compound Coref.", "Time Reasoning", "Basic Deduction", "Basic Induction", "Positional Reasoning", "Size Reasoning",
    "Path Finding", "Agent's Motivations",
)  # fmt: skip
FULL = 8_900
"""Training questions of a task in the 10k version, at least."""
WORD = re.compile(r"[a-z']+")


def load(config: BabiData, source: Path | None, cache: Path | None) -> Dataset:
    """The tasks in a folder or archive of bAbI files."""
    if source is None:
        raise UserError("babi: give the data with --data PATH: the public tasks_1-20_v1-2.tar.gz, another archive, or a folder")
    if not source.exists():
        raise UserError(f"--data {source}: there is no such file or folder")
    key = {"data": config.model_dump(), "files": files_in(source)}
    return cached(cache, "babi", key, lambda: read(config, source))


def read(config: BabiData, source: Path) -> Dataset:
    """Read without the cache."""
    names = [f"qa{task}" for task in config.tasks]
    found = {split: read_questions(source, names, split, "--data") for split in ("train", "test")}
    notes = []
    try:
        found["valid"] = read_questions(source, names, "valid", "--data")
    except UserError:  # the public archive has no such files
        notes.append("no validation files there: the last tenth of each task's training questions is held out for validation")
        found["valid"] = {}
        for name, asked in found["train"].items():
            kept = len(asked) - len(asked) // 10
            found["train"][name], found["valid"][name] = asked[:kept], asked[kept:]
    else:
        for task, name in zip(config.tasks, names, strict=True):
            train = without(found["train"][name], found["valid"][name])
            if len(train) < len(found["train"][name]):
                notes.append(f"task {task}: its validation questions were also among those of training, and were taken out there")
                found["train"][name] = train
    for task, name in zip(config.tasks, names, strict=True):
        if (count := len(found["train"][name])) < FULL:
            notes.append(f"task {task} is trained on {count:,} questions (not the 10k version)")
    words = Vocabulary()
    answers = sorted({question.answer for asked in found["train"].values() for question in asked})
    story: list[int] = []
    splits = {}
    for split in ("train", "valid", "test"):
        questions = [(number, question) for number, name in enumerate(names) for question in found[split][name]]
        splits[split] = _split(questions, config.sentences, words, answers, story)
    cut = [
        f"task {task}: {share:.1%} of the test questions rest on a sentence before the last {config.sentences}"
        for task, name in zip(config.tasks, names, strict=True)
        if (share := _unseen(found["test"][name], config.sentences)) > 0
    ]
    tables = {"story": np.array(story, dtype=np.int32), "sentences": words.table()}
    groups = [f"{task}: {NAMES[task - 1]}" for task in config.tasks]
    about = {"vocabulary": len(words.words) + 1, "words": tables["sentences"].shape[1], "sentences": config.sentences}
    about["text"] = list(words.words)
    return Dataset(splits, tables, answers, groups, notes + cut, about)


def without(train: list[Question], valid: list[Question]) -> list[Question]:
    """Training questions without those of validation, where all of them are among them.

    The public archive has each task twice: all 10,000 training questions, and the same cut into training and validation. Single
    questions that both parts have by chance stay, as the short stories of task 4 do.
    """
    left = Counter(valid)
    if left - Counter(train):
        return train
    found = []
    for question in train:
        if left[question]:
            left[question] -= 1
        else:
            found.append(question)
    return found


class Vocabulary:
    """Words and distinct sentences, numbered as they come; word 0 is none."""

    def __init__(self) -> None:
        self.words: dict[str, int] = {}
        self.sentences: dict[str, int] = {}

    def sentence(self, text: str) -> int:
        """The number of a sentence."""
        return self.sentences.setdefault(text, len(self.sentences))

    def table(self) -> Array:
        """[sentences, words] word numbers."""
        rows = [[self.words.setdefault(word, len(self.words) + 1) for word in WORD.findall(t.lower())] for t in self.sentences]
        table = np.zeros((len(rows), max(map(len, rows))), dtype=np.int16)
        for row, numbers in zip(table, rows, strict=True):
            row[: len(numbers)] = numbers
        return table


def _split(questions: list[tuple[int, Question]], most: int, words: Vocabulary, answers: list[str], story: list[int]) -> Split:
    place = {answer: number for number, answer in enumerate(answers)}
    starts, lengths, asked = [], [], []
    for _, question in questions:
        facts = question.facts[-most:]
        starts.append(len(story))
        lengths.append(len(facts))
        asked.append(words.sentence(question.question))
        story.extend(words.sentence(fact) for fact in facts)
    inputs = {
        "start": np.array(starts, dtype=np.int32), "length": np.array(lengths, dtype=np.int32),
        "question": np.array(asked, dtype=np.int32),
    }  # fmt: skip
    groups = np.array([number for number, _ in questions], dtype=np.int16)
    return Split(inputs, np.array([place.get(q.answer, -1) for _, q in questions], dtype=np.int16), groups, groups)


def _unseen(questions: list[Question], most: int) -> float:
    lost = Counter(any(i < len(q.facts) - most for i in q.supporting) for q in questions)
    return lost[True] / max(1, len(questions))
