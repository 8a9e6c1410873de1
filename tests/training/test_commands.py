"""`pmi train`, `pmi export`, `pmi plot` as a user runs them."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import torch
import yaml

from lm.cli import app
from lm.commands import run
from lm.machine import free_port
from lm.model.pretrained import from_pretrained

from .conftest import ROOT, Ranks, environment, job, rows, tensors
from .test_resume import train_command

PLAIN = ["training.backend=plain", "evaluation.sample=0"]


def test_every_stages_checkpoint_exports_to_a_model_folder(experiment: Path, tmp_path: Path, ranks: Ranks) -> None:
    jobs = [job(experiment, tmp_path / f"zero{stage}", "training.steps=2", stage=stage) for stage in range(4)]
    ranks(2, *jobs)
    for stage in range(4):
        out = tmp_path / f"zero{stage}"
        assert run(app, ["export", str(out), "--out", str(tmp_path / f"model{stage}")]) == 0
        model = from_pretrained(tmp_path / f"model{stage}").model
        weights = tensors(out, "weights")
        assert weights.keys() == {name for name, _ in model.named_parameters()}
        assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())
    first, *others = (from_pretrained(tmp_path / f"model{stage}").model for stage in range(4))
    for other in others:
        for a, b in zip(first.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)
    # and fine-tuning starts from one: its first loss is the continued run's, not a fresh model's
    command = train_command(experiment, tmp_path / "tuned", *PLAIN, "training.steps=2", "training.lr=1e-6")
    assert run(app, [*command, "--init-from", str(tmp_path / "model3")]) == 0
    fresh = train_command(experiment, tmp_path / "fresh", *PLAIN, "training.steps=2", "training.lr=1e-6")
    assert run(app, fresh) == 0
    assert rows(tmp_path / "tuned")[0]["loss"] < rows(tmp_path / "fresh")[0]["loss"] - 0.01


def test_a_model_of_another_shape_is_not_a_start(experiment: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(app, train_command(experiment, tmp_path / "run", *PLAIN, "training.steps=1")) == 0
    assert run(app, ["export", str(tmp_path / "run"), "--out", str(tmp_path / "model")]) == 0
    other = train_command(experiment, tmp_path / "other", *PLAIN, "model.width=64")
    assert run(app, [*other, "--init-from", str(tmp_path / "model")]) == 2
    assert "its width is 32, this run's model has 64" in capsys.readouterr().err


def test_curves_of_runs_are_drawn_to_one_picture(experiment: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, memory in (("on", []), ("off", ["model.memory=off"])):
        settings = [*PLAIN, "training.steps=4", "evaluation.interval=2", *memory]
        assert run(app, train_command(experiment, tmp_path / name, *settings)) == 0
    assert run(app, ["plot", str(tmp_path / "on"), str(tmp_path / "off"), "--out", str(tmp_path / "curves.png")]) == 0
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert run(app, ["plot", str(tmp_path)]) == 2
    assert "metrics.jsonl" in capsys.readouterr().err


def test_figures_go_to_lines_metrics_and_tensorboard(
    experiment: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["training.backend=plain", "training.steps=5", "evaluation.interval=5", "evaluation.sample=7"]
    assert run(app, train_command(experiment, tmp_path / "run", *settings)) == 0
    out = capsys.readouterr().out
    for word in ("loss", "bpc", "tokens/s", "lr", "gradient", "memory", "of peak", "left", "validation bpc", "The "):
        assert word in out
    train, validation = ([row for row in rows(tmp_path / "run") if row["kind"] == kind] for kind in ("train", "validation"))
    assert [row["step"] for row in train] == [1, 2, 3, 4, 5]
    for key in ("loss", "bpc", "tokens_per_second", "learning_rate", "gradient_norm", "memory_norm", "utilisation"):
        assert all(row[key] > 0 for row in train)
    assert len(validation) == 1
    assert validation[0]["sample"].startswith("The ")
    assert list((tmp_path / "run/tensorboard").glob("events*"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["training.segments=1"], "the memory's writer would get no gradient"),
        (["training.lanes=7"], "training.lanes: 7 lanes cannot be split into micro-batches of 2 on 1 processes"),
        (["training.deepspeed=zero9", "training.backend=deepspeed"], "neither a file nor one of"),
        (["model.vocab_size=300"], "the tokenizer of"),
        (["training.speed=9"], "unknown key"),
        (["data=/nowhere"], "/nowhere"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else None,
)
def test_what_cannot_be_trained_is_refused_with_the_reason(
    experiment: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: list[str], message: str
) -> None:
    if "training.backend=deepspeed" not in settings:
        settings = [*PLAIN, *settings]
    assert run(app, train_command(experiment, tmp_path / "run", *settings)) == 2
    assert message in capsys.readouterr().err


def test_all_that_is_wrong_with_an_experiment_is_said_at_once(
    experiment: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = ["training.backend=plain", "training.segments=1", "training.lanes=7", "data=/nowhere"]
    assert run(app, train_command(experiment, tmp_path / "run", *wrong)) == 2
    error = capsys.readouterr().err
    for part in ("no gradient", "7 lanes cannot be split", "/nowhere"):
        assert part in error
    unknown = ["training.deepspeed=zero9", "training.backend=deepspeed"]
    assert run(app, [*train_command(experiment, tmp_path / "run", *unknown), "--device", "warp"]) == 2
    error = capsys.readouterr().err
    for part in ("neither a file nor one of", "--device 'warp'"):
        assert part in error


def test_the_papers_weight_decay_is_in_its_own_presets_only_and_warned_of(
    experiment: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    decays = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / "configs/train").glob("*.yaml")}
    high = {name for name, values in decays.items() if values.get("training", {}).get("weight_decay", 0) >= 0.2}
    assert high == {"enwik8-paper", "wikitext103-paper", "pg19-paper"}
    command = train_command(experiment, tmp_path / "run", *PLAIN, "training.steps=1", "training.weight_decay=0.5")
    assert run(app, command) == 0
    assert "weight_decay 0.5 is the paper's" in " ".join(capsys.readouterr().err.split())


def test_a_deepspeed_file_may_not_decide_what_the_experiment_does(tmp_path: Path) -> None:
    from lm.errors import UserError
    from lm.training.backends import load_deepspeed

    (tmp_path / "own.json").write_text(json.dumps({"zero_optimization": {"stage": 7}, "train_batch_size": 3, "fp16": {}}))
    with pytest.raises(UserError) as caught:
        load_deepspeed(str(tmp_path / "own.json"))
    assert len(caught.value.problems) == 3


def start(command: list[str], variables: dict[str, str] | None = None) -> subprocess.Popen[str]:
    env = environment() | (variables or {})
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, cwd=ROOT, start_new_session=True
    )


def wait_for(condition, seconds: float = 300) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


def test_ctrl_c_under_a_launcher_finishes_the_step_saves_and_says_how_to_go_on(experiment: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    stage = f"training.deepspeed={experiment.parent / 'zero1.json'}"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "lm"]
    command += train_command(experiment, out, stage, "training.steps=100000", "evaluation.interval=100000")
    process = start(command)
    wait_for(lambda: (out / "metrics.jsonl").is_file() and (out / "metrics.jsonl").stat().st_size > 2000)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to the launcher and to every rank
    output, errors = process.communicate(timeout=300)
    assert process.returncode != 0
    assert "run the same command again" in errors, errors[-3000:]
    assert "saved" in output
    done = rows(out)[-1]["step"]
    assert [folder.name for folder in (out / "checkpoints").iterdir()] == [f"step-{done:08}"]


def test_prometheus_serves_the_figures_and_sigterm_saves(experiment: Path, tmp_path: Path) -> None:
    port, out = free_port(), tmp_path / "run"
    settings = ["training.backend=plain", "training.steps=100000", "training.log_interval=1"]
    command = [sys.executable, "-m", "lm", *train_command(experiment, out, *settings), "--metrics-port", str(port)]
    process = start(command)
    wait_for(lambda: (out / "metrics.jsonl").is_file() and (out / "metrics.jsonl").stat().st_size > 2000)
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
    for name in ("pmi_train_loss", "pmi_train_tokens_per_second", "pmi_train_step"):
        assert f"\n{name} " in text
    os.kill(process.pid, signal.SIGTERM)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 128 + signal.SIGTERM
    assert "run the same command again" in errors


def test_processes_that_do_not_meet_end_in_time_and_say_where(experiment: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "lm", *train_command(experiment, tmp_path / "run", "training.timeout=10")]
    alone = []
    for rank in range(2):  # each waits for the other, at another place
        where = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        alone.append((where | {"MASTER_PORT": str(free_port())}, rank))
    processes = [start(command, where) for where, _ in alone]
    for process, (where, rank) in zip(processes, alone, strict=True):
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 2, errors
        assert f"process {rank} of 2: not all met at 127.0.0.1:{where['MASTER_PORT']} within training.timeout, 10 s" in errors
        assert "Traceback" not in errors


def test_a_second_signal_ends_at_once() -> None:
    script = (
        "import os, signal, time; from lm.training import signals; s = signals.StopRequest()\n"
        "os.kill(os.getpid(), signal.SIGINT); os.kill(os.getpid(), signal.SIGINT)\n"  # a launcher's echo counts once
        "assert s.signal == signal.SIGINT; time.sleep(1.1); os.kill(os.getpid(), signal.SIGINT); time.sleep(5); print('alive')"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment(), cwd=ROOT, check=False
    )
    assert result.returncode == 128 + signal.SIGINT, result.stderr
    assert "second signal" in result.stderr
    assert "alive" not in result.stdout
