"""Many streaming sessions while replicas are killed: `python -m benchmarks.serving --part load`, for half a minute."""

import asyncio
from pathlib import Path

from benchmarks.serving import load
from lm.machine import free_port
from lm.model.pretrained import save_pretrained
from tests.serving.api.cluster import Cluster
from tests.serving.engine.conftest import checkpoint


def test_7_64_sessions_lose_and_mix_up_nothing_while_replicas_are_killed(tmp_path: Path) -> None:
    own = checkpoint()
    save_pretrained(own.model, own.tokenizer, tmp_path / "model")
    cluster = Cluster(tmp_path, tmp_path / "model", free_port(), "--set", "engine.lanes=64", "--set", "engine.queue=64")
    try:
        cluster.start()
        found = asyncio.run(load(cluster, own, sessions=64, tokens=64, seconds=30, pause=(4, 8)))
    finally:
        cluster.kill()
    assert found["kills"] >= 1
    assert found["turns"] >= 64
    assert (found["wrong_turns"], found["wrong_tokens"]) == (0, 0)
    assert found["control_seen"] > 0
