"""`pmi recall`: train on key-value recall at growing distances, then ask at greater ones. Results go to OUT/report.json, .png.

OUT/request.json     the settings; the same command goes on with the run
OUT/training.pt      the run; training.jsonl its figures
OUT/model            the trained model, a folder that every other command reads
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from lm import machine
from lm.config import ModelConfig, OptimiserConfig
from lm.data.files import write_atomically
from lm.evaluation.recall import CHANCE, RecallTask, correct, recall_tokenizer
from lm.evaluation.tasks_report import Curve, draw, progress, wilson
from lm.evaluation.tasks_training import Curriculum, TaskBatch, claim, train
from lm.model import PMI
from lm.model.pretrained import fingerprint, save_pretrained

REPORT, PICTURE = "report.json", "report.png"
ASKED = 1_000_003
"""Added to the seed where samples are drawn for evaluation: never those of training."""
LEAST = 8
"""Samples of a step at any distance; otherwise fewer as they grow longer, so that a step costs the same."""
TOKENS = 1 << 16
"""Tokens of all lanes together in one pass of an evaluation."""


@dataclass(frozen=True)
class Recall:
    """The settings of a run."""

    model: ModelConfig
    pairs: int
    queries: int
    distractors: int
    distance: int
    """The greatest that is trained at."""
    distances: list[int]
    """Those that are asked at."""
    steps: int
    lanes: int
    """Samples of a step at distance 1."""
    lr: float
    samples: int
    seed: int

    def task(self, distance: int, queries: int) -> RecallTask:
        """The task at a distance."""
        return RecallTask(self.model.segment, self.pairs, queries, distance, self.distractors)

    def stages(self) -> list[int]:
        """The distances of the curriculum: 1, 2, 4, ... and the greatest."""
        return sorted({*(2**i for i in range(self.distance.bit_length())), self.distance})


def run(settings: Recall, out: Path, device: torch.device, console: Console) -> dict[str, Any] | None:
    """Train (or go on), evaluate and report; None where a signal ended it before (what was done is kept)."""
    machine.keep_pages()
    for distance in (*settings.stages(), *settings.distances):
        settings.task(distance, settings.queries)  # complains before anything is trained
    asked = {key: value for key, value in vars(settings).items() if key not in ("model", "distances", "samples")}
    claim(out, {**asked, "model": settings.model.model_dump(mode="json")})
    tokenizer = recall_tokenizer()
    torch.manual_seed(settings.seed)
    model = PMI(settings.model).to(device)
    curriculum = Curriculum(settings.stages())
    # asking for many pairs of a sample at once costs nothing and gives as many answers to learn from
    many = min(settings.pairs, settings.model.segment // 3)

    def samples(distance: int, rng: np.random.Generator) -> TaskBatch:
        task, shortest = settings.task(distance, many), settings.task(1, many).segments
        return task.draw(max(LEAST, settings.lanes * shortest // task.segments), rng, tokenizer.bos)

    optimisation = OptimiserConfig(lr=settings.lr, warmup=50)
    if not train(model, samples, curriculum, optimisation, settings.steps, settings.seed, out, console):
        return None
    save_pretrained(model, tokenizer, out / "model")
    rows = list(evaluate(settings, model, console))
    steps = (out / "training.jsonl").read_text().count("\n")
    reached = curriculum.stages[curriculum.stage]
    short = f" ({settings.distance} was not reached)" if reached < settings.distance else ""
    result = {
        "protocol": f"{settings.pairs} pairs, {settings.distractors} distractor pairs a segment, T = {settings.model.segment}, "
        f"W = {settings.model.window}, trained at distances up to {reached} segments{short}; {settings.queries} asked of "
        "each sample, fresh samples, read with carried state; right: the likeliest token is the answer; 95 % Wilson intervals",
        "chance": CHANCE, "memory": settings.model.memory is not None, "steps": steps, "trained_accuracy": curriculum.accuracy,
        "reached": reached, "parameters": sum(p.numel() for p in model.parameters()),
        "checkpoint": fingerprint(model), "request": json.loads((out / "request.json").read_text()), "results": rows,
    }  # fmt: skip
    write_atomically(out / REPORT, (json.dumps(result, indent=2) + "\n").encode())
    picture(out, result)
    return result


@torch.no_grad()
def evaluate(settings: Recall, model: PMI, console: Console) -> Iterator[dict[str, Any]]:
    """Accuracy at each distance."""
    bos = recall_tokenizer().bos
    with progress(console, "asking", settings.samples * len(settings.distances), "samples") as advance:
        for distance in settings.distances:
            task = settings.task(distance, settings.queries)
            rng = np.random.default_rng([settings.seed + ASKED, distance])
            lanes = max(1, min(settings.samples, TOKENS // (task.segments * task.segment)))
            right = count = 0
            for first in range(0, settings.samples, lanes):
                found = correct(model, task.draw(min(lanes, settings.samples - first), rng, bos))
                right, count = right + int(found.sum()), count + found.numel()
                advance(len(found), f"at {distance} segments")
            low, high = wilson(right, count)
            yield {"distance": distance, "asked": count, "right": right, "accuracy": right / count, "low": low, "high": high}


def picture(out: Path, result: dict[str, Any]) -> None:
    """Accuracy over distance, as a PNG."""
    curve = Curve("memory on" if result["memory"] else "window only")
    for row in result["results"]:
        curve.add(str(row["distance"]), row["right"], row["asked"])
    places = [str(row["distance"]) for row in result["results"]]
    title = f"recall of {result['request']['pairs']} pairs (trained up to {result['reached']} segments)"
    draw([curve], places, result["chance"], "guessing", title, "distance in segments", out / PICTURE)
