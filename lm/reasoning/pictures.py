"""Pictures: samples of a task, curves of runs, and what the readings of a model attend to."""

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lm.reasoning.encoder import Reasoner
from lm.reasoning.report import Outcome
from lm.reasoning.tasks.clevr import PER_GROUP, question_text
from lm.reasoning.tasks.dataset import Dataset

ACROSS = 4
LINES = 12
"""Of a story that are shown, the last ones."""
FEW = 6
"""Patches across a picture that are labelled one by one."""


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def samples(dataset: Dataset, path: Path, count: int = 8) -> None:
    """Training samples with their answers, evenly chosen."""
    pyplot = _pyplot()
    rows = np.linspace(0, len(dataset.splits["train"]) - 1, count).astype(int)
    down = -(-count // ACROSS)
    figure, axes = pyplot.subplots(down, ACROSS, figsize=(4 * ACROSS, 3.6 * down), squeeze=False)
    for axis, row in zip(axes.flat, rows, strict=False):
        draw_sample(axis, dataset, "train", int(row))
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def draw_sample(axis: Any, dataset: Dataset, split: str, row: int, labels: Sequence[str] = ()) -> None:
    """One sample on an axis: a picture, or a story's last sentences; where its positions have labels, with these."""
    part = dataset.splits[split]
    right = dataset.answers[int(part.answers[row])] if part.answers[row] >= 0 else "(not among the answers)"
    inputs, _ = dataset.batch(split, np.array([row]), torch.device("cpu"))
    if "picture" in inputs:
        picture = inputs["picture"][0].numpy()
        axis.imshow(picture.squeeze(-1) if picture.shape[-1] == 1 else picture, cmap="gray", interpolation="nearest")
        axis.set(xticks=[], yticks=[])  # the frame stays: where a picture ends is part of what is asked
        _draw_patches(axis, picture.shape[0], [label for label in labels if label.startswith("P")])
        asked = question_text(inputs["question"][0].numpy()) if "question" in inputs else ""
        axis.set_title(textwrap.fill(f"{asked} {right}".strip(), 42), fontsize=9)
        return
    axis.axis("off")
    told = story(dataset, split, row)
    lines = [f"{label}  {line}" for label, line in zip(labels, told, strict=False)] if labels else told
    text = [textwrap.fill(line, 48) for line in [*lines[-LINES:], f"-> {right}"]]
    axis.text(0, 1, "\n".join(text), va="top", fontsize=8, transform=axis.transAxes, parse_math=False)
    axis.set_title(dataset.groups[int(part.groups[row])], fontsize=9)


def _draw_patches(axis: Any, side: int, labels: Sequence[str]) -> None:
    """A square grid over a picture, with the patches' labels: of each, or of each row's first where they are small."""
    across = math.isqrt(len(labels))
    for i in range(1, across):
        for line in (axis.axhline, axis.axvline):
            line(i * side / across - 0.5, color="grey", linewidth=0.4, alpha=0.7)
    for number, label in enumerate(labels):
        down, right = divmod(number, across)
        if across <= FEW or not right:
            x, y = ((i + 0.08) * side / across - 0.5 for i in (right, down))
            axis.text(x, y, label, fontsize=5, va="top", color="grey")


def story(dataset: Dataset, split: str, row: int) -> list[str]:
    """A bAbI sample in words: its sentences, then its question."""
    words = ["", *dataset.about["text"]]
    inputs = dataset.splits[split].inputs
    first, length = int(inputs["start"][row]), int(inputs["length"][row])
    numbers = [*dataset.tables["story"][first : first + length], inputs["question"][row]]
    return [" ".join(words[word] for word in dataset.tables["sentences"][number] if word) for number in numbers]


def curves(outcomes: Sequence[Outcome], path: Path) -> bool:
    """Validation accuracy against iterations of comparable runs: a panel a group, a line a model, its runs as a band.

    False where no run has a curve, and nothing is drawn.
    """
    pyplot = _pyplot()
    runs = [outcome for outcome in outcomes if outcome.curve]
    if not runs:
        return False
    groups = ["mean of all", *runs[0].groups] if len(runs[0].groups) > 1 else runs[0].groups
    down = -(-len(groups) // 3)
    across = min(3, len(groups))
    figure, axes = pyplot.subplots(down, across, figsize=(5 * across, 3.6 * down), squeeze=False)
    for number, group in enumerate(groups):
        axis = axes.flat[number]
        place = number - (len(groups) > 1)
        for colour, model in enumerate(dict.fromkeys(run.model for run in runs)):
            _curve(axis, [run for run in runs if run.model == model], place, f"C{colour}", model)
        guess = float(np.mean(runs[0].guess)) if place < 0 else runs[0].guess[place]
        axis.axhline(guess, color="grey", linestyle="--", linewidth=1)
        axis.set(title=group, xlabel="iterations", ylabel="validation accuracy", ylim=(0, 1.03))
        axis.grid(alpha=0.3)
    for axis in axes.flat[len(groups) :]:
        axis.axis("off")
    axes.flat[0].legend(fontsize=8)
    said = "mean of the runs, band from worst to best; dashed: the usual answer (test set)"
    said = f"{runs[0].task}, preset {runs[0].preset}: {said}"
    figure.suptitle(textwrap.fill(said, 60 * across), fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True


def _curve(axis: Any, runs: list[Outcome], place: int, colour: str, model: str) -> None:
    points = min(len(run.curve) for run in runs)
    steps = [row["step"] for row in runs[0].curve[:points]]
    values = np.array([[np.mean(row["accuracy"]) if place < 0 else row["accuracy"][place] for row in run.curve[:points]]
                       for run in runs])  # fmt: skip
    axis.plot(steps, values.mean(0), color=colour, label=f"{model} ({len(runs)})", linewidth=1.4)
    if len(runs) > 1:
        axis.fill_between(steps, values.min(0), values.max(0), color=colour, alpha=0.18, linewidth=0)


def attention(model: Reasoner, dataset: Dataset, rows: Sequence[int], level: str, path: Path) -> list[dict[str, Any]]:
    """Heat maps of test samples: down the samples, across the layers; each with inputs as rows and memory slots as columns.

    Returns the same as JSON values.
    """
    pyplot, device = _pyplot(), next(model.parameters()).device
    found: list[dict[str, Any]] = []
    for row in rows:
        inputs, _ = dataset.batch("test", np.array([row]), device)
        looks = [weights for look in model.look(inputs) if (weights := getattr(look, level)) is not None]
        if not looks:
            return []
        labels = names(dataset, looks[0].shape[1], model.token is not None)
        told = story(dataset, "test", row) if "story" in dataset.tables else []
        layers = [weights[0].tolist() for weights in looks]
        found.append({"row": row, "labels": labels, "story": told, "level": level, "layers": layers})
    deep, tall = len(found[0]["layers"]), max(len(entry["labels"]) for entry in found)
    most = max(float(np.max(entry["layers"])) for entry in found)  # one scale, so that layers can be compared
    height = min(9.0, max(2.9, 0.17 * tall))
    figure, axes = pyplot.subplots(
        len(found), deep + 1, figsize=(3.9 + 1.9 * deep, height * len(found) + 0.6), squeeze=False,
        gridspec_kw={"width_ratios": [1.9, *[1] * deep]}, layout="constrained",
    )  # fmt: skip
    for down, entry in enumerate(found):
        draw_sample(axes[down, 0], dataset, "test", entry["row"], entry["labels"])
        for layer, weights in enumerate(entry["layers"]):
            axis = axes[down, layer + 1]
            drawn = axis.imshow(np.array(weights), aspect="auto", cmap="Blues", vmin=0, vmax=most, interpolation="nearest")
            axis.set_title(f"layer {layer + 1}, most {np.max(weights):.2f}", fontsize=8)
            axis.set_xticks(range(len(weights[0])), [str(slot + 1) for slot in range(len(weights[0]))], fontsize=6)
            axis.set_xlabel("slot", fontsize=7)
            some = range(0, len(entry["labels"]), max(1, len(entry["labels"]) // 40))
            axis.set_yticks(list(some), [entry["labels"][i] for i in some] if layer == 0 else [], fontsize=6)
    figure.colorbar(drawn, ax=axes, shrink=0.4, aspect=30).set_label("weight", fontsize=7)
    said = f"attention of inputs (rows) over the slots of {level.replace('_', '-')} memory (columns), mean of heads"
    figure.suptitle(textwrap.fill(said, 60 + 20 * deep), fontsize=10)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return found


def names(dataset: Dataset, positions: int, token: bool) -> list[str]:
    """What a test sample's positions are called: sentences or patches, then the question, the class token."""
    last = ["Q"] * bool("story" in dataset.tables or dataset.about.get("choices")) + ["CLS"] * token
    letter = "S" if "story" in dataset.tables else "P"
    return [*(f"{letter}{i + 1}" for i in range(positions - len(last))), *last]


def chosen(dataset: Dataset, count: int) -> list[int]:
    """Test samples to look at: evenly over the groups, stories of about 8 sentences first, each of another picture."""
    part = dataset.splits["test"]
    lengths = dataset.lengths("test")
    found = []
    for number in range(count):
        group = number % len(dataset.groups)
        rows = np.flatnonzero(part.groups == group)
        if lengths is not None:
            rows = rows[np.argsort(np.abs(lengths[rows] - 8), kind="stable")]
        # further apart than the questions of a group on one picture
        apart = number * (PER_GROUP + 1) if lengths is None else number // len(dataset.groups) * 7
        found.append(int(rows[apart % len(rows)]))
    return found
