"""Equilateral triangles (Ahmad and Omohundro, 1990): three clusters of points; are their centres at equal distances?

Generated, deterministic by seed. Half of the pictures are equilateral; in the others, two corners are an equilateral triangle's
and the third is elsewhere. The others are larger for it: who knows nothing but the longest side is right in four of five.
"""

from pathlib import Path

import numpy as np

from lm.reasoning.config import TrianglesData
from lm.reasoning.tasks.dataset import Array, Dataset, Split, cached

SIDE, MARGIN = 64, 5
SHORTEST = 16.0
"""Least side of a triangle in pixels: clusters stay apart."""
UNEQUAL = 1.25
"""Least ratio of the longest side to the shortest in the others."""
POINTS, SPREAD = 12, 1.5
"""Of a cluster: how many, and their standard deviation in pixels."""
VERSION = 1


def load(config: TrianglesData, cache: Path | None) -> Dataset:
    """Generate, or take from the cache."""
    key = {"version": VERSION, "data": config.model_dump(exclude={"patch"})}
    return cached(cache, "triangles", key, lambda: generate(config))


def generate(config: TrianglesData) -> Dataset:
    """All splits; each picture of each split has its own seed."""
    counts = {"train": config.pictures, "valid": config.held_out, "test": config.held_out}
    splits, corners = {}, []
    for number, (split, count) in enumerate(counts.items()):
        answers = np.arange(count, dtype=np.int16) % 2
        pictures = np.zeros((count, SIDE, SIDE, 1), dtype=np.uint8)
        for index in range(count):
            rng = np.random.default_rng([config.seed, number, index])
            triangle = draw_corners(rng, bool(answers[index]))
            pictures[index, ..., 0] = render(triangle, rng)
            corners.append(triangle)
        nothing = np.zeros(count, dtype=np.int16)
        splits[split] = Split({"picture": pictures}, answers, nothing, nothing)
    tables = {"corners": np.stack(corners).astype(np.float32)}
    about = {"side": SIDE, "channels": 1, "ground": 0, "choices": []}
    return Dataset(splits, tables, ["other", "equilateral"], ["all"], [], about)


def draw_corners(rng: np.random.Generator, equilateral: bool) -> Array:
    """[3, 2] corners inside the picture."""
    while True:
        side = rng.uniform(SHORTEST, SIDE - 2 * MARGIN)
        turns = rng.uniform(0, 2 * np.pi) + np.arange(3) * 2 * np.pi / 3
        corners = rng.uniform(0, SIDE, 2) + side / np.sqrt(3) * np.stack([np.cos(turns), np.sin(turns)], 1)
        if not _inside(corners):
            continue
        if equilateral:
            return corners
        for _ in range(100):
            corners[2] = rng.uniform(MARGIN, SIDE - MARGIN, 2)
            sides = lengths(corners)
            if sides.min() >= SHORTEST and sides.max() / sides.min() >= UNEQUAL:
                return corners


def lengths(corners: Array) -> Array:
    """The three sides."""
    return np.linalg.norm(corners - np.roll(corners, 1, 0), axis=1)


def render(corners: Array, rng: np.random.Generator) -> Array:
    """[64, 64] bytes: points around each corner whose mean is the corner (to the pixel's rounding)."""
    picture = np.zeros((SIDE, SIDE), dtype=np.uint8)
    for corner in corners:
        points = rng.normal(0, SPREAD, (POINTS, 2))
        x, y = np.clip(np.rint(corner + points - points.mean(0)), 0, SIDE - 1).astype(int).T
        picture[y, x] = 255
    return picture


def _inside(corners: Array) -> bool:
    return bool(((corners >= MARGIN) & (corners <= SIDE - MARGIN)).all())
