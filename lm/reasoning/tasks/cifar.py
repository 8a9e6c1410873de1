"""CIFAR-10 from its binary version (`cifar-10-binary.tar.gz`, .bin files) or as PNGs (`data_batch_1.png`, one picture a row).

Both from a folder or an archive. The python version holds pickles, which run code when read: it is refused.
"""

import io
import json
from pathlib import Path

import numpy as np

from lm.data.sources import texts
from lm.errors import UserError
from lm.reasoning.config import CifarData
from lm.reasoning.tasks.dataset import Array, Dataset, Split, cached, files_in

SIDE = 32
PIXELS = 3 * SIDE * SIDE
CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
TRAIN = [f"data_batch_{i}" for i in range(1, 6)]
TEST = ["test_batch"]
LABELS = {"train_lables.json": TRAIN, "test_lables.json": TEST}
"""The PNG form's files of labels, spelled as they are."""


def load(config: CifarData, source: Path | None, cache: Path | None) -> Dataset:
    """The pictures in a folder or archive."""
    if source is None:
        raise UserError("cifar: give the data with --data PATH: cifar-10-binary.tar.gz, or a folder or archive of its PNG form")
    if not source.exists():
        raise UserError(f"--data {source}: there is no such file or folder")
    key = {"data": config.model_dump(exclude={"patch"}), "files": files_in(source)}
    return cached(cache, "cifar", key, lambda: read(config, source))


def read(config: CifarData, source: Path) -> Dataset:
    """Read without the cache."""
    batches, labels, refused = _files(source)
    missing = [name for name in (*TRAIN, *TEST) if name not in batches or name not in labels]
    if missing:
        hint = "; the python version is not read, as unpickling runs code: take the binary version" if refused else ""
        raise UserError(f"--data {source}: no {', '.join(missing)} there as .bin, or as .png with its labels{hint}")
    for name in (*TRAIN, *TEST):
        if (pictures := len(batches[name])) != (count := len(labels[name])):
            raise UserError(f"--data {source}: {name} has {pictures:,} pictures, but {count:,} labels; get its files again")
    train, answers = (np.concatenate([part[name] for name in TRAIN]) for part in (batches, labels))
    kept = len(train) - config.held_out
    if kept < 1:
        raise UserError(f"--data {source}: {len(train):,} training pictures, but data.held_out is {config.held_out:,}; lower it")
    splits = {
        "train": _split(train[:kept], answers[:kept]),
        "valid": _split(train[kept:], answers[kept:]),
        "test": _split(batches[TEST[0]], labels[TEST[0]]),
    }
    return Dataset(splits, {}, CLASSES, ["all"], [], {"side": SIDE, "channels": 3, "ground": 127.5, "choices": []})


def _files(source: Path) -> tuple[dict[str, Array], dict[str, Array], bool]:
    """Pictures and labels of each batch found, and whether there are files that look like the python version."""
    batches: dict[str, Array] = {}
    labels: dict[str, Array] = {}
    refused = False
    for text in texts(source):
        name = Path(text.name)
        if name.stem in (*TRAIN, *TEST):
            if name.suffix == ".bin":
                batches[name.stem], labels[name.stem] = _binary(text.stream.read(), text.name)
            elif name.suffix == ".png":
                batches[name.stem] = _png(text.stream.read(), text.name)
            refused |= name.suffix == ""
        elif name.name in LABELS:
            _labels(text.stream.read(), text.name, LABELS[name.name], labels)
    return batches, labels, refused


def _binary(content: bytes, name: str) -> tuple[Array, Array]:
    if not content or len(content) % (1 + PIXELS):
        said = f"{len(content):,} bytes are not records of {1 + PIXELS} (a label, then 3 x 32 x 32 pixels)"
        raise UserError(f"{name}: {said}; get the file again")
    records = np.frombuffer(content, dtype=np.uint8).reshape(-1, 1 + PIXELS)
    return records[:, 1:].reshape(-1, 3, SIDE, SIDE).transpose(0, 2, 3, 1).copy(), _checked(records[:, 0], name)


def _png(content: bytes, name: str) -> Array:
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(content), formats=["PNG"]) as picture:
            pixels = np.asarray(picture.convert("RGB"))
    except (UnidentifiedImageError, OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise UserError(f"{name}: cannot be read as PNG: {error}; get the file again") from error
    if pixels.shape[1] != SIDE * SIDE:
        said = f"is {pixels.shape[1]:,} pixels wide; a row must be one picture of {SIDE * SIDE:,} pixels"
        raise UserError(f"{name}: {said}; get the file of the PNG form, not another picture")
    return pixels.reshape(-1, SIDE, SIDE, 3)


def _labels(content: bytes, name: str, batches: list[str], labels: dict[str, Array]) -> None:
    try:
        given = json.loads(content)
    except ValueError as error:
        raise UserError(f"{name}: is not JSON ({error}); get the file again") from error
    if not isinstance(given, list) or any(type(label) is not int for label in given):
        raise UserError(f"{name}: must be a JSON list of whole numbers, a label for each picture; get the file again")
    if len(given) % len(batches):
        raise UserError(f"{name}: {len(given):,} labels are not those of {len(batches)} equal batches; get the file again")
    found = np.array(given)
    for batch, part in zip(batches, np.split(_checked(found, name), len(batches)), strict=True):
        labels.setdefault(batch, part)


def _checked(labels: Array, name: str) -> Array:
    if not len(labels) or labels.min() < 0 or labels.max() >= len(CLASSES):
        raise UserError(f"{name}: labels must be numbers from 0 to {len(CLASSES) - 1}; get the file again")
    return labels.astype(np.int16)


def _split(pictures: Array, answers: Array) -> Split:
    nothing = np.zeros(len(answers), dtype=np.int16)
    return Split({"picture": pictures}, answers, nothing, nothing)
