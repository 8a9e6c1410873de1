"""From a configuration to its data and its model."""

from pathlib import Path

import torch

from lm.errors import UserError
from lm.reasoning.config import PictureData, ReasonConfig
from lm.reasoning.encoder import Reasoner
from lm.reasoning.perception import Convolutions, Patches, Perception, Sentences
from lm.reasoning.tasks import babi, cifar, clevr, triangles
from lm.reasoning.tasks.dataset import Dataset


def load_data(config: ReasonConfig, source: Path | None, cache: Path | None) -> Dataset:
    """The task's data: generated, or read from `source`."""
    data = config.data
    if data.task == "babi":
        return babi.load(data, source, cache)
    if data.task == "cifar":
        return cifar.load(data, source, cache)
    if source is not None:
        raise UserError(f"--data {source}: {data.task} is generated and reads no data; leave --data out")
    return clevr.load(data, cache) if data.task == "clevr" else triangles.load(data, cache)


def build(config: ReasonConfig, dataset: Dataset, seed: int) -> Reasoner:
    """The model with fresh weights."""
    torch.manual_seed(seed)
    return Reasoner(config.encoder, _perception(config, dataset), len(dataset.answers))


def _perception(config: ReasonConfig, dataset: Dataset) -> Perception:
    about, width = dataset.about, config.encoder.width
    if not isinstance(config.data, PictureData):
        return Sentences(about["vocabulary"], about["words"], about["sentences"], width)
    side, channels, ground, patch = about["side"], about["channels"], about["ground"], config.data.patch
    if config.perception == "cnn":
        return Convolutions(side, channels, ground, about["choices"], width)
    if side % patch:
        fits = [i for i in range(1, side + 1) if side % i == 0]
        raise UserError(f"data.patch {patch} does not divide the pictures' side {side}; choose one of {fits}")
    return Patches(side, channels, patch, ground, about["choices"], width)
