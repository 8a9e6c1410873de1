"""`pmi plot`: curves of runs from their metrics.jsonl, side by side in one PNG."""

import json
from pathlib import Path
from typing import Any

from lm.errors import UserError
from lm.training.report import METRICS

EARLY = 0.03
"""The first part of a run, in which the loss falls from its start: left out of the scale, which it would fill."""


def draw(runs: list[Path], out: Path, smooth: int) -> None:
    """Draw training and validation curves of `runs`, by step and by tokens, and how the others differ from the first."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = {run: rows(run) for run in runs}
    units = {unit for found in lines.values() for row in found for unit in ("bpc", "ppl") if row.get(unit) is not None}
    if len(units) > 1:
        raise UserError(f"{', '.join(map(str, runs))}: some are measured in bpc, others in perplexity; plot them apart")
    unit = units.pop() if units else "loss"
    curves = [Curve(run, found, unit, smooth) for run, found in lines.items()]
    several = len(curves) > 1
    figure, axes = pyplot.subplots(1, 2 + several, figsize=(16 if several else 12, 4.5))
    for number, curve in enumerate(curves):
        colour = f"C{number % 10}"
        for axis, place in zip(axes, ({step: step for step in curve.steps}, curve.tokens), strict=False):
            axis.plot([place[step] for step in curve.steps], curve.means, color=colour, alpha=0.4, linewidth=1)
            axis.plot([place[step] for step in curve.held_out], curve.held_out.values(), "o-", color=colour, markersize=3)
        last = f"  {next(reversed(curve.held_out.values())):.4g}" if curve.held_out else ""
        axes[0].plot([], [], "o-", color=colour, markersize=3, label=f"{curve.run}{last}")
    shown = [value for curve in curves for value in curve.settled]
    for axis, name in zip(axes, ("step", "tokens"), strict=False):
        axis.set_xlabel(name)
        if shown:
            margin = 0.05 * (max(shown) - min(shown)) or 0.1
            axis.set_ylim(min(shown) - margin, max(shown) + margin)
    axes[0].set_ylabel(f"{unit} (thin: training, dots: validation)")
    axes[0].legend()
    if several:
        for number, curve in enumerate(curves[1:], 1):
            trained, held_out = curve.above(curves[0], 5 * smooth)
            axes[2].plot(trained.keys(), trained.values(), color=f"C{number % 10}", alpha=0.4, linewidth=1)
            axes[2].plot(held_out.keys(), held_out.values(), "o-", color=f"C{number % 10}", markersize=3)
        axes[2].axhline(0, color="C0", linewidth=1)
        axes[2].set_xlabel("step")
        axes[2].set_ylabel(f"{unit} above {curves[0].run}")
    for axis in axes:
        axis.grid(alpha=0.3)
    figure.tight_layout()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=130)
    pyplot.close(figure)


class Curve:
    """One run's figures by step."""

    def __init__(self, run: Path, found: list[dict[str, Any]], unit: str, smooth: int) -> None:
        train = [row for row in found if row["kind"] == "train" and row.get(unit) is not None]
        self.run, self.steps = run, [row["step"] for row in train]
        self.tokens = {row["step"]: row["tokens_total"] for row in train}
        self.values: list[float] = [row[unit] for row in train]
        self.means = averaged(self.values, smooth)
        self.held_out: dict[int, float] = {
            row["step"]: row[unit] for row in found if row["kind"] == "validation" and row["step"] in self.tokens
        }

    @property
    def settled(self) -> list[float]:
        """What the scale is made for."""
        return [*self.means[int(EARLY * len(self.means)) :], *self.held_out.values()]

    def above(self, other: "Curve", smooth: int) -> tuple[dict[int, float], dict[int, float]]:
        """How much more than the other's are its figures at the steps of both, in training and in validation."""
        theirs = dict(zip(other.steps, other.values, strict=True))
        both = {step: value - theirs[step] for step, value in zip(self.steps, self.values, strict=True) if step in theirs}
        late = list(both)[int(EARLY * len(both)) :]
        means = averaged([both[step] for step in late], smooth)
        return dict(zip(late, means, strict=True)), {
            step: value - other.held_out[step] for step, value in self.held_out.items() if step in other.held_out
        }


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
