"""Runs: killed and gone on they end with the same bits; reports come from real runs; mistakes are named."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from lm.cli import app
from lm.commands import run as run_command
from lm.config import load_model_config
from lm.data.tokenizer import ByteTokenizer
from lm.errors import UserError
from lm.model import PMI
from lm.model.pretrained import save_pretrained
from lm.reasoning import report
from lm.reasoning.build import load_data
from lm.reasoning.config import ReasonConfig
from lm.reasoning.explaining import words
from lm.reasoning.training import METRICS, RESULT, STATE, Run, read_state
from tests.reasoning.conftest import SMALL, TINY, tiny

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
QUIET = Console(quiet=True)


def trained(config: ReasonConfig, out: Path, source: Path | None, stops: tuple[int, ...] = ()) -> Run:
    """A run to its end; at each of `stops` it is left as it is saved, and another goes on."""
    data = load_data(config, source, None)
    for stop in stops:
        part = Run(config, data, 1, out, CPU)
        while part.step < stop:
            part._train_step(config.training.lr)
            part.step += 1
        part._save()
    last = Run(config, data, 1, out, CPU)
    assert last.train(QUIET, "test")
    last.finish()
    return last


def sets(*changes: str) -> list[str]:
    return [part for change in changes for part in ("--set", change)]


def arguments(task: str, *changes: str) -> list[str]:
    return sets(*SMALL[task], *TINY, *changes)


@pytest.mark.parametrize("name", ["pmi-tr", "tr"])
def test_a_run_that_was_killed_goes_on_to_the_same_bits(name: str, babi: Path, tmp_path: Path) -> None:
    """Over a border between epochs, with dropout."""
    config = tiny("babi", name, "training.steps=14", "encoder.dropout=0.1", "training.schedule=constant", "training.lr=1e-3",
                  "training.warmup=0")  # fmt: skip
    whole = trained(config, tmp_path / "whole", babi)
    parts = trained(config, tmp_path / "parts", babi, stops=(3, 11))
    for key, value in read_state(whole.out / STATE)[0].items():
        assert torch.equal(value, read_state(parts.out / STATE)[0][key]), key
    a, b = (json.loads((run.out / RESULT).read_text()) for run in (whole, parts))
    assert a["right"] == b["right"]


def test_a_process_that_gets_sigterm_saves_and_the_same_command_ends_as_if_never_stopped(tmp_path: Path) -> None:
    """It had written half a line of figures, too."""
    command = ["reason", "run", "triangles", "--model", "pmi-tr", "--cache", str(tmp_path / "cache")]
    changes = arguments("triangles", "training.steps=60", "training.evaluations=10", "encoder.memory.heads=2")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    results = []
    for name, kind in (("stopped", signal.SIGTERM), ("whole", None)):
        out = tmp_path / name
        folder = out / "triangles" / "pmi-tr" / "run-1"
        full = [*command, "--out", str(out), *changes]
        if kind is not None:
            started = [sys.executable, "-m", "lm", *full]
            process = subprocess.Popen(started, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            while not (folder / STATE).is_file() and process.poll() is None:
                time.sleep(0.02)
            process.send_signal(kind)
            assert process.wait(60) in (130, 0)
            (folder / METRICS).open("a").write('{"step": 9')
        assert run_command(app, full) == 0
        rows = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
        assert [row["step"] for row in rows] == [6 * (i + 1) for i in range(10)]
        results.append((read_state(folder / STATE)[0], [row["accuracy"] for row in rows]))
    assert results[0][1] == results[1][1]
    assert all(torch.equal(value, results[1][0][key]) for key, value in results[0][0].items())


def test_runs_of_one_seed_are_equal_and_of_another_are_not(babi: Path, tmp_path: Path) -> None:
    config = tiny("babi", "pmi-tr")
    data = load_data(config, babi, None)
    states = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        run = Run(config, data, seed, tmp_path / name, CPU)
        run.train(QUIET, "test")
        states.append(read_state(run.out / STATE)[0])
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])
    assert not torch.equal(states[0]["model.answer.weight"], states[2]["model.answer.weight"])


def test_commands_train_report_and_draw(babi: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, cache = tmp_path / "runs", str(tmp_path / "cache")
    given = ["--data", str(babi), "--cache", cache]
    changes = arguments("babi", "training.steps=8")
    made = ["reason", "run", "babi", "--model", "tr,tr-hsw-s", "--runs", "2", "--out", str(out), "--plot", *given, *changes]
    changes_hsw = sets("encoder.heads=4")
    assert run_command(app, [*made, *changes_hsw]) == 0
    printed = capsys.readouterr().out
    assert "tr-hsw-s" in printed
    assert (out / "babi" / "samples.png").stat().st_size > 5_000
    assert run_command(app, ["reason", "report", str(out)]) == 0
    text = (out / "report.md").read_text()
    assert "| tr | 2 |" in text
    assert "the paper's figures are over all 20" in text
    assert "task 1 is trained on 40 questions" in text
    assert (out / "babi.png").stat().st_size > 10_000
    outcomes = report.collect(out)
    assert report.markdown(report.collect(out / "report.json")) == report.markdown(outcomes) == text
    result = json.loads((out / "babi" / "tr" / "run-1" / RESULT).read_text())
    assert np.allclose(result["accuracy"], np.array(result["right"]) / np.array(result["count"]))
    assert sum(result["count"]) == 24
    assert run_command(app, ["reason", "look", str(out / "babi" / "tr-hsw-s" / "run-1"), "--samples", "2", *given]) == 0
    looked = json.loads((out / "babi" / "tr-hsw-s" / "run-1" / "attention.json").read_text())
    assert {entry["level"] for entry in looked} == {"working"}  # a workspace has no long-term memory
    assert looked[0]["labels"] == ["S1", "S2", "Q"]
    assert run_command(app, ["reason", "look", str(out / "babi" / "tr" / "run-1"), *given]) == 2
    assert "has no memory to look into" in capsys.readouterr().err
    assert run_command(app, [*made, *changes_hsw, "--set", "training.lr=0.5"]) == 2
    assert "config.training.lr 0.002, now 0.5" in capsys.readouterr().err


def test_a_verdict_needs_two_runs_that_are_apart() -> None:
    assert report.verdict([90, 91], [80, 89]).startswith("better")
    assert report.verdict([70, 71], [80, 89]).startswith("worse")
    assert report.verdict([85, 91], [80, 89]).startswith("no clear difference")
    assert report.verdict([90], [80, 89]).startswith("one run only")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["run", "chess"], ["task 'chess': must be one of babi, clevr, triangles, cifar"]),
        (["run", "clevr", "--model", "tr,xy", "--preset", "big"], ["--model 'xy'", "--preset 'big': must be one of cpu, paper"]),
        (["run", "babi"], ["give the data with --data PATH"]),
        (["run", "babi", "--data", "/nowhere"], ["--data /nowhere: there is no such file or folder"]),
        (["run", "babi", "--model", "cnn-pmi"], ["sees pictures through convolutions"]),
        (["run", "babi", "--tasks", "1,99"], ["data.babi.tasks.1", "got 99"]),
        (["run", "clevr", "--tasks", "1"], ["only babi has several"]),
        (["run", "clevr", "--data", "x"], ["clevr is generated and reads no data"]),
        (
            [
                "run",
                "clevr",
                "--set",
                "perception=own",
                "--set",
                "data.patch=7",
                "--set",
                "data.pictures=2",
                "--set",
                "data.held_out=1",
            ],
            ["does not divide"],
        ),
        (["run", "clevr", "--model", "tr", "--set", "encoder.memory.slots=4"], ["mixer attention has no memory"]),
        (["run", "clevr", "--set", "encoder.memory.consolidation=delta"], ["writes in an order"]),
        (["run", "clevr", "--set", "training.epochs=3"], ["give either epochs or steps"]),
        (["report", "/nowhere"], ["no finished run there"]),
        (["look", "/nowhere"], ["is not the folder of a run"]),
    ],
)
def test_mistakes_are_named(
    given: list[str], told: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    extra = ["--cache", str(tmp_path)] if given[0] == "run" else []
    assert run_command(app, ["reason", *given, *extra]) == 2
    printed = capsys.readouterr().err
    for part in told:
        assert part in printed


def test_a_damaged_state_is_named(babi: Path, tmp_path: Path) -> None:
    config = tiny("babi", "tr")
    data = load_data(config, babi, None)
    Run(config, data, 1, tmp_path, CPU)
    (tmp_path / STATE).write_bytes(b"nothing")
    with pytest.raises(UserError, match="remove it to begin this run again"):
        Run(config, data, 1, tmp_path, CPU)


def test_explain_draws_which_words_the_memory_goes_back_to(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    model = PMI(load_model_config("tiny", ["width=32", "layers=2", "segment=16", "window=0"]))
    save_pretrained(model, ByteTokenizer(), tmp_path / "model")
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat and the dog slept under the old tree behind the house")
    given = ["explain", "--checkpoint", str(tmp_path / "model"), "--text", str(text), "--out", str(tmp_path / "out")]
    assert run_command(app, [*given, "--at", "60"]) == 0
    assert "what working memory's answer goes" in capsys.readouterr().out
    found = json.loads((tmp_path / "out" / "explain.json").read_text())
    assert found["in_memory"] == 48
    assert found["target"]["text"] == text.read_text()[60]
    assert [word["text"] for word in found["words"]][:3] == ["the", "cat", "sat"]
    for level in ("working", "long_term"):
        assert sum(found["histogram"][level]) == pytest.approx(1, abs=0.1)  # BOS has a share, and is no word
        assert all(share == 0 for share in found["layers"][0][level][48:])
    assert (tmp_path / "out" / "explain.png").stat().st_size > 10_000
    for at, told in (("5", "nothing is in memory before the first segment of 16 tokens"), ("900", "0 to 75")):
        assert run_command(app, [*given, "--at", at]) == 2
        assert told in capsys.readouterr().err


def test_words_end_where_white_space_does() -> None:
    tokenizer = ByteTokenizer()
    assert words(tokenizer, [256, *tokenizer.encode("ab  c\nd")]) == [(1, 5, "ab"), (5, 7, "c"), (7, 8, "d")]


def test_the_page_holds_what_was_measured() -> None:
    from benchmarks.reasoning import PAGE, page

    assert page(PAGE.read_text()) == PAGE.read_text(), "run python -m benchmarks.reasoning --page"
