"""What a plan is computed from: seconds and bytes of one engine, measured on the machine that it is to run on.

pmi plan --preset small --measure --figures figures.json ...       measures and keeps them
"""

import itertools
import json
from pathlib import Path

from pydantic import Field, field_validator

from lm.config import Schema, read_mapping, validate
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
    """Seconds between tokens of a stream while so many lanes decode, journal included."""
    read_call: float = Field(ge=0)
    """Seconds to read a piece of prompt (or of a tail) within a segment: so many for the call ..."""
    read_token: float = Field(ge=0)
    """... and so many for each token."""
    open: dict[int, list[float]]
    """While so many lanes decode: seconds to take a session from the store and to have its first token on disk, several times."""
    snapshot_bytes: int = Field(ge=0)
    session_bytes: int = Field(ge=0)
    """What a session of several segments occupies in the store: its row and the snapshots it retains."""
    lane_bytes: int = Field(ge=0)
    """State of one lane in memory."""
    weight_bytes: int = Field(ge=0)
    resident_bytes: int = Field(ge=0)
    """Of a process with the model and no lane."""

    @field_validator("step")
    @classmethod
    def _has_steps(cls, value: dict[int, float]) -> dict[int, float]:
        if not value or min(value) < 1 or min(value.values()) <= 0:
            raise ValueError("needs seconds above 0 for one or more numbers of lanes")
        return dict(sorted(value.items()))

    def step_seconds(self, lanes: int) -> float:
        """Between measured numbers of lanes on a straight line, beyond them on the last one's."""
        known = list(self.step.items())
        for (a, seconds_a), (b, seconds_b) in itertools.pairwise(known):
            if lanes <= b:
                return seconds_a + (seconds_b - seconds_a) * (max(lanes, a) - a) / (b - a)
        if len(known) == 1:
            return known[0][1]
        (a, seconds_a), (b, seconds_b) = known[-2:]
        return seconds_b + max(0.0, (seconds_b - seconds_a) / (b - a)) * (lanes - b)

    @field_validator("open")
    @classmethod
    def _has_opens(cls, value: dict[int, list[float]]) -> dict[int, list[float]]:
        if 0 not in value or not all(value.values()):
            raise ValueError("needs seconds for 0 lanes, and at least one for each number of lanes")
        return dict(sorted(value.items()))

    def open_seconds(self, lanes: int, draw: float) -> float:
        """One of the measured times, at the nearest number of lanes; `draw` in [0, 1) says which."""
        times = self.open[min(self.open, key=lambda known: abs(known - lanes))]
        return times[int(draw * len(times))]

    def read_seconds(self, tokens: int) -> float:
        """To read so many tokens of one segment."""
        return self.read_call + self.read_token * tokens

    def save(self, path: Path) -> None:
        """As JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, (json.dumps(self.model_dump(), indent=2) + "\n").encode())


def load_figures(preset: str, path: Path | None) -> Figures:
    """Those in `path`, else those that a checkout has for the preset."""
    file = path or RESULTS / f"plan_{preset}.json"
    if not file.is_file():
        where = f"--figures {path}: no such file" if path else f"no figures were measured for {preset!r} yet"
        raise UserError(f"{where}; add --measure to measure them here (seconds for `small`, a minute for the largest)")
    found = validate(Figures, read_mapping(file), str(file))
    if found.preset != preset:
        raise UserError(f"{file}: these are figures of {found.preset!r}, not of {preset!r}; add --measure, or give others")
    return found
