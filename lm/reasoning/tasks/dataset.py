"""A task's data as arrays: what every task module gives, how batches are drawn from it, and the cache it is kept in."""

import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import Tensor

from lm.data.files import sha256_of, write_atomically

SPLITS = ("train", "valid", "test")
CACHE_FORMAT = "4"
Array = NDArray[Any]


@dataclass(frozen=True)
class Split:
    """Samples: their inputs (first axis: samples), the index of the answer, and what kind of question each is."""

    inputs: dict[str, Array]
    answers: Array  # [n]; -1: not an answer of the training set
    groups: Array  # [n] what results are reported by
    kinds: Array  # [n] finer: what a guesser knows of the question

    def __len__(self) -> int:
        return len(self.answers)


@dataclass(frozen=True)
class Dataset:
    """All of a task. `tables` are arrays that samples of all splits point into."""

    splits: dict[str, Split]
    tables: dict[str, Array]
    answers: list[str]
    groups: list[str]
    notes: list[str]
    """What a reader of the results must know of the data."""
    about: dict[str, Any]
    """Sizes that perception is built from."""

    @functools.cached_property
    def fingerprint(self) -> str:
        """A short hash of all samples: where it is the same, a model is trained and measured on the same."""
        digest = hashlib.sha256(json.dumps([self.answers, self.groups, self.about]).encode())
        for name, array in sorted(_arrays(self).items()):
            digest.update(f"{name} {array.dtype} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()[:16]

    def guess(self, split: str) -> Array:
        """Per group: the accuracy of always giving the training set's usual answer to this kind of question."""
        train, asked = self.splits["train"], self.splits[split]
        usual = {kind: np.bincount(train.answers[train.kinds == kind]).argmax() for kind in np.unique(train.kinds)}
        right = np.array([usual.get(kind, -2) for kind in asked.kinds]) == asked.answers
        return np.array([right[asked.groups == group].mean() for group in range(len(self.groups))])

    def batch(self, split: str, rows: Array, device: torch.device) -> tuple[dict[str, Tensor], Tensor]:
        """Inputs and answers of some samples, on a device."""
        part = self.splits[split]
        if "story" in self.tables:
            inputs = self._stories(part, rows)
        else:
            inputs = {name: array[rows] for name, array in part.inputs.items() if name != "at"}
            if "at" in part.inputs:  # many questions to one picture
                shown, inputs["at"] = np.unique(part.inputs["at"][rows], return_inverse=True)
                inputs["picture"] = self.tables["pictures"][shown]  # each is seen once
        tensors = {name: torch.from_numpy(_plain(array)).to(device) for name, array in inputs.items()}
        return tensors, torch.from_numpy(part.answers[rows].astype(np.int64)).to(device)

    def _stories(self, part: Split, rows: Array) -> dict[str, Array]:
        """A batch's stories, each at the right of its row, and the sentences they are made of."""
        starts, lengths = part.inputs["start"][rows], part.inputs["length"][rows]
        story = np.full((len(rows), int(lengths.max())), -1, dtype=np.int64)
        for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            story[row, story.shape[1] - length :] = self.tables["story"][start : start + length]
        used, places = np.unique(np.concatenate([story.ravel(), part.inputs["question"][rows]]), return_inverse=True)
        padded = int(used[0] < 0)
        places = places - padded
        return {
            "sentences": self.tables["sentences"][used[padded:]],
            "story": places[: story.size].reshape(story.shape),
            "question": places[story.size :],
        }

    def lengths(self, split: str) -> Array | None:
        """How long each sample is, where that differs."""
        return self.splits[split].inputs.get("length")


def order(dataset: Dataset, batch: int, pool: int, seed: int, epoch: int, together: int = 1) -> list[Array]:
    """The batches of an epoch over the training set: shuffled, in pools sorted by length where lengths differ.

    Up to `together` questions about one picture stand behind each other.
    """
    rng = np.random.default_rng([seed, epoch])
    rows = rng.permutation(len(dataset.splits["train"]))
    if together > 1 and "at" in dataset.splits["train"].inputs:
        rows = _gathered(rows, dataset.splits["train"].inputs["at"][rows], together, rng)
    lengths = dataset.lengths("train")
    whole = len(rows) // batch * batch
    if lengths is None or pool == 1:
        return [rows[i : i + batch] for i in range(0, whole, batch)]
    batches = []
    for first in range(0, whole, batch * pool):
        part = rows[first : min(whole, first + batch * pool)]
        part = part[np.argsort(lengths[part], kind="stable")]
        batches += [part[i : i + batch] for i in range(0, len(part), batch)]
    return [batches[i] for i in rng.permutation(len(batches))]


def _gathered(rows: Array, at: Array, together: int, rng: np.random.Generator) -> Array:
    """`rows` in another order: `together` that are `at` the same picture behind each other, and such groups shuffled."""
    places = np.argsort(at, kind="stable")
    rows, at = rows[places], at[places]
    begins = np.flatnonzero(np.diff(at, prepend=-1))
    within = np.arange(len(at)) - np.repeat(begins, np.diff(begins, append=len(at)))
    groups = np.cumsum(within % together == 0) - 1
    return rows[np.argsort(rng.permutation(groups[-1] + 1)[groups], kind="stable")]


def evaluation_batches(dataset: Dataset, split: str, most: int | None, batch: int) -> Iterator[Array]:
    """The samples of a split (at most so many, always the same), the short ones first."""
    rows = np.arange(len(dataset.splits[split]))
    if most is not None and most < len(rows):  # drawn, as every n-th could be all of one kind
        rows = np.sort(np.random.default_rng(0).permutation(rows)[:most])
    lengths = dataset.lengths(split)
    if lengths is not None:
        rows = rows[np.argsort(lengths[rows], kind="stable")]
    for first in range(0, len(rows), batch):
        yield rows[first : first + batch]


def cached(folder: Path | None, name: str, key: dict[str, Any], make: Callable[[], Dataset]) -> Dataset:
    """The dataset that `make` makes, kept in `folder` under a hash of `key` (None: not kept). A damaged file is made again."""
    if folder is None:
        return make()
    digest = hashlib.sha256(json.dumps([CACHE_FORMAT, key], sort_keys=True).encode()).hexdigest()[:16]
    path = folder / f"{name}-{digest}.safetensors"
    if path.is_file():
        try:
            return _load(path)
        except (SafetensorError, KeyError, TypeError, ValueError):
            path.unlink()
    dataset = make()
    folder.mkdir(parents=True, exist_ok=True)
    _save(dataset, path)
    return dataset


def files_in(source: Path) -> list[list[str]]:
    """Every file of a source with its hash, in folders below it, too: what a key to the cache must say of data that are read."""
    files = [source] if source.is_file() else sorted(path for path in source.rglob("*") if path.is_file())
    return [[str(path.relative_to(source)) if source.is_dir() else path.name, sha256_of(path)] for path in files]


def cache_folder() -> Path:
    """Where datasets are kept unless told otherwise."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pmi" / "reason"


def _arrays(dataset: Dataset) -> dict[str, Array]:
    arrays = {f"table.{name}": array for name, array in dataset.tables.items()}
    for name, split in dataset.splits.items():
        arrays |= {f"{name}.inputs.{key}": array for key, array in split.inputs.items()}
        arrays |= {f"{name}.{key}": getattr(split, key) for key in ("answers", "groups", "kinds")}
    return arrays


def _save(dataset: Dataset, path: Path) -> None:
    arrays = {name: np.ascontiguousarray(array) for name, array in _arrays(dataset).items()}
    rest = {key: json.dumps(getattr(dataset, key)) for key in ("answers", "groups", "notes", "about", "fingerprint")}
    part = path.with_name(f".{path.name}.{os.getpid()}")
    save_file(arrays, part, rest)
    os.replace(part, path)


def _load(path: Path) -> Dataset:
    with safe_open(path, "numpy") as file:
        rest = {key: json.loads(value) for key, value in (file.metadata() or {}).items()}
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    tables = {name.removeprefix("table."): array for name, array in arrays.items() if name.startswith("table.")}
    splits = {}
    for name in SPLITS:
        prefix = f"{name}.inputs."
        inputs = {key.removeprefix(prefix): array for key, array in arrays.items() if key.startswith(prefix)}
        splits[name] = Split(inputs, *(arrays[f"{name}.{key}"] for key in ("answers", "groups", "kinds")))
    fingerprint = rest.pop("fingerprint")
    dataset = Dataset(splits, tables, **rest)
    if dataset.fingerprint != fingerprint:
        raise ValueError(f"{path}: holds other data than were written")
    return dataset


def _plain(array: Array) -> Array:
    """As a type that torch has and indexes with."""
    return array if array.dtype == np.uint8 else array.astype(np.int64)


def write_json(path: Path, content: Any) -> None:
    """A JSON file, whole or not at all."""
    write_atomically(path, (json.dumps(content, indent=2) + "\n").encode())
