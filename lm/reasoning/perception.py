"""From inputs to features: sentences, patches or convolutions, and a question. What the paper calls perception.

Each gives `x [b, t, d]` and which positions are real [b, t] (None: all).
Axes: b sample, t position, w word of a sentence, d feature.
"""

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Perceived = tuple[Tensor, Tensor | None]


class Perception(nn.Module):
    """Base of all."""

    def forward(self, inputs: dict[str, Tensor]) -> Perceived:
        """The features of a batch."""
        raise NotImplementedError


class Sentences(Perception):
    """A story's sentences, newest last, then the question: each the sum of its words' features times those of their places."""

    def __init__(self, vocabulary: int, words: int, sentences: int, width: int) -> None:
        super().__init__()
        self.words = nn.Parameter(torch.randn(vocabulary, width))
        # random factors: the same words in another order become another sentence
        self.places = nn.Parameter((1 + torch.randn(words, width)) / 2**0.5)
        self.ages = nn.Parameter(torch.randn(sentences, width))
        self.question = nn.Parameter(torch.randn(width))

    def forward(self, inputs: dict[str, Tensor]) -> Perceived:
        """`sentences [u, w]`: words (0: none) of the batch's sentences; `story [b, t]`, `question [b]`: its rows (-1: none)."""
        table, story = inputs["sentences"], inputs["story"]
        known = (table > 0)[..., None] / (table > 0).sum(-1).clamp(min=1)[:, None, None].sqrt()
        vectors = (F.embedding(table, self.words) * self.places[: table.shape[1]] * known).sum(1)
        ages = torch.arange(story.shape[1] - 1, -1, -1, device=story.device)
        x = F.embedding(story.clamp(min=0), vectors) + self.ages[ages]
        asked = F.embedding(inputs["question"], vectors) + self.question
        return torch.cat([x, asked[:, None]], 1), F.pad(story >= 0, (0, 1), value=True)


class Question(nn.Module):
    """A question made of several choices: the sum of their features."""

    def __init__(self, choices: list[int], width: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(sum(choices), width))
        self.register_buffer("first", torch.tensor([sum(choices[:i]) for i in range(len(choices))]), persistent=False)

    first: Tensor

    def forward(self, asked: Tensor) -> Tensor:
        """`asked [b, choices]` -> [b, 1, d]."""
        return F.embedding(asked + self.first, self.table).sum(1, keepdim=True)


class Pictures(Perception):
    """Positions of a picture, and its question where the task has one. What is as bright as the ground counts as nothing."""

    def __init__(self, positions: int, ground: float, choices: list[int], width: int) -> None:
        super().__init__()
        self.ground = ground
        self.places = nn.Parameter(0.3 * torch.randn(positions, width))  # what is seen there should outweigh the place
        self.question = Question(choices, width) if choices else None

    def see(self, picture: Tensor) -> Tensor:
        """`picture [b, channels, side, side]`, 0 where there is nothing -> features [b, t, d]."""
        raise NotImplementedError

    def forward(self, inputs: dict[str, Tensor]) -> Perceived:
        """`picture [p, side, side, channels]` bytes; with questions `question [b, choices]`, `at [b]`: which picture it is of."""
        picture = (inputs["picture"].permute(0, 3, 1, 2).float() - self.ground) / 127.5
        x = self.see(picture) + self.places
        if "at" in inputs:
            x = F.embedding(inputs["at"], x.flatten(1)).unflatten(1, x.shape[1:])
        if self.question is not None:
            x = torch.cat([x, self.question(inputs["question"])], 1)
        return x, None


class Patches(Pictures):
    """A picture cut into patches, each seen by a network of two layers: what is in a patch is no linear matter."""

    def __init__(self, side: int, channels: int, patch: int, ground: float, choices: list[int], width: int) -> None:
        super().__init__((side // patch) ** 2, ground, choices, width)
        self.embed = nn.Conv2d(channels, width, patch, stride=patch)
        self.rise, self.norm = nn.Linear(width, width), nn.LayerNorm(width)

    def see(self, picture: Tensor) -> Tensor:
        """The patches' features."""
        return self.norm(self.rise(F.relu(self.embed(picture).flatten(2).mT)))


class Convolutions(Pictures):
    """A picture through four convolutions; what is left of it is 1/16 as wide and high, rounded up."""

    def __init__(self, side: int, channels: int, ground: float, choices: list[int], width: int) -> None:
        left = side
        for _ in range(4):
            left = (left + 1) // 2
        super().__init__(left**2, ground, choices, width)
        sizes = [channels, 24, 24, 48, 48]
        self.layers = nn.ModuleList(nn.Conv2d(a, b, 3, stride=2, padding=1) for a, b in itertools.pairwise(sizes))
        self.norms = nn.ModuleList(nn.BatchNorm2d(size) for size in sizes[1:])
        self.embed = nn.Linear(sizes[-1], width)

    def see(self, picture: Tensor) -> Tensor:
        """The features that are left."""
        for layer, norm in zip(self.layers, self.norms, strict=True):
            picture = F.relu(norm(layer(picture)))
        return self.embed(picture.flatten(2).mT)
