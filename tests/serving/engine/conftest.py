"""Small real models behind an engine, and what they generate when called alone."""

import time
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch

from lm.config import ModelConfig
from lm.data.tokenizer import ByteTokenizer
from lm.model import PMI
from lm.model.pretrained import Checkpoint, fingerprint
from lm.model.proofs import draw_zeros
from serving.engine import Engine, EngineConfig

SEGMENT = 8
CONFIG = {
    "vocab_size": 257, "layers": 2, "width": 32, "heads": 2, "feedforward": 64, "segment": SEGMENT, "window": 8,
    "memory": {
        "layers": [1], "heads": 4, "slots": 4, "fragments": 3, "top_k": 3, "mlp_layers": 1, "verbatim": {"rows": 50, "width": 6},
    },
}  # fmt: skip


@cache
def checkpoint(seed: int = 0, **changes: object) -> Checkpoint:
    """A model with nothing at zero, and bytes as ids."""
    torch.manual_seed(seed)
    model = draw_zeros(PMI(ModelConfig.model_validate(CONFIG | changes)), seed).eval()
    return Checkpoint(model, ByteTokenizer(), fingerprint(model))


def greedy(found: Checkpoint, prompt: list[int], tokens: int) -> tuple[list[int], list[float]]:
    """The likeliest ids behind BOS and `prompt`, one call per token, and the gaps between the two largest logits."""
    ids, gaps = [], []
    with torch.inference_mode():
        state = found.model.initial_state(1)
        new = torch.tensor([[found.tokenizer.bos, *prompt]])
        for _ in range(tokens):
            hidden, state = found.model(new, state)
            logits = found.model.head.logits(hidden[0, -1])
            logits[found.tokenizer.bos] = -torch.inf
            best = logits.topk(2)
            ids.append(int(best.indices[0]))
            gaps.append(float(best.values[0] - best.values[1]))
            new = best.indices[None, :1]
    return ids, gaps


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine(checkpoint(), EngineConfig(lanes=4, queue=64)) as running:
        yield running


def wait_for(condition: Any, seconds: float = 10) -> None:
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.002)
