"""Resuming: bit for bit at the same number of processes, within rounding at another; never from a broken checkpoint."""

import json
from pathlib import Path

import pytest
import torch

from lm.cli import app
from lm.commands import run
from lm.errors import UserError
from lm.training import checkpoint

from .conftest import Ranks, job, losses, rows, tensors

STEPS = 8
DROPOUT = ["model.dropout=0.1", f"training.steps={STEPS}", "checkpoint.interval=4", "evaluation.sample=0"]
KINDS = ("weights", "moments", "carried")


def identical(a: Path, b: Path) -> None:
    """The newest checkpoints of two runs hold the same bits, and so do their losses."""
    assert losses(a) == losses(b)
    for kind in KINDS:
        mine, theirs = tensors(a, kind), tensors(b, kind)
        assert mine.keys() == theirs.keys()
        for name, x in mine.items():
            assert torch.equal(x, theirs[name]), name


@pytest.mark.parametrize(
    ("world", "stages"),
    [
        (1, [None, 1]),
        (2, [2, 3]),
        pytest.param(1, [0, 2, 3], marks=pytest.mark.full),
        pytest.param(2, [0, 1], marks=pytest.mark.full),
    ],
)
def test_a_killed_run_resumes_bit_for_bit_with_dropout_at_every_stage(
    experiment: Path, tmp_path: Path, ranks: Ranks, world: int, stages: list[int | None]
) -> None:
    whole = [job(experiment, tmp_path / f"whole{stage}", *DROPOUT, stage=stage) for stage in stages]
    ranks(world, *whole)
    for stage in stages:  # dies in the save behind the last step, in the middle of a file
        killed = job(experiment, tmp_path / f"killed{stage}", *DROPOUT, stage=stage)
        fault = {"step": STEPS, "rank": world - 1, "at": f"moments-{world - 1}-half"}
        assert ranks(world, {**killed, "kill": fault}, check=False).returncode != 0
        assert [folder.name for folder in checkpoint.found(tmp_path / f"killed{stage}")] == ["step-00000004"]
    ranks(world, *(job(experiment, tmp_path / f"killed{stage}", *DROPOUT, stage=stage) for stage in stages))
    for stage in stages:
        identical(tmp_path / f"whole{stage}", tmp_path / f"killed{stage}")


def test_a_checkpoint_goes_on_at_another_number_of_processes_and_another_stage(
    experiment: Path, tmp_path: Path, ranks: Ranks
) -> None:
    full = [*DROPOUT, "model.dropout=0", "training.steps=14"]
    two = [job(experiment, tmp_path / f"two{stage}", *full, stage=stage) for stage in (1, 2, 3)]
    one = [job(experiment, tmp_path / f"one{stage}", *full, stage=stage) for stage in (1, 2, 3)]
    ranks(2, *({**each, "stop": 4} for each in two))
    ranks(1, *({**each, "stop": 4} for each in one))
    one[0]["set"][0], one[1]["set"][0] = one[1]["set"][0], one[0]["set"][0]  # ZeRO-1 goes on as ZeRO-2 and the other way
    ranks(1, *two, job(experiment, tmp_path / "straight", *full))  # 2 -> 1
    ranks(2, *one)  # 1 -> 2
    wanted = losses(tmp_path / "straight")
    for each in [*two, *one]:
        found = losses(Path(each["out"]))
        assert len(found) == len(wanted) == 14
        assert max(abs(a - b) for a, b in zip(found, wanted, strict=True) if a is not None and b is not None) < 1e-5
    first, last = tensors(tmp_path / "straight", "carried"), tensors(tmp_path / "one3", "carried")
    for name, x in first.items():
        if name.startswith("lane/"):
            torch.testing.assert_close(last[name], x, atol=1e-3, rtol=1e-3)  # sums were taken in another order for 14 steps


@pytest.mark.parametrize(
    ("rank", "at", "newest"),
    [
        (1, "weights-1-half", 4),
        (0, "before rename", 4),
        (0, "after rename", 8),
        pytest.param(0, "weights-0-half", 4, marks=pytest.mark.full),
        pytest.param(1, "carried-1-half", 4, marks=pytest.mark.full),
        pytest.param(0, "manifest", 4, marks=pytest.mark.full),
    ],
)
def test_a_rank_killed_at_any_moment_of_a_save_leaves_a_whole_checkpoint(
    experiment: Path, tmp_path: Path, ranks: Ranks, rank: int, at: str, newest: int
) -> None:
    fault = {"step": STEPS, "rank": rank, "at": at}
    result = ranks(2, job(experiment, tmp_path / "run", *DROPOUT, stage=2, kill=fault), check=False)
    assert result.returncode != 0
    saved, problems = checkpoint.newest_whole(tmp_path / "run")
    assert saved is not None
    assert saved.step == newest
    assert not problems


def test_rotation_keeps_the_newest_and_the_best_even_when_killed_in_it(experiment: Path, tmp_path: Path, ranks: Ranks) -> None:
    often = ["checkpoint.interval=1", "evaluation.interval=1", "training.steps=6", "evaluation.sample=0", "evaluation.tokens=100"]
    fault = {"step": 5, "rank": 0, "at": "rotation"}
    ranks(1, job(experiment, tmp_path / "run", *often, kill=fault), check=False)
    saved, problems = checkpoint.newest_whole(tmp_path / "run")
    assert saved is not None
    assert saved.step == 5
    assert not problems
    ranks(1, job(experiment, tmp_path / "run", *often))
    validations = {row["step"]: row["loss"] for row in rows(tmp_path / "run") if row["kind"] == "validation"}
    best = min(validations, key=lambda step: validations[step])
    kept = {int(folder.name.removeprefix("step-")) for folder in checkpoint.found(tmp_path / "run")}
    assert kept == {5, 6, best}


@pytest.fixture(scope="module")
def finished(experiment: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of four steps, with checkpoints at 2 and 4."""
    out = tmp_path_factory.mktemp("finished") / "run"
    settings = ["training.backend=plain", "training.steps=4", "checkpoint.interval=2", "evaluation.sample=0"]
    assert run(app, train_command(experiment, out, *settings)) == 0
    return out


def train_command(experiment: Path, out: Path, *settings: str) -> list[str]:
    return ["train", "--config", str(experiment), "--out", str(out), *(part for item in settings for part in ("--set", item))]


def copy(run: Path, to: Path) -> Path:
    for path in run.rglob("*"):
        if path.is_file():
            (to / path.relative_to(run)).parent.mkdir(parents=True, exist_ok=True)
            (to / path.relative_to(run)).write_bytes(path.read_bytes())
    return to


@pytest.mark.parametrize("damage", ["flipped", "short", "missing", "no manifest"])
def test_a_damaged_checkpoint_is_passed_over_for_an_older_whole_one(finished: Path, tmp_path: Path, damage: str) -> None:
    out = copy(finished, tmp_path / "run")
    file = checkpoint.found(out)[0] / ("manifest.json" if damage == "no manifest" else "moments-0.safetensors")
    content = file.read_bytes()
    if damage == "flipped":
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif damage == "short":
        file.write_bytes(content[: len(content) // 2])
    else:
        file.unlink()
    saved, problems = checkpoint.newest_whole(out)
    assert saved is not None
    assert saved.step == 2
    assert str(file) in problems[0] or str(file.parent) in problems[0]


def test_a_damaged_checkpoint_ahead_of_the_run_never_counts_as_its_newest(
    finished: Path, experiment: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = copy(finished, tmp_path / "run")
    (out / "checkpoints/step-00000004/moments-0.safetensors").unlink()
    (out / "checkpoints/.step-00000003.part").mkdir()  # what a killed save leaves
    settings = ["training.backend=plain", "training.steps=3", "checkpoint.keep=1", "evaluation.sample=0"]
    assert run(app, train_command(experiment, out, *settings)) == 0
    assert "passed over" in capsys.readouterr().err
    # step 2 stays only if its validation is the best; it has none
    assert [folder.name for folder in (out / "checkpoints").iterdir()] == ["step-00000003"]
    assert checkpoint.newest_whole(out)[1] == []


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("model.width=64", "model.width: the checkpoint has 32, this run 64"),
        ("training.lanes=4", "lanes: the checkpoint has 8, this run 4"),
        ("seed=4", "seed: the checkpoint has 3, this run 4"),
    ],
)
def test_what_cannot_be_resumed_is_refused_by_name(
    experiment: Path, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], setting: str, message: str
) -> None:
    out = copy(finished, tmp_path / "run")
    assert run(app, train_command(experiment, out, "training.backend=plain", "training.steps=4", setting)) == 2
    assert message in capsys.readouterr().err


def test_another_tokenizer_is_refused(
    experiment: Path, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = copy(finished, tmp_path / "run")
    for folder in checkpoint.found(out):
        manifest = json.loads((folder / "manifest.json").read_text())
        (folder / "manifest.json").write_text(json.dumps({**manifest, "tokenizer": "another"}))
    assert run(app, train_command(experiment, out, "training.backend=plain")) == 2
    assert "tokenizer: the checkpoint has 'another'" in capsys.readouterr().err


def test_resume_insists_on_a_checkpoint(experiment: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(app, [*train_command(experiment, tmp_path / "run", "training.backend=plain"), "--resume"]) == 2
    assert "has no checkpoint" in capsys.readouterr().err


def test_a_run_with_only_broken_checkpoints_is_not_started_anew(finished: Path, tmp_path: Path, experiment: Path) -> None:
    out = copy(finished, tmp_path / "run")
    for folder in checkpoint.found(out):
        (folder / "weights-0.safetensors").unlink()
    with pytest.raises(UserError, match="no whole checkpoint"):
        app(args=train_command(experiment, out, "training.backend=plain"))
