"""What the tasks have in common when they report: intervals, progress, pictures."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

LINES = 10.0
"""Seconds between lines of progress where there is no terminal."""


def wilson(correct: int, count: int, z: float = 1.959964) -> tuple[float, float]:
    """The Wilson score interval of a share (95 % by default)."""
    if not count:
        return 0.0, 1.0
    share, weight = correct / count, z * z / count
    middle = (share + weight / 2) / (1 + weight)
    half = z / (1 + weight) * math.sqrt(share * (1 - share) / count + weight / (4 * count))
    return max(0.0, min(share, middle - half)), min(1.0, max(share, middle + half))  # share: rounding at 0 and 1


@contextmanager
def progress(console: Console, verb: str, total: int, unit: str, done: int = 0) -> Iterator[Callable[[int, str], None]]:
    """A bar on a terminal, a line every ten seconds elsewhere. Gives `advance(amount, what)`."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    began = said = time.monotonic()
    start = done
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(verb, total=max(1, total), completed=done)

        def advance(amount: int, what: str) -> None:
            nonlocal said, done
            done += amount
            speed = (done - start) / max(1e-9, time.monotonic() - began)
            shown = f"{speed:,.0f}" if speed >= 10 else f"{speed:.2g}"
            bar.update(task, completed=done, description=f"{verb} {what}  {shown} {unit}/s")
            if not console.is_terminal and time.monotonic() - said > LINES:
                said = time.monotonic()
                console.print(
                    f"{verb} {what}: {done:,} of {total:,} {unit} ({done / max(1, total):.0%}), {shown} {unit}/s",
                    markup=False, highlight=False, soft_wrap=True,
                )  # fmt: skip

        yield advance


class Curve:
    """Shares with their intervals at some places, under a name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.points: list[tuple[str, int, int]] = []

    def add(self, place: str, correct: int, count: int) -> None:
        """One more point."""
        self.points.append((place, correct, count))


def draw(curves: list[Curve], places: list[str], chance: float, guess: str, title: str, xlabel: str, out: Path) -> None:
    """Accuracy over places, one line a curve, with 95 % Wilson intervals, to a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(1.2 + 0.9 * max(5, len(places)), 4.2))
    shift = 0.4 / max(1, len(curves))
    for number, curve in enumerate(curves):
        x, y, low, high = [], [], [], []
        for place, correct, count in curve.points:
            share, (a, b) = correct / count, wilson(correct, count)
            x.append(places.index(place) + shift * (number - (len(curves) - 1) / 2))
            y.append(share)
            low.append(max(0.0, share - a))
            high.append(max(0.0, b - share))
        bars: Any = [low, high]
        axis.errorbar(x, y, yerr=bars, marker="o", markersize=4, capsize=2, linewidth=1.2, label=curve.name)
    axis.axhline(chance, color="grey", linestyle="--", linewidth=1, label=f"{guess} ({chance:.3f})")
    axis.set_xticks(range(len(places)), places)
    axis.set(xlabel=xlabel, ylabel="accuracy", ylim=(-0.03, 1.05), title=title)
    axis.grid(alpha=0.3)
    axis.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    figure.savefig(out, dpi=130, bbox_inches="tight")
    pyplot.close(figure)
