"""Training on BABILong samples: batches that any trainer can take, and `pmi babilong train`.

    samples = TrainingSamples(questions, books, tokenizer, lanes=16, segment=128)
    batch = samples.draw(length=4_000, rng=numpy.random.default_rng([seed, step]))

Every lane of a batch is one whole sample behind a BOS, its answer at the end; the mask is on the answer's tokens.
"""

import io
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from lm import machine
from lm.config import ModelConfig, OptimiserConfig
from lm.data.tokenizer import Tokenizer
from lm.errors import UserError
from lm.evaluation.babilong import Books, Maker, Question, read_questions
from lm.evaluation.tasks_training import Curriculum, TaskBatch, claim, train
from lm.model import PMI
from lm.model.pretrained import Checkpoint, fingerprint, save_pretrained


class TrainingSamples:
    """Fresh samples without end: questions and books are drawn anew for each."""

    def __init__(
        self, questions: dict[str, list[Question]], books: Books, tokenizer: Tokenizer, lanes: int, segment: int
    ) -> None:
        self.maker, self.lanes, self.segment = Maker(books, tokenizer), lanes, segment
        self.bos, self.encode = tokenizer.bos, tokenizer.encode
        self.questions = list(questions.values())
        self._facts: dict[Question, int] = {}

    def draw(self, length: int, rng: np.random.Generator) -> TaskBatch:
        """Samples of `length` tokens of context (0: the facts alone), each of a task drawn evenly."""
        rows, answers = [], []
        for _ in range(self.lanes):
            question = self._question(length, rng)
            sink = io.BytesIO()
            self.maker.make(question, length, rng, sink)
            answer = self.encode(question.answer + "\n")
            ids = np.frombuffer(sink.getvalue(), self.maker.dtype).astype(np.int64)
            rows.append(np.concatenate([[self.bos], ids, answer]))
            answers.append(len(answer))
        lengths = np.array([len(row) - 1 for row in rows])
        segments = -(-int(lengths.max()) // self.segment)
        tokens = np.full((self.lanes, segments * self.segment + 1), self.bos, dtype=np.int64)
        for lane, row in enumerate(rows):
            tokens[lane, : len(row)] = row
        place = np.arange(tokens.shape[1] - 1)
        mask = (place < lengths[:, None]) & (place >= (lengths - answers)[:, None])
        starts = torch.zeros(self.lanes, segments, dtype=torch.bool)
        starts[:, 0] = True
        whole = torch.from_numpy(tokens)
        return TaskBatch(whole[:, :-1], whole[:, 1:], torch.from_numpy(mask), starts, torch.from_numpy(lengths))

    def _question(self, length: int, rng: np.random.Generator) -> Question:
        asked = self.questions[int(rng.integers(len(self.questions)))]
        for _ in range(1_000):
            question = asked[int(rng.integers(len(asked)))]
            if question not in self._facts:
                self._facts[question] = self.maker.fact_tokens(question)
            if not length or self._facts[question] <= length:
                return question
        raise UserError(f"--lengths {length}: hardly any question of {asked[0].task} has facts that short; train at greater ones")


def run(
    start: Checkpoint | ModelConfig, tokenizer: Tokenizer, facts: Path, books: Books, tasks: list[str], lengths: list[int],
    *, steps: int, lanes: int, lr: float, everything: float, seed: int, out: Path, device: torch.device, console: Console,
) -> dict[str, Any] | None:  # fmt: skip
    """Train on the train split at growing lengths, into OUT/model; None where a signal ended it before."""
    machine.keep_pages()
    torch.manual_seed(seed)
    model = (PMI(start) if isinstance(start, ModelConfig) else start.model).to(device)
    claim(out, {
        "start": "fresh" if isinstance(start, ModelConfig) else start.fingerprint, "model": model.config.model_dump(mode="json"),
        "tasks": tasks, "lengths": lengths, "steps": steps, "lanes": lanes, "lr": lr, "everything": everything, "seed": seed,
        "text": books.fingerprint,
    })  # fmt: skip
    samples = TrainingSamples(read_questions(facts, tasks, "train"), books, tokenizer, lanes, model.config.segment)
    curriculum = Curriculum(lengths, enough=0.995, over=50)
    optimisation = OptimiserConfig(lr=lr, warmup=50)
    if not train(model, samples.draw, curriculum, optimisation, steps, seed, out, console, everything):
        return None
    save_pretrained(model, tokenizer, out / "model")
    reached = curriculum.stages[curriculum.stage]
    return {"reached": reached, "accuracy": curriculum.accuracy, "checkpoint": fingerprint(model)}
