"""Small data for all tests here: a bAbI folder made by hand, and configurations that run in a blink."""

from pathlib import Path

import numpy as np
import pytest

from lm.reasoning.config import ReasonConfig, load_reason_config

PLACES = ["kitchen", "garden", "office"]
PEOPLE = ["Mary", "John", "Sandra", "Daniel"]
SMALL = {
    "babi": ["data.tasks=[1, 2]", "data.sentences=6", "training.batch=8", "training.pool=2"],
    "clevr": ["data.pictures=6", "data.held_out=3", "training.batch=8"],
    "triangles": ["data.pictures=24", "data.held_out=8", "data.patch=16", "training.batch=8"],
    "cifar": ["data.patch=8", "data.held_out=10", "training.batch=8"],
}
TINY = ["encoder.width=16", "encoder.heads=2", "encoder.feedforward=16", "training.steps=6", "training.evaluations=3"]
TINY_MEMORY = ["encoder.memory.heads=2", "encoder.memory.slots=4", "encoder.memory.fragments=2", "encoder.memory.top_k=2"]


def tiny(task: str, model: str, *changes: str) -> ReasonConfig:
    memory = load_reason_config(task, model, "cpu").encoder.memory
    soft = [change for change in TINY_MEMORY if memory and not (memory.top_k is None and "top_k" in change)]
    return load_reason_config(task, model, "cpu", [*SMALL[task], *TINY, *soft, *changes])


@pytest.fixture
def babi(tmp_path: Path) -> Path:
    """Where somebody went last: task 1 asks after two sentences, task 2 after more than a model may see."""
    rng = np.random.default_rng(0)
    folder = tmp_path / "babi"
    folder.mkdir()
    for task, length in ((1, 2), (2, 9)):
        for split, stories in (("train", 40), ("valid", 12), ("test", 12)):
            lines = []
            for _ in range(stories):
                where = {}
                for number in range(1, length + 1):
                    person, place = PEOPLE[rng.integers(4)], PLACES[rng.integers(3)]
                    where[person] = (place, number)
                    lines.append(f"{number} {person} went to the {place}.")
                asked = list(where)[int(rng.integers(len(where)))]
                lines.append(f"{length + 1} Where is {asked}? \t{where[asked][0]}\t{where[asked][1]}")
            (folder / f"qa{task}_{split}.txt").write_text("\n".join(lines) + "\n")
    return folder
