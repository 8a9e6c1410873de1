"""Runs: killed and gone on they end with the same bits; reports come from real runs; mistakes are named."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import save

from lm.cli import app
from lm.commands import run as run_command
from lm.config import load_model_config
from lm.data.pieces import PieceTokenizer
from lm.data.tokenizer import ByteTokenizer, Tokenizer
from lm.data.words import WordTokenizer
from lm.errors import UserError
from lm.model import PMI
from lm.model.pretrained import save_pretrained
from lm.reasoning import pictures, report
from lm.reasoning.build import load_data
from lm.reasoning.config import ReasonConfig
from lm.reasoning.explaining import words
from lm.reasoning.training import METRICS, REQUEST, RESULT, STATE, Run, alone, read_state
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


def test_the_same_command_ends_what_sigterm_or_sigkill_stopped_as_if_it_never_was(tmp_path: Path) -> None:
    """It had written half a line of figures, too."""
    command = ["reason", "run", "triangles", "--model", "pmi-tr", "--cache", str(tmp_path / "cache")]
    changes = arguments("triangles", "training.steps=60", "training.evaluations=10", "encoder.memory.heads=2")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    results = []
    for name, kind in (("stopped", signal.SIGTERM), ("killed", signal.SIGKILL), ("whole", None)):
        out = tmp_path / name
        folder = out / "triangles" / "pmi-tr" / "run-1"
        full = [*command, "--out", str(out), *changes]
        if kind is not None:
            started = [sys.executable, "-m", "lm", *full]
            process = subprocess.Popen(started, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            while not (folder / STATE).is_file() and process.poll() is None:
                time.sleep(0.02)
            process.send_signal(kind)
            assert process.wait(60) in (130, 0, -signal.SIGKILL)
            (folder / METRICS).open("a").write('{"step": 9')
        assert run_command(app, full) == 0
        rows = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
        assert [row["step"] for row in rows] == [6 * (i + 1) for i in range(10)]
        results.append((read_state(folder / STATE)[0], [row["accuracy"] for row in rows]))
    for state, accuracies in results[:-1]:
        assert accuracies == results[-1][1]
        assert all(torch.equal(value, results[-1][0][key]) for key, value in state.items())


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
        (["run", "babi", "--tasks", "1,,2"], ["--tasks '1,,2': must be numbers of tasks, 1 to 20"]),
        (["run", "babi", "--tasks", "2,1,2"], ["names a task twice"]),
        (["run", "clevr", "--set", "model=../../x", "--set", "data.task=babi"], ["--set model: is chosen by --model", "by TASK"]),
        (["run", "clevr", "--set", "data={task: babi, sentences: 3}"], ["data.task is babi, but the task is clevr"]),
        (["run", "clevr", "--set", "data=3"], ["must be a mapping"]),
        (["run", "clevr", "--model", "str", "--set", "encoder.heads=1"], ["sparse needs 2 heads or more"]),
        (
            ["run", "triangles", "--set", "data.pictures=20", "--set", "data.held_out=2"],
            ["training.batch: 64 is more than the training set's 20 samples; lower it"],
        ),
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
    other = torch.zeros(2)
    for damaged in (b"nothing", save({"a": other}), save({"model.token": other}, {"step": "1", "seconds": "2"})):
        Run(config, data, 1, tmp_path, CPU)
        (tmp_path / STATE).write_bytes(damaged)
        with pytest.raises(UserError, match=r"state.safetensors: .*remove (it|the file) to begin"):
            Run(config, data, 1, tmp_path, CPU)
        (tmp_path / STATE).unlink()


@pytest.mark.parametrize("damaged", [b"", b"{", b"[1, 2]", b"\xff\xfe\x00junk", b"{}"])
@pytest.mark.parametrize("name", [REQUEST, RESULT, METRICS])
def test_a_damaged_file_of_a_run_is_named(
    name: str, damaged: bytes, babi: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny("babi", "pmi-tr")
    run = trained(config, tmp_path / "babi" / "pmi-tr" / "run-1", babi)
    (run.out / name).write_bytes(damaged + b"\n" * (name == METRICS))
    commands = {
        REQUEST: ["look", str(run.out), "--data", str(babi), "--cache", str(tmp_path / "cache")],
        RESULT: ["report", str(tmp_path)],
        METRICS: ["report", str(tmp_path)],
    }
    assert run_command(app, ["reason", *commands[name]]) == 2
    assert str(run.out / name) in capsys.readouterr().err
    if name != RESULT:  # which is not read again
        with pytest.raises(UserError, match=name):
            Run(config, load_data(config, babi, None), 1, run.out, CPU)


def test_a_folder_is_one_processs_and_one_data_sets(babi: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    made = [
        "reason",
        "run",
        "babi",
        "--model",
        "pmi-tr",
        "--out",
        str(out),
        "--cache",
        str(tmp_path / "cache"),
        *arguments("babi"),
    ]
    made += sets("encoder.memory.heads=2")
    place = out / "babi" / "pmi-tr" / "run-1"
    with alone(place):
        assert run_command(app, [*made, "--data", str(babi)]) == 2
        assert f"{place}: another process is training there" in capsys.readouterr().err
    assert run_command(app, [*made, "--data", str(babi)]) == 0
    other = tmp_path / "other"
    other.mkdir()
    for path in babi.glob("*.txt"):
        (other / path.name).write_text(path.read_text().replace("Mary", "Bill"))
    capsys.readouterr()
    assert run_command(app, [*made, "--data", str(other)]) == 2
    assert "is of a run with data_fingerprint" in capsys.readouterr().err
    assert run_command(app, ["reason", "look", str(place), "--data", str(other), "--cache", str(tmp_path / "cache")]) == 2
    assert "was trained on other data than these" in capsys.readouterr().err
    request = json.loads((place / REQUEST).read_text())
    del request["data_fingerprint"]  # as runs were before they named their data
    (place / REQUEST).write_text(json.dumps(request))
    assert run_command(app, [*made, "--data", str(babi)]) == 0


def test_a_folder_where_nothing_was_trained_takes_other_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As after a mistake: the command told what to change, so the changed one must run."""
    made = ["reason", "run", "triangles", "--model", "tr", "--out", str(tmp_path / "out"), "--cache", str(tmp_path / "cache")]
    made += arguments("triangles")
    assert run_command(app, [*made, "--set", "training.lr=1e30", "--set", "training.warmup=0"]) == 2
    assert "the gradient is not finite; take a lower training.lr than 1e+30" in capsys.readouterr().err
    assert run_command(app, made) == 0


def outcome(**changes: Any) -> report.Outcome:
    row = {
        "task": "babi", "model": "pmi-tr", "preset": "cpu", "seed": 1, "parameters": 1_000, "steps": 10, "batch": 2,
        "seconds": 1.0, "groups": ["1: Single Supporting Fact", "2: Two Supporting Facts"], "right": [950, 949],
        "count": [1_000, 1_000],
        "accuracy": [0.95, 0.949], "guess": [0.1, 0.2], "notes": [], "config": {"data": {"sentences": 6}}, "curve": [],
    }  # fmt: skip
    return report.Outcome(**{**row, **changes})


def test_a_task_with_five_per_cent_of_errors_has_not_failed() -> None:
    table = report.summary([outcome()])[0]
    assert table.rows[0][table.header.index("failed tasks")] == "1"


def test_runs_of_other_tasks_data_or_budgets_are_not_averaged() -> None:
    one = {"groups": ["1: Single Supporting Fact"], "right": [10], "count": [20], "accuracy": [0.5], "guess": [0.1]}
    runs = [outcome(), outcome(seed=2), outcome(**one), outcome(steps=20), outcome(config={"data": {"sentences": 9}})]
    assert [len(alike) for alike in report.comparable(runs)] == [2, 1, 1, 1]
    assert report.comparable([outcome(), outcome(task="clevr"), outcome()])[0] == [outcome(), outcome()]
    overviews = [sheet for sheet in report.summary(runs) if sheet.header[0] == "model"]
    assert [sheet.rows[0][1] for sheet in overviews] == ["2", "1", "1", "1"]


def test_more_models_than_kinds_of_questions_stand_below_each_other() -> None:
    runs = [outcome(model=name) for name in ("pmi-tr", "tr", "tr-hsw")]
    few, many = (next(s for s in report.summary(part) if "by kind" in s.title) for part in (runs[:2], runs))
    assert few.header[1:3] == ["pmi-tr", "tr"]
    assert [row[0] for row in many.rows] == ["pmi-tr", "tr", "tr-hsw", "usual answer", "paper's PMI-TR"]
    assert many.rows[0][1:] == ["5.00", "5.10"]


def test_a_report_of_runs_without_curves_and_its_names_in_80_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ("pmi-tr", "pmi-tr-without-1", "pmi-tr-without-2", "cnn-pmi-no-long-term")
    (tmp_path / "report.json").write_text(json.dumps(report.as_json([outcome(model=name) for name in names])))
    assert run_command(app, ["reason", "report", str(tmp_path / "report.json"), "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert all(f" {name} " in printed for name in names)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["report.json", "report.md"]
    for content, told in (
        ('{"runs": []}', "holds no runs"),
        ('{"runs": [{"task": "chess"}]}', "run 1: task: must be"),
        ("x", "not JSON"),
    ):
        (tmp_path / "report.json").write_text(content)
        assert run_command(app, ["reason", "report", str(tmp_path / "report.json")]) == 2
        assert told in capsys.readouterr().err


@pytest.mark.parametrize("groups", [1, 2])
def test_curves_say_what_they_are_inside_the_picture(groups: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    point = {"step": 5, "accuracy": [0.5] * groups}
    names = ["all"] if groups == 1 else ["a", "b"]
    assert pictures.curves([outcome(curve=[point], groups=names)], tmp_path / "x.png")
    title = drawn[0].get_suptitle()
    assert title.split(",")[0] == "babi"
    box = drawn[0].texts[0].get_window_extent()
    assert box.x0 >= 0
    assert box.x1 <= drawn[0].bbox.width
    assert not pictures.curves([outcome()], tmp_path / "x.png")


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
    for at in ("5", "15", "76", "900"):
        assert run_command(app, [*given, "--at", at]) == 2
        assert f"--at {at}: must be 16 to 75" in capsys.readouterr().err
    for short in ("", "the cat"):
        text.write_text(short)
        assert run_command(app, given) == 2
        assert f"--text: has {len(short)} tokens; more than a segment (16) are needed" in capsys.readouterr().err


def test_explain_shades_what_it_did_not_trace_and_draws_any_text(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    model = PMI(load_model_config("tiny", ["width=32", "layers=2", "segment=16", "window=0"]))
    save_pretrained(model, ByteTokenizer(), tmp_path / "model")
    (tmp_path / "text.txt").write_text("日本語 costs $5 and $6, \\frac{ _x ^ " * 4)
    given = [
        "explain",
        "--checkpoint",
        str(tmp_path / "model"),
        "--text",
        str(tmp_path / "text.txt"),
        "--out",
        str(tmp_path / "out"),
    ]
    assert run_command(app, [*given, "--at", "100", "--segments", "2"]) == 0
    assert "missing" not in capfd.readouterr().err
    found = json.loads((tmp_path / "out" / "explain.json").read_text())
    assert (found["in_memory"], found["traced_from"]) == (96, 63)
    for layer in found["layers"]:  # of BOS and the text
        assert not any(layer["long_term"][:64])
        assert all(share > 0 for share in layer["long_term"][64:96])
    assert "$5" in [word["text"] for word in found["words"]]


def test_explain_of_a_model_without_memory_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_pretrained(PMI(load_model_config("tiny", ["width=32", "layers=2", "memory=null"])), ByteTokenizer(), tmp_path / "model")
    (tmp_path / "text.txt").write_text("the cat sat on the mat " * 40)
    assert run_command(app, ["explain", "--checkpoint", str(tmp_path / "model"), "--text", str(tmp_path / "text.txt")]) == 2
    assert "memory: off; give the checkpoint of a model with memory" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["bytes", "words", "pieces"])
def test_words_are_what_stands_between_white_space_whatever_the_tokens(kind: str) -> None:
    """Pieces and words bring the space before them along; bytes and some pieces are white space alone."""
    text = "old Sam sat  down,\nand Sam's cat\n"
    tokenizer: Tokenizer = ByteTokenizer()
    if kind == "words":
        tokenizer = WordTokenizer.build([text])
    elif kind == "pieces":
        tokenizer = PieceTokenizer.train([f"{text}{text}" * 20], 300, "bpe")
    ids = [tokenizer.bos, *tokenizer.encode(text)]
    spans = words(tokenizer, ids)
    assert [word for _, _, word in spans] == text.split()
    assert [first for first, _, _ in spans] == [1, *(last for _, last, _ in spans[:-1])]
    assert spans[-1][1] == len(ids)


def test_words_end_where_white_space_does() -> None:
    tokenizer = ByteTokenizer()
    assert words(tokenizer, [256, *tokenizer.encode("ab  c\nd")]) == [(1, 5, "ab"), (5, 7, "c"), (7, 8, "d")]


def test_the_page_holds_what_was_measured() -> None:
    from benchmarks.reasoning import PAGE, page

    assert page(PAGE.read_text()) == PAGE.read_text(), "run python -m benchmarks.reasoning --page"
