"""The configurations that the proofs run on: every single value, and a pairwise cover of them."""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from allpairspy import AllPairs

from lm.config import ModelConfig
from lm.config_files import override
from lm.model import PMI
from lm.model.proofs import draw_zeros

BASE: dict[str, Any] = {
    "vocab_size": 23,
    "layers": 3,
    "width": 32,
    "heads": 2,
    "feedforward": 64,
    "segment": 8,
    "window": 8,
    "memory": {"layers": [1], "heads": 4, "slots": 4, "fragments": 3, "top_k": 3, "mlp_layers": 2},
}

# the first value of each is BASE's own
VALUES: dict[str, list[str]] = {
    "memory.scope": ["layer", "global"],
    "memory.parameters": ["separate", "tied"],
    "memory.layers": ["[1]", "all", "[0, 2]", "[0]", "[2]"],
    "memory.slots": ["4", "2", "9"],
    "memory.fragments": ["3", "1"],
    "memory.top_k": ["3", "null", "1"],
    "memory.mlp_layers": ["2", "1", "4"],
    "memory.heads": ["4", "1"],
    "memory.width": ["null", "24"],
    "memory.alpha": ["0.7", "0.3"],
    "memory.gate": ["unit", "memory", "none"],
    "memory.consolidation": ["delta", "probe", "paper"],
    "memory.read": ["both", "working", "long_term"],
    "memory.correction": ["false", "true"],
    "memory.delta.source": ["tokens", "slots", "both"],
    "memory.delta.key_width": ["32", "6"],
    "memory.delta.value_width": ["32", "5"],
    "memory.delta.convolution": ["3", "1"],
    "memory.delta.top_k": ["null", "2"],
    "memory.delta.gates": ["soft", "hard"],
    "memory.verbatim": ["null", "{}", "{contexts: [2, 4], rows: 7, width: 5}"],
    "window": ["8", "0", "5", "16", "20"],
    "segment": ["8", "6"],
    "heads": ["2", "1"],
    "width": ["32", "36"],  # 36 / 2 heads = 18; with heads 4 (below) 9, an odd head
    "cutoffs": ["[]", "[5, 11]"],
    "cluster_divide": ["1", "2"],
    "embedding_std": ["0.1", "0.3"],
}

EXTRA: list[list[str]] = [
    ["memory=off"],
    ["memory=off", "window=0"],
    ["heads=4", "width=36", "memory.width=32"],
    ["cutoffs=[5, 11]", "cluster_divide=2"],
    [
        "memory.scope=global",
        "memory.parameters=tied",
        "memory.layers=all",
        "memory.correction=true",
        "memory.consolidation=probe",
    ],
    [
        "memory.scope=layer",
        "memory.parameters=separate",
        "memory.layers=all",
        "memory.correction=true",
        "memory.consolidation=probe",
    ],
    ["memory.consolidation=probe", "memory.read=long_term"],
    ["memory.consolidation=probe", "memory.read=working"],
    ["memory.consolidation=paper", "memory.correction=true"],
    ["memory.correction=true", "memory.scope=global", "memory.delta.source=both"],
]


def consistent(choice: dict[str, str]) -> bool:
    """Whether the values can stand together."""
    return choice.get("memory.correction") != "true" or choice.get("memory.read", "both") == "both"


def singles() -> Iterator[list[str]]:
    """The base, and every other value alone."""
    yield []
    for key, values in VALUES.items():
        for value in values[1:]:
            yield [f"{key}={value}"]
    yield from EXTRA


def pairs() -> Iterator[list[str]]:
    """A cover of all pairs of values."""
    names = list(VALUES)
    cover = AllPairs(list(VALUES.values()), filter_func=lambda row: consistent(dict(zip(names, row, strict=False))))
    for row in cover:
        yield [f"{name}={value}" for name, value in zip(names, row, strict=True)]


def grid() -> Iterator[list[str]]:
    """The full grid over what shapes the memory (for `make test-full`)."""
    names = ["memory.scope", "memory.parameters", "memory.gate", "memory.consolidation", "memory.read", "memory.correction"]
    names += ["memory.delta.source", "memory.layers", "memory.top_k"]
    for row in itertools.product(*(VALUES[name] for name in names[:-2]), VALUES[names[-2]][:2], VALUES[names[-1]][:2]):
        choice = dict(zip(names, row, strict=True))
        if consistent(choice) and (choice["memory.consolidation"] == "delta" or choice["memory.delta.source"] == "tokens"):
            yield [f"{name}={value}" for name, value in choice.items()]


def build(overrides: list[str], seed: int = 0) -> PMI:
    """A model with nothing at zero."""
    torch.manual_seed(seed)
    return draw_zeros(PMI(ModelConfig.model_validate(override(BASE, overrides))), seed).eval()
