"""Two evaluations of the same documents, document by document: how much better one is, and whether that is sure."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from lm.errors import UserError
from lm.evaluation.figures import difference, units
from lm.evaluation.journal import ABOUT, LINES, RESULT
from lm.evaluation.tally import Outcome

SAME = ("tokenizer", "data_fingerprint", "documents_fingerprint", "tokens")
"""What two evaluations must share for their documents to be the same."""


def compare(first: Path, other: Path, passes: tuple[str, str] = ("on", "on")) -> dict[str, Any]:
    """How much worse `first` is than `other`, over the same documents in pairs."""
    about, theirs = _about(first), _about(other)
    if different := [key for key in SAME if about.get(key) != theirs.get(key)]:
        values = "; ".join(f"{key} {about.get(key)} and {theirs.get(key)}" for key in different)
        raise UserError(f"{first} and {other}: are of different documents ({values}); evaluate both on one --data and --split")
    mine, its = outcomes(first, passes[0]), outcomes(other, passes[1])
    if not np.array_equal(units(mine)[0][:, 0], units(its)[0][:, 0]):
        raise UserError(
            f"{first} and {other}: their blocks are not the same tokens (segments of {about['segment']} and "
            f"{theirs['segment']}); evaluate both with one --segment"
        )
    gap = difference(mine, its)
    return {
        **{key: about[key] for key in ("data", "documents", *SAME)},
        "first": _side(first, passes[0], about, mine),
        "other": _side(other, passes[1], theirs, its),
        "difference": {**asdict(gap), "worse": gap.worse, "bits_per_token": gap.nats_per_token / math.log(2)},
    }


def outcomes(folder: Path, name: str) -> list[Outcome]:
    """The documents of a pass of an evaluation that has come to its end, in order."""
    if not (folder / RESULT).is_file():
        raise UserError(f"{folder}: its evaluation has not come to its end; run the same `pmi eval ... --out {folder}` again")
    rows = [json.loads(line) for line in (folder / LINES).read_text().splitlines()]
    found = {row["outcome"]["number"]: Outcome.from_row(row["outcome"]) for row in rows if row["pass"] == name and row["outcome"]}
    if not found:
        passes = ", ".join(sorted({row["pass"] for row in rows}))
        raise UserError(f"{folder}: has no pass {name!r}, only {passes}; name one with --memory")
    return [found[number] for number in sorted(found)]


def _about(folder: Path) -> dict[str, Any]:
    try:
        about = json.loads((folder / ABOUT).read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}: is no folder of `pmi eval --out` ({ABOUT} cannot be read)") from error
    if not isinstance(about, dict):
        raise UserError(f"{folder / ABOUT}: is damaged; run the evaluation anew, into another --out")
    return about


def _side(folder: Path, name: str, about: dict[str, Any], found: Sequence[Outcome]) -> dict[str, Any]:
    nats = math.fsum(x.nats for x in found) / sum(x.tokens for x in found)
    return {"folder": str(folder), "memory": name, "model": about["model"], "nats_per_token": nats}
