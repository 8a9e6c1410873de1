"""Sort-of-CLEVR (Santoro et al., 2017) with the ternary questions of the paper: generated, deterministic by seed.

A picture of 75 x 75 pixels has 6 objects of 6 colours, each a circle or a rectangle, that do not overlap (some stand edge to
edge). On each there are 10 unary, 10 binary and 10 ternary questions; a question is (colour, other colour or none, which of the
nine). Where two objects are equally far (1 in 200 "closest", 1 in 2,000 "furthest"), the first in COLOURS counts.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from lm.reasoning.config import ClevrData
from lm.reasoning.tasks.dataset import Array, Dataset, Split, cached

SIDE, RADIUS = 75, 5
COLOURS = {
    "red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255), "orange": (255, 156, 0), "grey": (128, 128, 128),
    "yellow": (255, 255, 0),
}  # fmt: skip
ASKED = (
    "What is the shape of the {0} object?",
    "Is the {0} object on the left or right of the image?",
    "Is the {0} object on the top or bottom of the image?",
    "What is the shape of the object that is furthest from the {0} object?",
    "What is the color of the object that is closest to the {0} object?",
    "How many objects have the shape of the {0} object?",
    "How many objects are in the rectangle formed by the centers of the {0} and {1} objects?",
    "Are there any objects on the line formed by the centers of the {0} and {1} objects?",
    "How many objects form an obtuse triangle with the {0} and {1} objects?",
)
GROUPS = ["unary", "binary", "ternary"]
PER_GROUP = 10
ANSWERS = ["circle", "rectangle", "left", "right", "top", "bottom", *COLOURS, "yes", "no", *map(str, range(7))]
PLACE = {answer: number for number, answer in enumerate(ANSWERS)}
CHOICES = [len(COLOURS), len(COLOURS) + 1, len(ASKED)]
VERSION = 1


class Scene(NamedTuple):
    """The objects of a picture, one of each colour."""

    centres: Array  # [6, 2] x, y
    round: Array  # [6] bool


def load(config: ClevrData, cache: Path | None) -> Dataset:
    """Generate, or take from the cache."""
    key = {"version": VERSION, "data": config.model_dump(exclude={"patch"})}
    return cached(cache, "clevr", key, lambda: generate(config))


def generate(config: ClevrData) -> Dataset:
    """All splits; each picture of each split has its own seed."""
    counts = {"train": config.pictures, "valid": config.held_out, "test": config.held_out}
    splits: dict[str, Split] = {}
    pictures: list[Array] = []
    centres: list[Array] = []
    rounds: list[Array] = []
    for number, (split, count) in enumerate(counts.items()):
        rows: list[tuple[int, int, int, int, int]] = []
        for index in range(count):
            rng = np.random.default_rng([config.seed, number, index])
            scene = draw_scene(rng)
            rows += [(len(pictures), *question, PLACE[answer(scene, *question)]) for question in draw_questions(rng)]
            pictures.append(render(scene))
            centres.append(scene.centres)
            rounds.append(scene.round)
        table = np.array(rows, dtype=np.int32)
        asked = table[:, 3].astype(np.int16)
        inputs: dict[str, Array] = {"at": table[:, 0], "question": table[:, 1:4].astype(np.int16)}
        splits[split] = Split(inputs, table[:, 4].astype(np.int16), asked // 3, asked)
    tables = {"pictures": np.stack(pictures), "centres": np.stack(centres), "round": np.stack(rounds).astype(np.uint8)}
    return Dataset(splits, tables, ANSWERS, GROUPS, [], {"side": SIDE, "channels": 3, "ground": 255, "choices": CHOICES})


def draw_scene(rng: np.random.Generator) -> Scene:
    """Six objects that do not overlap."""
    while True:
        centres: list[Array] = []
        for _ in range(1_000):
            centre = rng.integers(RADIUS, SIDE - RADIUS, 2)
            if all(np.abs(centre - other).max() > 2 * RADIUS for other in centres):
                centres.append(centre)
            if len(centres) == len(COLOURS):
                return Scene(np.stack(centres).astype(np.int16), rng.random(len(COLOURS)) < 0.5)


def draw_questions(rng: np.random.Generator) -> list[tuple[int, int, int]]:
    """PER_GROUP questions of each group: (colour, other colour or 6, which of the nine)."""
    none = len(COLOURS)
    questions = []
    for group in range(3):
        for _ in range(PER_GROUP):
            first, second = rng.choice(none, 2, replace=False).tolist()
            questions.append((first, second if group == 2 else none, 3 * group + int(rng.integers(3))))
    return questions


def answer(scene: Scene, first: int, second: int, asked: int) -> str:
    """The answer to a question."""
    centres = scene.centres.astype(np.int64)
    shapes = np.where(scene.round, "circle", "rectangle")
    x, y = centres[first]
    if asked == 0:
        return str(shapes[first])
    if asked == 1:
        return "left" if x < SIDE / 2 else "right"
    if asked == 2:
        return "top" if y < SIDE / 2 else "bottom"
    distances = ((centres - centres[first]) ** 2).sum(1)
    if asked == 3:
        return str(shapes[distances.argmax()])
    if asked == 4:
        distances[first] = distances.max() + 1
        return list(COLOURS)[int(distances.argmin())]
    if asked == 5:
        return str((scene.round == scene.round[first]).sum())
    a, b = centres[first], centres[second]
    others = np.delete(centres, [first, second], 0)
    if asked == 6:
        low, high = np.minimum(a, b), np.maximum(a, b)
        return str(((others > low) & (others < high)).all(1).sum())
    along = b - a
    if asked == 7:  # a centre between the two, no farther from the line than an object's radius
        share = ((others - a) @ along) / (along @ along)
        away = np.abs((others[:, 0] - a[0]) * along[1] - (others[:, 1] - a[1]) * along[0]) / np.sqrt(along @ along)
        return "yes" if ((share > 0) & (share < 1) & (away <= RADIUS)).any() else "no"
    at_a, at_b = (others - a) @ along, (others - b) @ -along
    at_other = ((a - others) * (b - others)).sum(1)
    return str(((at_a < 0) | (at_b < 0) | (at_other < 0)).sum())


def render(scene: Scene) -> Array:
    """[75, 75, 3] bytes on a white ground."""
    picture = np.full((SIDE, SIDE, 3), 255, dtype=np.uint8)
    rows, columns = np.mgrid[-RADIUS : RADIUS + 1, -RADIUS : RADIUS + 1]
    disc = rows**2 + columns**2 <= RADIUS**2
    for (x, y), is_round, colour in zip(scene.centres, scene.round, COLOURS.values(), strict=True):
        part = picture[max(0, y - RADIUS) : y + RADIUS + 1, max(0, x - RADIUS) : x + RADIUS + 1]
        shape = disc if is_round else np.ones_like(disc)
        part[shape[: part.shape[0], : part.shape[1]]] = colour
    return picture


def question_text(question: Array) -> str:
    """A question in words."""
    first, second, asked = map(int, question)
    names = [*COLOURS, ""]
    return ASKED[asked].format(names[first], names[second])
