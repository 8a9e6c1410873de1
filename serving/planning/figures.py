"""What a plan is computed from: seconds and bytes of one engine, measured on the machine that it is to run on.

pmi plan --preset small --measure --figures figures.json ...       measures and keeps them
"""

import itertools
import json
import statistics
from pathlib import Path

from pydantic import Field, field_validator

from lm.config_files import Schema, read_mapping, validate
from lm.data.files import write_atomically
from lm.errors import UserError

RESULTS = Path(__file__).parent.parent.parent / "benchmarks" / "results"
"""Where a checkout keeps what was measured."""


class Figures(Schema):
    """One engine of one model on one machine, sessions in a store."""

    preset: str
    machine: str
    """Processor, torch and threads that these were measured with."""
    segment: int = Field(ge=1)
    layers: int = Field(ge=1)
    width: int = Field(ge=1)
    step: dict[int, float]
    """Seconds of a step while so many lanes decode, what the journal takes from it included."""
    read: dict[int, float]
    """Seconds to read so many tokens (of a prompt, or of a tail) within a segment."""
    open: dict[int, list[float]]
    """While so many lanes decode: seconds to take a session from the store and to hand its turn from thread to thread, several
    times."""
    commit: dict[int, list[float]]
    """Seconds of the journal's transactions, by the number of sessions in them, several times."""
    stall: dict[int, float]
    """While so many lanes decode: seconds that they lose when a turn is opened, begun and ended, its reading aside: all threads
    of a process share one interpreter."""
    snapshot_bytes: int = Field(ge=0)
    session_bytes: int = Field(ge=0)
    """What a session of several segments occupies in the store: its row and the snapshots it retains."""
    lane_bytes: int = Field(ge=0)
    """State of one lane in memory."""
    weight_bytes: int = Field(ge=0)
    resident_bytes: int = Field(ge=0)
    """Of a process with the model and no lane."""

    @field_validator("step", "read")
    @classmethod
    def _has_seconds(cls, value: dict[int, float]) -> dict[int, float]:
        if not value or min(value) < 1 or min(value.values()) <= 0:
            raise ValueError("needs seconds above 0 for one or more numbers")
        return dict(sorted(value.items()))

    @field_validator("open", "commit")
    @classmethod
    def _has_samples(cls, value: dict[int, list[float]]) -> dict[int, list[float]]:
        if not value or not all(value.values()):
            raise ValueError("needs at least one time for one or more numbers")
        return dict(sorted(value.items()))

    def step_seconds(self, lanes: int) -> float:
        """Of a step of so many lanes."""
        return on_a_line(self.step, lanes)

    def read_seconds(self, tokens: int) -> float:
        """To read so many tokens of one segment."""
        return on_a_line(self.read, tokens)

    def stall_seconds(self, lanes: int) -> float:
        """That so many lanes lose to a turn of another."""
        return on_a_line(self.stall, lanes) if self.stall else 0.0

    def open_seconds(self, lanes: int, draw: float) -> float:
        """To open a session: one of the measured times; `draw` in [0, 1) says which."""
        return _sample(self.open, lanes, draw)

    def loop_share(self) -> float:
        """How much of the interpreter a decoding loop takes from a thread beside it: 1 would make that take twice as long."""
        idle = statistics.median(self.open[min(self.open)])
        busy = [seconds for lanes, times in self.open.items() if lanes > min(self.open) for seconds in times]
        return max(0.0, statistics.median(busy) / idle - 1) if busy else 1.0

    def commit_seconds(self, sessions: int, draw: float) -> float:
        """Of a transaction with so many sessions: one of the measured times."""
        return _sample(self.commit, sessions, draw)

    def save(self, path: Path) -> None:
        """As JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, (json.dumps(self.model_dump(), indent=2) + "\n").encode())


def pieces(tokens: int, segment: int) -> list[int]:
    """How the engine cuts tokens that begin at a boundary."""
    return [min(segment, tokens - start) for start in range(0, tokens, segment)]


def on_a_line(known: dict[int, float], at: int) -> float:
    """Between known numbers on a straight line, below them the first, beyond them on the last two's line (never falling)."""
    items = list(known.items())
    for (a, seconds_a), (b, seconds_b) in itertools.pairwise(items):
        if at <= b:
            return seconds_a + (seconds_b - seconds_a) * (max(at, a) - a) / (b - a)
    if len(items) == 1:
        return items[0][1]
    (a, seconds_a), (b, seconds_b) = items[-2:]
    return seconds_b + max(0.0, (seconds_b - seconds_a) / (b - a)) * (at - b)


def _sample(known: dict[int, list[float]], lanes: int, draw: float) -> float:
    times = known[min(known, key=lambda number: abs(number - lanes))]
    return times[int(draw * len(times))]


def load_figures(preset: str, path: Path | None) -> Figures:
    """Those in `path`, else those that a checkout has for the preset."""
    file = path or RESULTS / f"plan_{preset}.json"
    if not file.is_file():
        where = f"--figures {path}: no such file" if path else f"no figures were measured for {preset!r} yet"
        raise UserError(f"{where}; add --measure to measure them here (a minute for `small`, two for `enwik8`)")
    found = validate(Figures, read_mapping(file), str(file))
    if found.preset != preset:
        raise UserError(f"{file}: these are figures of {found.preset!r}, not of {preset!r}; add --measure, or give others")
    return found
