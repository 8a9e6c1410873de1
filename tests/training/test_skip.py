"""A loss or gradient that is not finite: every rank skips the step, memory stays, data moves on; too many end the run."""

from pathlib import Path

import torch

from .conftest import Ranks, job, losses, rows, tensors

SHORT = ["training.steps=6", "evaluation.sample=0", "checkpoint.interval=3"]


def test_one_ranks_bad_step_is_skipped_by_all(experiment: Path, tmp_path: Path, ranks: Ranks) -> None:
    jobs = []
    for where in ("loss", "gradient"):
        for stage in (0, 1, 2, 3):
            fault = {"step": 3, "rank": 1, "where": where, "until": 4}
            jobs.append(job(experiment, tmp_path / f"{where}{stage}", *SHORT, stage=stage, poison=fault))
    ranks(2, *jobs)
    for one in jobs:
        out = Path(one["out"])
        steps = [row for row in rows(out) if row["kind"] == "train"]
        assert [row["skipped"] for row in steps] == [False, False, False, True, False, False]
        assert steps[-1]["skipped_total"] == 1
        assert all(loss is not None for loss in losses(out)[4:])
        assert all(bool(x.isfinite().all()) for kind in ("weights", "moments", "carried") for x in tensors(out, kind).values())
    # every stage does the same about it
    for one in jobs[1:]:
        for a, b in zip(losses(Path(one["out"]))[4:], losses(Path(jobs[0]["out"]))[4:], strict=True):
            assert a is not None
            assert b is not None
            assert abs(a - b) < 1e-4


def test_memory_returns_to_its_value_before_a_skipped_step(experiment: Path, tmp_path: Path, ranks: Ranks) -> None:
    fault = {"step": 3, "rank": 0, "where": "gradient", "until": 4}
    four = [*SHORT, "training.steps=6", "checkpoint.keep=9", "checkpoint.interval=1"]
    ranks(1, job(experiment, tmp_path / "run", *four, poison=fault))
    from safetensors.torch import load_file

    before, after = (load_file(tmp_path / f"run/checkpoints/step-0000000{step}/carried-0.safetensors") for step in (3, 4))
    assert all(torch.equal(before[name], after[name]) for name in before if name.startswith("lane/"))
    weights = [load_file(tmp_path / f"run/checkpoints/step-0000000{step}/weights-0.safetensors") for step in (3, 4, 5)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert not all(torch.equal(weights[1][name], weights[2][name]) for name in weights[0])


def test_after_too_many_in_a_row_the_run_stops_and_says_where(experiment: Path, tmp_path: Path, ranks: Ranks) -> None:
    fault = {"step": 3, "rank": 1, "where": "loss", "until": 99}
    one = job(experiment, tmp_path / "run", *SHORT, "training.skip_limit=2", stage=2, poison=fault)
    result = ranks(2, one, check=False)
    assert result.returncode != 0
    for part in ("step 5: 2 steps in a row", "Data position", "step-00000003", "training.lr"):
        assert part in result.stderr
    assert [folder.name for folder in (tmp_path / "run/checkpoints").iterdir()] == ["step-00000003"]
