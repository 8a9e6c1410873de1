"""Key-value recall: the task is what it says, a memory learns it, a window cannot, and a run goes on where it was ended."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.cli import app
from lm.commands import run
from lm.config import load_model_config
from lm.errors import UserError
from lm.evaluation.recall import NOISE, QUERY, SYMBOLS, VALUES, RecallTask, correct, recall_tokenizer
from lm.evaluation.tasks_training import Curriculum
from lm.model import PMI
from lm.model.pretrained import from_pretrained
from lm.model.proofs import draw_zeros, liveness

ROOT = Path(__file__).parent.parent.parent
BOS = recall_tokenizer().bos
SMALL = [
    "--segment", "16", "--window", "16", "--pairs", "4", "--distance", "4", "--distances", "4,16", "--lr", "0.005",
    "--set", "layers=1", "--set", "memory.layers=[0]", "--lanes", "48",
]  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(
    pairs=st.integers(1, 64), queries=st.integers(1, 21), distance=st.integers(1, 6), distractors=st.integers(0, 32),
    seed=st.integers(0, 2**31 - 1),
)  # fmt: skip
def test_every_query_is_of_a_key_seen_once_its_distance_before(
    pairs: int, queries: int, distance: int, distractors: int, seed: int
) -> None:
    queries, distractors = min(queries, pairs), min(distractors, SYMBOLS - pairs)
    task = RecallTask(64, pairs, queries, distance, distractors)
    batch = task.draw(3, np.random.default_rng(seed), BOS)
    assert batch.tokens.shape == (3, task.segments * 64)
    assert batch.mask.sum(1).tolist() == [queries] * 3
    for lane in range(3):
        tokens, targets = batch.tokens[lane], batch.targets[lane]
        assert tokens[0] == BOS
        for at in batch.mask[lane].nonzero().squeeze(-1).tolist():
            key = int(tokens[at])
            assert key < VALUES
            assert int(tokens[at - 1]) == QUERY
            places = [i for i in (tokens == key).nonzero().squeeze(-1).tolist() if tokens[i - 1] != QUERY]
            assert len(places) == 1, "a key is told once, and distractors are of other keys"
            assert int(tokens[places[0] + 1]) == int(targets[at])
            assert VALUES <= int(targets[at]) < NOISE
            assert at // 64 == task.segments - 1
            assert at // 64 - (2 * pairs) // 64 == distance
        between = tokens[(2 * pairs // 64 + 1) * 64 : -64]
        assert int((between < VALUES).sum()) == distractors * max(0, distance - 1)


def test_values_are_independent_of_keys_so_that_guessing_gives_one_in_64() -> None:
    batch = RecallTask(pairs=8, distance=1).draw(20_000, np.random.default_rng(0), BOS)
    answers = batch.targets[batch.mask] - VALUES
    share = torch.bincount(answers, minlength=64).float() / len(answers)
    assert 0.010 < float(share.min()) <= float(share.max()) < 0.022
    asked = batch.tokens[batch.mask]
    assert abs(float(torch.corrcoef(torch.stack([asked, answers]).float())[0, 1])) < 0.03


def test_settings_that_cannot_be_are_named_all_at_once() -> None:
    with pytest.raises(UserError) as caught:
        RecallTask(pairs=65, queries=0, distance=0, distractors=1)
    assert len(caught.value.problems) == 4


def test_a_curriculum_waits_for_each_stage_and_stays_at_the_last() -> None:
    plan = Curriculum([1, 2, 8], pass_=0.94, over=3)

    def after(*accuracies: float) -> list[int]:
        stages = []
        for accuracy in accuracies:
            plan.note(accuracy)
            stages.append(plan.stage)
        return stages

    assert after(*[0.8] * 10) == [0] * 10
    assert after(0.99, 0.99, 0.99) == [0, 0, 1]
    assert {plan.draw(np.random.default_rng(i)) for i in range(20)} == {1, 2}
    assert after(*[1.0] * 8) == [1, 1, *[2] * 6]


@pytest.mark.parametrize(("distance", "queries"), [(1, 1), (8, 4), (9, 2), (40, 5)])
def test_a_sample_of_any_distance_is_read_in_calls_of_a_few_segments_with_the_same_answers(
    monkeypatch: pytest.MonkeyPatch, distance: int, queries: int
) -> None:
    torch.manual_seed(1)
    small = ["segment=16", "window=16", f"vocab_size={recall_tokenizer().vocab_size}"]
    model = draw_zeros(PMI(load_model_config("recall", small))).eval()
    batch = RecallTask(16, 10, queries, distance).draw(3, np.random.default_rng(0), BOS)
    with torch.no_grad():
        hidden, _ = model(batch.tokens, model.initial_state(3))  # all at once
        likeliest = model.head.logits(hidden).argmax(-1)
    widths, forward = [], PMI.forward

    def watched(self: PMI, tokens: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        widths.append(tokens.shape[1])
        return forward(self, tokens, *args, **kwargs)

    monkeypatch.setattr(PMI, "forward", watched)
    assert correct(model, replace(batch, targets=likeliest)).tolist() == [[True] * queries] * 3
    assert not correct(model, replace(batch, targets=likeliest + 1)).any()
    assert max(widths) <= 8 * 16


def accuracy(out: Path) -> dict[int, float]:
    return {row["distance"]: row["accuracy"] for row in json.loads((out / "report.json").read_text())["results"]}


def test_a_memory_learns_to_recall_farther_than_trained_and_a_window_does_not(tmp_path: Path) -> None:
    command = ["recall", *SMALL, "--samples", "256"]
    assert run(app, [*command, "--steps", "110", "--out", str(tmp_path / "on")]) == 0
    on = accuracy(tmp_path / "on")
    assert on[4] > 0.8
    assert on[16] > 0.7
    assert run(app, [*command, "--steps", "110", "--memory", "off", "--out", str(tmp_path / "off")]) == 0
    off = accuracy(tmp_path / "off")
    assert off[4] < 0.08
    assert off[16] < 0.08
    assert (tmp_path / "on" / "report.png").read_bytes().startswith(b"\x89PNG")
    trained = from_pretrained(tmp_path / "on" / "model").model.eval()
    alive = liveness(trained, torch.Generator().manual_seed(0))  # on weights as training leaves them, not on drawn ones
    assert alive.passed, alive


def test_a_run_ended_by_a_signal_goes_on_to_the_same_weights(tmp_path: Path) -> None:
    command = ["recall", *SMALL, "--steps", "24", "--samples", "8"]
    assert run(app, [*command, "--out", str(tmp_path / "whole")]) == 0
    cut = tmp_path / "cut"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "lm", *command, "--out", str(cut)], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True
    )
    deadline = time.monotonic() + 120
    while not (cut / "training.jsonl").is_file() and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert "To go on, run the same command again" in process.communicate()[1]
    assert process.returncode == 130
    assert not (cut / "report.json").exists()
    steps = (cut / "training.jsonl").read_text().count("\n")
    assert steps < 24
    assert run(app, [*command, "--out", str(cut)]) == 0
    weights = [from_pretrained(folder / "model").fingerprint for folder in (cut, tmp_path / "whole")]
    assert weights[0] == weights[1]


def test_a_folder_of_other_settings_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["recall", *SMALL, "--steps", "1", "--samples", "4", "--out", str(tmp_path / "run")]
    assert run(app, command) == 0
    assert run(app, [*command, "--seed", "3"]) == 2
    assert "seed 0, now 3" in capsys.readouterr().err
    assert run(app, [*command, "--memory", "maybe", "--distances", "0,x"]) == 2
    err = capsys.readouterr().err
    assert "'maybe'" in err
    assert "'0,x'" in err
