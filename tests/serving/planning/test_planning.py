"""`pmi plan`: the arithmetic, the simulation of engines, and the calibration that feeds them."""

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.commands import run
from lm.config import load_model_config
from lm.errors import UserError
from serving.cli import app
from serving.engine.journal import PACE
from serving.planning.figures import Figures, load_figures
from serving.planning.measure import lane_counts, measure
from serving.planning.plan import Wish, capacity, make_plan
from serving.planning.simulate import NOTICED, Arrival, Cluster, Load, quantile, simulate

FIGURES = Figures(
    preset="small", machine="a made-up one", segment=128, layers=6, width=256, step={1: 0.010, 16: 0.025, 32: 0.040},
    read={1: 0.010, 128: 0.060}, open={0: [0.005]}, commit={1: [0.002]}, stall={1: 0.003}, snapshot_bytes=1_600_000,
    session_bytes=3_200_000, lane_bytes=5_000_000, weight_bytes=22_000_000, resident_bytes=300_000_000,
)  # fmt: skip
LOAD = Load(rate=4.0, prompt=50, output=60)


def test_steps_between_measured_numbers_of_lanes_lie_on_a_line() -> None:
    assert FIGURES.step_seconds(1) == 0.010
    assert FIGURES.step_seconds(16) == pytest.approx(0.025)
    assert FIGURES.step_seconds(24) == pytest.approx(0.0325)
    assert FIGURES.step_seconds(64) == pytest.approx(0.040 + 32 * 0.015 / 16)


def test_a_lone_request_takes_what_its_parts_take() -> None:
    found = simulate(FIGURES, Cluster(1, overhead=0.02), [Arrival(0.0, 1, prompt=30, output=11, tail=10)])
    assert found.first_token == [pytest.approx(0.005 + FIGURES.read_seconds(40) + 0.002 + 0.02)]
    assert (found.tokens, found.completed, found.refused) == (11, 1, 0)


def test_the_journal_hands_out_first_and_last_tokens_at_once_and_the_others_at_its_pace() -> None:
    figures = FIGURES.model_copy(update={"step": {1: 0.011}})
    found = simulate(figures, Cluster(1), [Arrival(0.0, 1, prompt=1, output=26, tail=0)])
    # 25 more tokens, 11 ms each, 9 of them in a pace of 100 ms
    assert [count for _, count in found.gaps] == [9, 9, 7]
    assert sum(seconds * count for seconds, count in found.gaps) == pytest.approx(25 * 0.011)


def test_a_turn_that_is_opened_holds_up_those_that_decode() -> None:
    decoding = Arrival(0.0, 1, prompt=1, output=200, tail=0)
    others = [Arrival(0.3 + 0.1 * number, 2 + number, prompt=1, output=1, tail=0) for number in range(10)]
    seconds = {
        stall: simulate(FIGURES.model_copy(update={"stall": {1: stall}}), Cluster(1), [decoding, *others]).seconds
        for stall in (0.0, 0.02)
    }
    assert seconds[0.02] - seconds[0.0] == pytest.approx(10 * 0.02, abs=0.001)


def test_a_prompt_delays_the_others_by_a_segment_at_most() -> None:
    decoding = Arrival(0.0, 1, prompt=1, output=200, tail=0)
    reading = Arrival(0.5, 2, prompt=10_000, output=1, tail=0)
    found = simulate(FIGURES, Cluster(1), [decoding, reading])
    assert found.gap_at(1.0) <= PACE + FIGURES.step_seconds(1) + FIGURES.read_seconds(128)
    assert found.completed == 2


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000), replicas=st.integers(1, 4), lanes=st.integers(1, 8), queue=st.integers(0, 8),
    failures=st.lists(st.tuples(st.floats(0, 20), st.integers(0, 3)), max_size=4),
)  # fmt: skip
def test_every_request_is_completed_or_refused_whatever_fails(
    seed: int, replicas: int, lanes: int, queue: int, failures: list[tuple[float, int]]
) -> None:
    arrivals = LOAD.arrivals(20.0, FIGURES.segment, random.Random(seed))
    found = simulate(FIGURES, Cluster(replicas, lanes, queue), arrivals, failures)
    assert found.completed + found.refused == len(arrivals)
    assert len(found.first_token) <= len(arrivals)
    assert all(first > 0 for first in found.first_token)
    if not found.refused:
        assert found.tokens == sum(arrival.output for arrival in arrivals)


def test_a_killed_replicas_streams_wait_for_their_lease_and_go_on() -> None:
    arrivals = [Arrival(0.0, number, prompt=1, output=400, tail=0) for number in range(8)]
    calm = simulate(FIGURES, Cluster(2), arrivals)
    killed = simulate(FIGURES, Cluster(2, lease=4.0), arrivals, [(1.0, 0)])
    assert calm.gap_at(1.0) < 1.0
    assert 4.0 + NOTICED < killed.gap_at(1.0) < 6.0
    assert killed.taken_up == 4
    assert killed.tokens == calm.tokens == 8 * 400


def test_capacity_is_where_the_simulation_begins_to_refuse() -> None:
    most = capacity(FIGURES, LOAD, lanes=32)
    for share, overloaded in ((0.8, False), (1.5, True)):
        load = replace(LOAD, rate=most * share)
        arrivals = load.arrivals(200.0, FIGURES.segment, random.Random(0))
        assert (simulate(FIGURES, Cluster(1), arrivals).refused > 0) is overloaded


def test_a_plan_keeps_its_target_and_does_not_waste() -> None:
    wish = Wish(sessions=1_000_000, load=replace(LOAD, rate=100.0), first_token=1.0)
    made = make_plan(FIGURES, wish)
    assert made.steady.first_p95 <= 1.0
    assert made.steady.refused == 0
    assert made.replicas <= 2 + 2 * math.ceil(100 / made.per_replica)
    assert made.store_bytes == 1_000_000 * FIGURES.session_bytes
    assert made.memory_bytes == made.replicas * made.replica_bytes
    longer = make_plan(FIGURES, replace(wish, history=40_000))
    assert longer.kv.session_bytes == 2 * made.kv.session_bytes
    assert longer.store_bytes == made.store_bytes


def test_a_target_out_of_reach_is_said_so() -> None:
    with pytest.raises(UserError, match=r"first-token 0\.01"):
        make_plan(FIGURES, Wish(1000, LOAD, first_token=0.01))


def test_more_turns_than_sessions_can_take_are_refused() -> None:
    with pytest.raises(UserError, match="--sessions 5"):
        make_plan(FIGURES, Wish(5, replace(LOAD, rate=50.0)))


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(1, 5)), min_size=1), st.floats(0.01, 1.0))
def test_quantiles_of_weighted_values_are_those_of_the_values_written_out(pairs: list[tuple[float, int]], share: float) -> None:
    written = sorted(value for value, weight in pairs for _ in range(weight))
    found = quantile(pairs, share)
    assert sum(value <= found for value in written) >= share * len(written) - 1e-6
    assert sum(value < found for value in written) <= share * len(written) + 1e-6


def test_figures_are_measured_on_a_real_engine_with_a_real_store(tmp_path: Path) -> None:
    assert lane_counts(32) == [1, 4, 16, 32]
    config = load_model_config("tiny", ["dropout=0"])
    found = measure("tiny", config, lanes=2, threads=1)
    assert list(found.step) == [1, 2]
    assert list(found.read) == [1, 4, 16, 32]
    assert list(found.open) == [0, 1, 2]
    assert min(found.open[0]) > 0
    assert min(found.commit[1]) > 0
    # memory and window of `tiny`: 23 KB + 66 KB; a session retains two snapshots besides its row
    assert 85_000 < found.snapshot_bytes < 95_000
    assert 2 * found.snapshot_bytes < found.session_bytes < 3 * found.snapshot_bytes
    found.save(tmp_path / "figures.json")
    assert load_figures("tiny", tmp_path / "figures.json") == found


def test_the_command_plans_from_a_file_and_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    FIGURES.save(file)
    asked = ["plan", "--sessions", "1e6", "--rate", "20", "--preset", "small", "--figures", str(file)]
    assert run(app, [*asked, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)["plan"]
    assert plan["store_bytes"] == 3_200_000_000_000
    assert run(app, asked) == 0
    assert "1,000,000 sessions" in capsys.readouterr().out
    assert run(app, [*asked[:-1], str(tmp_path / "none.json")]) == 2
    assert "--measure" in capsys.readouterr().err
    assert run(app, ["plan", "--sessions", "1e6", "--rate", "20", "--preset", "tiny", "--figures", str(file)]) == 2
    assert "'tiny'" in capsys.readouterr().err
