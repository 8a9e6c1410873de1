"""Shared by the training tests: prepared data, a small experiment, and real ranks under a launcher."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from lm.cli import app
from lm.commands import run
from lm.training import checkpoint

ROOT = Path(__file__).parents[2]
TWO_NODES = str(ROOT / "deploy/train/two-nodes.sh")
EXPERIMENT: dict[str, Any] = {
    "model": "tiny",
    "overrides": [
        "width=32", "feedforward=64", "heads=2", "layers=2", "segment=16", "window=16", "memory.verbatim={rows: 50, width: 6}",
    ],
    "seed": 3,
    "training": {
        "steps": 20, "lanes": 8, "micro_batch": 2, "segments": 3, "lr": 0.003, "warmup": 4, "weight_decay": 0.1,
        "log_interval": 5,
    },
    "evaluation": {"interval": 100, "tokens": 1000, "lanes": 4, "sample": 5},
    "checkpoint": {"interval": 100, "keep": 2},
}  # fmt: skip
# a threshold of 0 shards even the smallest weight: by default a model of this size would stay whole everywhere
ZERO3 = {"stage": 3, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 20_000, "stage3_prefetch_bucket_size": 5_000}


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Many short documents of bytes, so that they start and end in different steps on different ranks."""
    folder = tmp_path_factory.mktemp("training-data")
    text = (ROOT / "lm/data/text/moby-dick.txt").read_text()
    at = 0
    for number in range(60):
        length = 150 + 97 * number % 1100
        split = "train" if number < 56 else "validation"
        (folder / "source" / split).mkdir(parents=True, exist_ok=True)
        (folder / "source" / split / f"{number}.txt").write_text(text[at : at + length])
        at += length
    source, out = str(folder / "source"), str(folder / "prepared")
    assert run(app, ["data", "prepare", "text", "--source", source, "--tokenizer", "bytes", "--out", out]) == 0
    return folder / "prepared"


@pytest.fixture(scope="session")
def experiment(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The experiment's file; beside it DeepSpeed files zero0.json .. zero3.json."""
    folder = tmp_path_factory.mktemp("experiment")
    (folder / "experiment.yaml").write_text(yaml.safe_dump({**EXPERIMENT, "data": str(data)}))
    for stage in range(3):
        (folder / f"zero{stage}.json").write_text(
            json.dumps({"zero_optimization": {"stage": stage, "reduce_bucket_size": 20_000}})
        )
    (folder / "zero3.json").write_text(json.dumps({"zero_optimization": ZERO3}))
    return folder / "experiment.yaml"


@pytest.fixture(scope="module")
def hostfile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Two nodes in network namespaces, and their hostfile."""
    path = tmp_path_factory.mktemp("nodes") / "hostfile"
    subprocess.run([TWO_NODES, "down"], check=True)
    made = subprocess.run([TWO_NODES, "up", str(path)], capture_output=True, text=True, check=False)
    if made.returncode:
        subprocess.run([TWO_NODES, "down"], check=True)
        (pytest.fail if os.environ.get("CI") else pytest.skip)(f"network namespaces cannot be made here: {made.stderr.strip()}")
    yield path
    subprocess.run([TWO_NODES, "down"], check=True)


def job(experiment: Path, out: Path, *set_: str, stage: int | None = None, **faults: Any) -> dict[str, Any]:
    """A job for ranks.py: at a stage of ZeRO, or plain."""
    how = "training.backend=plain" if stage is None else f"training.deepspeed={experiment.parent / f'zero{stage}.json'}"
    return {"config": str(experiment), "out": str(out), "set": [how, *set_], **faults}


Ranks = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def ranks(tmp_path: Path) -> Ranks:
    """Run jobs one after the other on so many real processes."""

    def call(world: int, *jobs: dict[str, Any], check: bool = True) -> subprocess.CompletedProcess[str]:
        (tmp_path / "jobs.json").write_text(json.dumps(jobs))
        command = [*launcher(world), str(ROOT / "tests/training/ranks.py"), str(tmp_path / "jobs.json")]
        result = subprocess.run(command, capture_output=True, text=True, env=environment(), cwd=ROOT, check=False)
        assert not check or result.returncode == 0, result.stderr[-6000:]
        return result

    return call


def launcher(world: int) -> list[str]:
    """The start of a command line that runs a script on so many processes."""
    if world == 1:
        return [sys.executable]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(world)]


def environment() -> dict[str, str]:
    """One thread per rank; this checkout's code."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "COLUMNS": "200", "TERM": "dumb"}


def losses(out: Path) -> list[float | None]:
    """The training loss of every step."""
    return [row["loss"] for row in rows(out) if row["kind"] == "train"]


def rows(out: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def tensors(out: Path, kind: str) -> dict[str, Any]:
    """All tensors of a kind in the newest checkpoint."""
    saved, _ = checkpoint.newest_whole(out)
    assert saved is not None
    return {name: x for path in saved.files(kind) for name, x in load_file(path).items()}
