"""How things are compared on a noisy machine: in turns, in one process, as ratios with their spread."""

import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Ratio:
    """A ratio measured round by round: median, and the quartiles of the rounds."""

    median: float
    low: float
    high: float
    rounds: int

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f}-{self.high:.3f})"


def ratio(ours: list[float], theirs: list[float]) -> Ratio:
    """How many times faster `ours` is than `theirs`, from seconds of the same rounds: theirs / ours."""
    rounds = [b / a for a, b in zip(ours, theirs, strict=True)]
    low, median, high = statistics.quantiles(rounds, n=4, method="inclusive")
    return Ratio(median, low, high, len(rounds))


def in_turns(contenders: dict[str, Callable[[], None]], rounds: int, warmup: int = 2) -> dict[str, list[float]]:
    """Seconds of each contender in each round; every round runs all of them, in an order that rotates."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    names = list(contenders)
    for number in range(-warmup, rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            began = time.perf_counter()
            contenders[name]()
            if number >= 0:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def save(name: str, result: dict[str, Any]) -> None:
    """Write a result with the machine it was measured on to benchmarks/results/."""
    RESULTS.mkdir(exist_ok=True)
    about = {"torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine()}
    content = {**about, **result}
    (RESULTS / f"{name}.json").write_text(json.dumps(content, indent=2, default=lambda x: asdict(x)) + "\n")
