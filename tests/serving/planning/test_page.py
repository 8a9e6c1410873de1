"""docs/million-sessions.md follows the figures in benchmarks/results/: its tables are what `pmi plan` computes from them."""

import functools
import re
from dataclasses import replace
from pathlib import Path

import pytest

from serving.planning.cli import duration, size
from serving.planning.figures import Figures, load_figures
from serving.planning.plan import Plan, Wish, make_plan
from serving.planning.simulate import Load

PAGE = (Path(__file__).parents[3] / "docs/million-sessions.md").read_text()
SMALL = Wish(1_000_000, Load(rate=50, prompt=100, output=200))
WISHES = {"small": SMALL, "enwik8": replace(SMALL, lanes=8, first_token=10)}


@functools.cache
def planned(preset: str) -> tuple[Figures, Plan]:
    figures = load_figures(preset, None)
    return figures, make_plan(figures, WISHES[preset])


def row(name: str) -> list[str]:
    """The cells of a table's row behind its name."""
    found = re.search(rf"^\| {re.escape(name)} \|(.*)\|$", PAGE, re.M)
    assert found, name
    return [cell.strip().strip("*") for cell in found[1].split("|")]


@pytest.mark.parametrize(("column", "preset"), enumerate(WISHES))
def test_what_a_million_sessions_take_is_what_the_command_says(column: int, preset: str) -> None:
    figures, made = planned(preset)
    steady = made.steady
    expected = {
        "replicas, one core each": f"{made.replicas:,}",
        "turns per second that one carries at most": f"{made.per_replica:.3g}",
        "memory of all": size(made.memory_bytes),
        "bytes of a session (two snapshots retained)": size(figures.session_bytes),
        "store": size(made.store_bytes),
        "from the store": f"{size(made.store_reads)}/s",
        "to the store": f"{size(made.store_writes)}/s, {made.store_commits:,.0f} commits/s",
        "to clients": f"{size(made.client_bytes)}/s",
        "first token, simulated: p50, p95, p99": ", ".join(map(duration, (steady.first_p50, steady.first_p95, steady.first_p99))),
        "between tokens: p50, p95": ", ".join(map(duration, (steady.gap_p50, steady.gap_p95))),
        "with a replica killed: p95 of the first token": duration(made.degraded.first_p95),
    }
    assert {name: row(name)[column] for name in expected} == expected


@pytest.mark.parametrize("history", [500, 2_000, 20_000, 1_000_000])
def test_what_a_key_value_cache_would_take_is_what_the_command_says(history: int) -> None:
    figures, made = planned("small")
    scale = history / SMALL.history
    session, resumed = made.kv.session_bytes * scale, SMALL.load.rate * (1 - 1 / SMALL.load.turns)
    cores = resumed * made.kv.resume_seconds * scale
    expected = [size(session), size(session * SMALL.sessions), f"{size(session * resumed)}/s", f"{float(f'{cores:.2g}'):,.0f}"]
    assert row(f"{history:,}") == expected
    assert row("**this model, any**")[:2] == [size(figures.session_bytes), size(made.store_bytes)]
