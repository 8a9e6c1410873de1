"""Pictures: samples of a task, curves of runs, and what the readings of a model attend to."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lm.reasoning.encoder import Reasoner
from lm.reasoning.report import Outcome
from lm.reasoning.tasks.clevr import question_text
from lm.reasoning.tasks.dataset import Dataset

ACROSS = 4


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


def draw_sample(axis: Any, dataset: Dataset, split: str, row: int) -> None:
    """One sample on an axis: a picture, or a story's last sentences."""
    part = dataset.splits[split]
    right = dataset.answers[int(part.answers[row])] if part.answers[row] >= 0 else "(not among the answers)"
    inputs, _ = dataset.batch(split, np.array([row]), torch.device("cpu"))
    axis.axis("off")
    if "picture" in inputs:
        picture = inputs["picture"][0].numpy()
        axis.imshow(picture.squeeze(-1) if picture.shape[-1] == 1 else picture, cmap="gray", interpolation="nearest")
        asked = question_text(inputs["question"][0].numpy()) if "question" in inputs else ""
        axis.set_title(textwrap.fill(f"{asked} {right}".strip(), 48), fontsize=9)
        return
    lines = [*story(dataset, split, row)[-12:], f"-> {right}"]
    axis.text(0, 1, "\n".join(textwrap.fill(line, 48) for line in lines), va="top", fontsize=8, transform=axis.transAxes)
    axis.set_title(dataset.groups[int(part.groups[row])], fontsize=9)


def story(dataset: Dataset, split: str, row: int) -> list[str]:
    """A bAbI sample in words: its sentences, then its question."""
    words = ["", *dataset.about["text"]]
    inputs = dataset.splits[split].inputs
    first, length = int(inputs["start"][row]), int(inputs["length"][row])
    numbers = [*dataset.tables["story"][first : first + length], inputs["question"][row]]
    return [" ".join(words[word] for word in dataset.tables["sentences"][number] if word) for number in numbers]


def curves(outcomes: Sequence[Outcome], path: Path) -> None:
    """Validation accuracy against iterations of one task's runs: a panel a group, a line a model, its runs as a band."""
    pyplot = _pyplot()
    runs = [outcome for outcome in outcomes if outcome.curve]
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
    figure.suptitle(f"{runs[0].task}: mean of the runs, band from worst to best; dashed: the usual answer")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


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
        found.append({"row": row, "labels": labels, "level": level, "layers": [weights[0].tolist() for weights in looks]})
    layers, tall = len(found[0]["layers"]), max(len(entry["labels"]) for entry in found)
    height = min(9.0, max(2.6, 0.17 * tall))
    figure, axes = pyplot.subplots(
        len(found), layers + 1, figsize=(3.4 + 1.9 * layers, height * len(found)), squeeze=False,
        gridspec_kw={"width_ratios": [1.9, *[1] * layers]},
    )  # fmt: skip
    for down, entry in enumerate(found):
        draw_sample(axes[down, 0], dataset, "test", entry["row"])
        for layer, weights in enumerate(entry["layers"]):
            axis = axes[down, layer + 1]
            axis.imshow(np.array(weights), aspect="auto", cmap="Blues", vmin=0, interpolation="nearest")
            axis.set_title(f"layer {layer + 1}, to {np.max(weights):.2f}", fontsize=8)
            axis.set_xticks(range(len(weights[0])), [str(slot + 1) for slot in range(len(weights[0]))], fontsize=6)
            some = range(0, len(entry["labels"]), max(1, len(entry["labels"]) // 40))
            axis.set_yticks(list(some), [entry["labels"][i] for i in some] if layer == 0 else [], fontsize=6)
    figure.suptitle(f"attention of inputs (rows) over the slots of {level.replace('_', '-')} memory (columns), mean of heads",
                    fontsize=10)  # fmt: skip
    figure.tight_layout(rect=(0, 0, 1, 0.97))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return found


def names(dataset: Dataset, positions: int, token: bool) -> list[str]:
    """What a test sample's positions are called: sentences or patches, then the question, the class token."""
    last = ["Q"] * bool("story" in dataset.tables or dataset.about.get("choices")) + ["CLS"] * token
    letter = "S" if "story" in dataset.tables else "P"
    return [*(f"{letter}{i + 1}" for i in range(positions - len(last))), *last]


def chosen(dataset: Dataset, count: int) -> list[int]:
    """Test samples to look at: evenly over the groups, short stories first."""
    part = dataset.splits["test"]
    lengths = dataset.lengths("test")
    found = []
    for number in range(count):
        group = number % len(dataset.groups)
        rows = np.flatnonzero(part.groups == group)
        if lengths is not None:
            rows = rows[np.argsort(np.abs(lengths[rows] - 8), kind="stable")]
        found.append(int(rows[(number // len(dataset.groups)) * 7 % len(rows)]))
    return found
