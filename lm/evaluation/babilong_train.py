"""Training on BABILong samples: batches that any trainer can take, and `pmi babilong train`.

    samples = TrainingSamples(questions, books, tokenizer, lanes=16, segment=128)
    batch = samples.draw(length=4_000, rng=numpy.random.default_rng([seed, step]))

Every lane of a batch is one whole sample behind a BOS, its answer at the end; the mask is on the answer's tokens.
"""

import io
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console

from lm import machine
from lm.config import ModelConfig, OptimiserConfig
from lm.data.tokenizer import Tokenizer
from lm.errors import UserError
from lm.evaluation.babilong import Books, Maker, Question, read_questions
from lm.evaluation.tasks_training import Curriculum, TaskBatch, claim, train
from lm.model import PMI
from lm.model.pretrained import Checkpoint, fingerprint, save_pretrained


@dataclass
class _Sample:
    """A sample's ids from BOS to its answer, and by position:"""

    ids: NDArray[np.int64]
    answers: dict[int, int] = field(default_factory=dict)
    """What is to be predicted and counted."""
    hints: dict[int, int] = field(default_factory=dict)
    """What is to be predicted, but not counted."""
    facts: dict[int, int] = field(default_factory=dict)
    """Where facts end, and whom they are about: their first word."""
    asks: dict[int, int] = field(default_factory=dict)
    """Who is asked about, or told of."""


class TrainingSamples:
    """Fresh samples without end: questions and books are drawn anew for each.

    asked:  each question of the story is also asked up to so many times on the way, where its answer holds, among the sentences
            of the book: what is to be said is learned from there, but the text goes on as if nothing had been answered. Hints
            help: the answer is to be predicted from the question's last word on, and the first word of a fact from its last,
            which is what memory should hold of the text.
    tokens: samples of a step hold about so many tokens of context: fewer than `lanes` samples, where they are long.
    """

    def __init__(
        self, questions: dict[str, list[Question]], books: Books, tokenizer: Tokenizer, lanes: int, segment: int,
        asked: int = 0, tokens: int | None = None,
    ) -> None:  # fmt: skip
        self.maker, self.lanes, self.segment, self.asked, self.tokens = Maker(books, tokenizer), lanes, segment, asked, tokens
        self.bos, self.encode = tokenizer.bos, tokenizer.encode
        self.stories = [list(stories(of_task)) for of_task in questions.values()]
        self._facts: dict[Question, int] = {}

    def draw(self, length: int, rng: np.random.Generator) -> TaskBatch:
        """Samples of `length` tokens of context (0: the facts alone), each of a task drawn evenly."""
        lanes = self.lanes if self.tokens is None else min(self.lanes, max(1, self.tokens // max(1, length)))
        samples = [self._sample(length, rng) for _ in range(lanes)]
        lengths = np.array([len(sample.ids) - 1 for sample in samples])
        segments = -(-int(lengths.max()) // self.segment)
        tokens = np.full((lanes, segments * self.segment + 1), self.bos, dtype=np.int64)
        # answers, hints, facts and asks: an id where there is one
        marks = np.full((4, lanes, segments * self.segment), -1, dtype=np.int64)
        for lane, sample in enumerate(samples):
            tokens[lane, : len(sample.ids)] = sample.ids
            for mark, found in zip(marks[:, lane], (sample.answers, sample.hints, sample.facts, sample.asks), strict=True):
                mark[list(found)] = list(found.values())
        answers, hints, facts, asks = torch.from_numpy(marks)
        targets = torch.from_numpy(tokens[:, 1:].copy())
        for wanted in (answers, hints):
            targets = torch.where(wanted >= 0, wanted, targets)
        starts = torch.zeros(lanes, segments, dtype=torch.bool)
        starts[:, 0] = True
        ids = torch.from_numpy(tokens[:, :-1])
        return TaskBatch(ids, targets, answers >= 0, starts, torch.from_numpy(lengths), hints >= 0, facts, asks)

    def _sample(self, length: int, rng: np.random.Generator) -> "_Sample":
        *earlier, question = self._story(length, rng)
        lines: list[str] = []
        asked: dict[int, str] = {}  # the answers by line
        for told, fact in enumerate(question.facts, 1):
            lines.append(fact)
            for other in (*earlier, question) if self.asked else ():
                if len(other.facts) == told:
                    for _ in range(int(rng.integers(self.asked + 1))):
                        asked[len(lines)] = other.answer
                        lines.append(other.question)
        sink = io.BytesIO()
        made = self.maker.make(question._replace(facts=tuple(lines)), length, rng, sink)
        ids = np.frombuffer(sink.getvalue(), self.maker.dtype).astype(np.int64)
        answer = self.encode(question.answer + "\n")
        sample = _Sample(np.concatenate([[self.bos], ids, answer]))
        sample.answers |= {len(ids) + i: token for i, token in enumerate(answer)}
        if not self.asked:
            return sample
        # id number i stands at position i + 1, behind BOS; the end of a question's line predicts the answer's beginning
        asked[len(lines)] = question.answer
        begins = [*made.facts, made.tokens - len(self.maker.line(question.question))]
        for i, (line, begin) in enumerate(zip([*lines, question.question], begins, strict=True)):
            words, last_word = line.rsplit(" ", 1)
            end, last = begin + len(self.maker.line(line)), begin + len(self.encode(words)) + 1  # where the last word begins
            if i in asked:
                sample.answers[end] = self.encode(asked[i] + "\n")[0]
                sample.hints |= dict.fromkeys(range(last, end), sample.answers[end])
                sample.asks |= dict.fromkeys(range(last, end + 1), self.encode(last_word.rstrip("?"))[0])
            else:
                sample.hints[last] = sample.facts[last] = sample.asks[begin + 1] = self.encode(line)[0]
        return sample

    def _story(self, length: int, rng: np.random.Generator) -> tuple[Question, ...]:
        asked = self.stories[int(rng.integers(len(self.stories)))]
        for _ in range(1_000):
            story = asked[int(rng.integers(len(asked)))]
            question = story[-1]
            if question not in self._facts:
                self._facts[question] = self.maker.fact_tokens(question)
            if not length or self._facts[question] <= length:
                return story
        task = asked[0][0].task
        raise UserError(f"--lengths {length}: hardly any question of {task} has facts that short; train at greater ones")


def stories(questions: list[Question]) -> Iterator[tuple[Question, ...]]:
    """Each question behind the earlier ones of its story."""
    story: tuple[Question, ...] = ()
    for question in questions:
        goes_on = bool(story) and question.facts[: len(story[-1].facts)] == story[-1].facts
        story = (*story, question) if goes_on else (question,)
        yield story


def run(
    start: Checkpoint | ModelConfig, tokenizer: Tokenizer, facts: Path, books: Books, tasks: list[str], lengths: list[int],
    *, steps: int, lanes: int, lr: float, everything: float, seed: int, out: Path, device: torch.device, console: Console,
    asked: int = 0, tokens: int | None = None, writing: float = 0.0,
) -> dict[str, Any] | None:  # fmt: skip
    """Train on the train split at growing lengths, into OUT/model; None where a signal ended it before."""
    machine.keep_pages()
    torch.manual_seed(seed)
    model = (PMI(start) if isinstance(start, ModelConfig) else start.model).to(device)
    claim(out, {
        "start": "fresh" if isinstance(start, ModelConfig) else start.fingerprint, "model": model.config.model_dump(mode="json"),
        "tasks": tasks, "lengths": lengths, "steps": steps, "lanes": lanes, "lr": lr, "everything": everything, "seed": seed,
        "text": books.fingerprint, "tokenizer": tokenizer.fingerprint(), "asked": asked, "tokens": tokens, "writing": writing,
    })  # fmt: skip
    questions = read_questions(facts, tasks, "train")
    samples = TrainingSamples(questions, books, tokenizer, lanes, model.config.segment, asked, tokens)
    curriculum = Curriculum(lengths, pass_=0.85, over=40)
    optimisation = OptimiserConfig(lr=lr, warmup=50)
    if not train(model, samples.draw, curriculum, optimisation, steps, seed, out, console, everything, writing):
        return None
    save_pretrained(model, tokenizer, out / "model")
    reached = curriculum.stages[curriculum.stage]
    return {"reached": reached, "accuracy": curriculum.accuracy, "checkpoint": fingerprint(model)}
