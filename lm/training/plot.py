"""`pmi plot`: curves of runs from their metrics.jsonl, side by side in one PNG."""

import json
from pathlib import Path
from typing import Any

from lm.errors import UserError
from lm.training.report import METRICS


def draw(runs: list[Path], out: Path, smooth: int) -> None:
    """Draw training and validation curves of `runs`, by step and by tokens."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    curves = {run: rows(run) for run in runs}
    units = {unit for found in curves.values() for row in found for unit in ("bpc", "ppl") if row.get(unit) is not None}
    if len(units) > 1:
        raise UserError(f"{', '.join(map(str, runs))}: some are measured in bpc, others in perplexity; plot them apart")
    unit = units.pop() if units else "loss"
    figure, axes = pyplot.subplots(1, 2, figsize=(12, 4.5), sharey=True)
    for number, (run, found) in enumerate(curves.items()):
        colour = f"C{number % 10}"
        train = [row for row in found if row["kind"] == "train" and row.get(unit) is not None]
        tokens = {row["step"]: row["tokens_total"] for row in train}
        held_out = [row for row in found if row["kind"] == "validation" and row["step"] in tokens]
        means = averaged([row[unit] for row in train], smooth)
        for axis, place in zip(axes, ({step: step for step in tokens}, tokens), strict=True):
            axis.plot([place[row["step"]] for row in train], means, color=colour, alpha=0.4, linewidth=1)
            points = [(place[row["step"]], row[unit]) for row in held_out]
            axis.plot([x for x, _ in points], [y for _, y in points], "o-", color=colour, markersize=3, label=str(run))
    for axis, name in zip(axes, ("step", "tokens"), strict=True):
        axis.set_xlabel(name)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel(f"{unit} (thin: training, dots: validation)")
    axes[0].legend()
    figure.tight_layout()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=130)
    pyplot.close(figure)


def rows(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics."""
    path = run / METRICS
    if not path.is_file():
        raise UserError(f"{run}: no {METRICS} there; give folders that were `pmi train`'s --out")
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def averaged(values: list[float], over: int) -> list[float]:
    """The mean of each value and up to `over - 1` before it."""
    result, total = [], 0.0
    for i, value in enumerate(values):
        total += value - (values[i - over] if i >= over else 0.0)
        result.append(total / min(i + 1, over))
    return result
