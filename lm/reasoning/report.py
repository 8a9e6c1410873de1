"""From runs to tables: what a model reached on a task over its runs, with the paper's figures beside it.

    pmi reason report runs/reason       # report.md, report.json and a PNG of curves for each task

Every cell is computed from the runs' result.json and metrics.jsonl; report.json holds all of that and is read again by the same
command.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from lm.config_files import Schema, validate
from lm.errors import UserError
from lm.reasoning import paper
from lm.reasoning.build import build
from lm.reasoning.config import load_reason_config, reason_models
from lm.reasoning.tasks.dataset import Dataset
from lm.reasoning.training import REQUEST, RESULT, parameters, read_metrics

REPORT = "report.json"
FAILED = 0.05
"""A bAbI task with a greater error counts as failed."""
BASE = "pmi-tr"


class Outcome(Schema):
    """One finished run."""

    task: Literal["babi", "clevr", "triangles", "cifar"]
    model: str
    preset: str
    seed: int
    parameters: int
    steps: int
    batch: int
    seconds: float
    groups: list[str]
    right: list[int]
    count: list[int]
    accuracy: list[float]
    guess: list[float]
    notes: list[str]
    config: dict[str, Any]
    curve: list[dict[str, Any]]

    @property
    def mean(self) -> float:
        """Mean accuracy over groups."""
        return float(np.mean(self.accuracy))


@dataclass(frozen=True)
class Sheet:
    """A table with a title."""

    title: str
    header: list[str]
    rows: list[list[str]]

    def markdown(self) -> str:
        """As Markdown."""
        lines = [f"**{self.title}**", "", "| " + " | ".join(self.header) + " |", "|---" * len(self.header) + "|"]
        return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in self.rows)])


def collect(source: Path) -> list[Outcome]:
    """All finished runs beneath a folder, or those in a report.json."""
    if source.is_file():
        rows = _json(source, "give a report.json of `pmi reason report`, or the --out of `pmi reason run`").get("runs")
        if not isinstance(rows, list) or not rows:
            raise UserError(f"{source}: holds no runs; give a {REPORT} of `pmi reason report`, or the --out of `pmi reason run`")
        return [validate(Outcome, row, f"{source}, run {number}") for number, row in enumerate(rows, 1)]
    found = []
    for path in sorted(source.rglob(RESULT)):
        result = _json(path, "remove it, and the command of the run measures it again")
        found.append(validate(Outcome, {**result, "curve": read_metrics(path.parent)}, str(path)))
    if not found:
        raise UserError(f"{source}: no finished run there; give the --out of `pmi reason run`, or a {REPORT}")
    return found


def unfinished(source: Path) -> list[Path]:
    """The runs beneath a folder that have not come to their end."""
    return [path.parent for path in sorted(source.rglob(REQUEST)) if not (path.parent / RESULT).is_file()]


def _json(path: Path, hint: str) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except ValueError as error:
        raise UserError(f"{path}: is not JSON ({error}); {hint}") from error
    if not isinstance(found, dict):
        raise UserError(f"{path}: is no JSON mapping; {hint}")
    return found


def comparable(outcomes: Sequence[Outcome]) -> list[list[Outcome]]:
    """Runs that may stand in one table: of one task and preset, on the same data and the same questions, for as many steps."""
    found: dict[str, list[Outcome]] = {}
    tasks = [outcome.task for outcome in outcomes]
    for outcome in sorted(outcomes, key=lambda outcome: tasks.index(outcome.task)):
        data = {key: value for key, value in outcome.config.get("data", {}).items() if key != "patch"}
        alike = [outcome.task, outcome.preset, outcome.groups, outcome.count, outcome.steps, outcome.batch, data]
        found.setdefault(json.dumps(alike, sort_keys=True), []).append(outcome)
    return list(found.values())


def summary(outcomes: Sequence[Outcome]) -> list[Sheet]:
    """The tables of all tasks."""
    sheets = []
    for runs in comparable(outcomes):
        sheets += [_overview(runs), _by_group(runs), _comparison(runs)]
    return [sheet for sheet in sheets if sheet.rows]


def _models(outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    found: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        found.setdefault(outcome.model, []).append(outcome)
    return found


def _overview(outcomes: Sequence[Outcome]) -> Sheet:
    """One row a model: size, budget, and what was reached."""
    task, preset = outcomes[0].task, outcomes[0].preset
    measure = "error" if task == "babi" else "accuracy"
    header = ["model", "runs", "parameters", "paper's", "steps x batch", "s/run", f"mean {measure} %", "best"]
    header += ["failed tasks", "paper's mean error %"] if task == "babi" else ["paper's accuracy %"]
    rows = []
    for model, runs in _models(outcomes).items():
        values = [100 * (1 - run.mean if task == "babi" else run.mean) for run in runs]
        best = min(values) if task == "babi" else max(values)
        theirs = paper.lookup(paper.PARAMETERS[task], task, model) if preset == "paper" else None  # of other sizes
        row = [model, str(len(runs)), f"{runs[0].parameters / 1e6:.2f}M", f"{theirs}M" if theirs else ""]
        row += [f"{runs[0].steps:,} x {runs[0].batch}", f"{np.median([run.seconds for run in runs]):.0f}"]
        row += [spread(values), f"{best:.2f}"]
        if task == "babi":
            failed = [sum(n - right > FAILED * n for right, n in zip(run.right, run.count, strict=True)) for run in runs]
            row += [", ".join(map(str, failed)), paper.lookup(paper.BABI_ERROR, task, model) or ""]
        else:
            accuracies = paper.lookup(paper.ACCURACY[task], task, model)
            row.append(" / ".join(map(str, accuracies or [])))
        rows.append(row)
    groups = len(outcomes[0].groups)
    what = f"{groups} of 20 tasks; the paper's figures are over all 20" if task == "babi" and groups < 20 else f"preset {preset}"
    what = what if preset in what else f"{what}; preset {preset}"
    return Sheet(f"{task}: {what}", header, rows)


def _by_group(outcomes: Sequence[Outcome]) -> Sheet:
    """One row a group of questions, one column a model; or the other way round where there are more models than groups."""
    task, groups, models = outcomes[0].task, outcomes[0].groups, _models(outcomes)
    if len(groups) == 1:
        return Sheet("", [], [])
    error = task == "babi"
    header = [f"{task}, {'error' if error else 'accuracy'} %", *models, "usual answer", "paper's PMI-TR"]
    rows = []
    for number, group in enumerate(groups):
        cells = [spread([100 * abs(error - run.accuracy[number]) for run in runs]) for runs in models.values()]
        base = paper.lookup(paper.ACCURACY.get(task, {}), task, BASE) or []
        theirs = paper.BABI_BY_TASK.get(group) if error else base[number]
        rows.append([group, *cells, f"{100 * abs(error - outcomes[0].guess[number]):.1f}", str(theirs)])
    if len(models) > len(groups):
        header, *rows = ([*row] for row in zip(header, *rows, strict=True))
    return Sheet(f"{task}: by kind of question, test set", header, rows)


def _comparison(outcomes: Sequence[Outcome]) -> Sheet:
    """PMI-TR against every other model: the difference of mean accuracies, and whether the runs are apart."""
    models = _models(outcomes)
    base = next((model for model in models if model in (BASE, "pmi-tr-m", "pmi-tr-s", "pmi-tr-l")), None)
    rows = []
    for model, runs in models.items():
        if base is None or model == base:
            continue
        ours, others = [100 * run.mean for run in models[base]], [100 * run.mean for run in runs]
        rows.append([f"{base} over {model}", f"{np.mean(ours) - np.mean(others):+.2f}", verdict(ours, others)])
    return Sheet(f"{outcomes[0].task}: difference of mean accuracy, points", ["", "difference", "runs"], rows)


ABOUT: dict[str, tuple[dict[str, Any], int]] = {
    "babi": ({"vocabulary": 146, "words": 11, "sentences": 130}, 60),
    "clevr": ({"side": 75, "channels": 3, "ground": 255, "choices": [6, 7, 9]}, 21),
    "triangles": ({"side": 64, "channels": 1, "ground": 0, "choices": []}, 2),
    "cifar": ({"side": 32, "channels": 3, "ground": 127.5, "choices": []}, 10),
}
"""What a model's size depends on in each task's data: what perception is built from, and how many answers there are."""


def sizes(preset: str) -> Sheet:
    """Parameters of every model on every task, in millions, with the paper's where it gives them and the sizes are its own."""
    rows = []
    for model in reason_models():
        for size in ("", "-s", "-m", "-l") if model == BASE else ("",):
            row = [model + size]
            for task, (about, answers) in ABOUT.items():
                if task == "babi" and model.startswith("cnn"):
                    row.append("")
                    continue
                blank = Dataset({}, {}, [""] * answers, [], [], about)
                with torch.device("meta"):
                    count = parameters(build(load_reason_config(task, model + size, preset), blank, 0)) / 1e6
                theirs = paper.lookup(paper.PARAMETERS[task], task, model + size) if preset == "paper" else None
                row.append(f"{count:.2f} ({theirs:.2f})" if theirs else f"{count:.2f}")
            rows.append(row)
    return Sheet(f"millions of parameters, preset {preset} (in brackets: the paper's)", ["model", *ABOUT], rows)


def verdict(ours: Sequence[float], others: Sequence[float]) -> str:
    """In words: better or worse only where every run of one is beyond every run of the other, and there are two of each."""
    if min(len(ours), len(others)) < 2:
        return "one run only: no verdict"
    orders = math.comb(len(ours) + len(others), len(ours))  # of the runs of equal models; in two of them all are apart
    chance = f"by chance 1 time in {orders // 2}"
    if min(ours) > max(others):
        return f"better: every run above every run of the other ({chance})"
    if max(ours) < min(others):
        return f"worse: every run below every run of the other ({chance})"
    return "no clear difference: the runs overlap"


def spread(values: Sequence[float]) -> str:
    """Mean ± standard deviation over runs."""
    if len(values) == 1:
        return f"{values[0]:.2f}"
    return f"{np.mean(values):.2f}±{np.std(values, ddof=1):.2f}"


def markdown(outcomes: Sequence[Outcome]) -> str:
    """All tables and what must be known of them."""
    parts = [sheet.markdown() for sheet in summary(outcomes)]
    notes = dict.fromkeys(f"- {run.task}: {note}" for run in outcomes for note in run.notes)
    parts.append("\n".join([*notes, f"- {paper.WHY_PARAMETERS}"]))
    return "\n\n".join(parts) + "\n"


def as_json(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """What `collect` reads again."""
    return {"runs": [outcome.model_dump() for outcome in outcomes]}
