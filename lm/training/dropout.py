"""Dropout whose every draw is a function of (seed, step, lane): the same at any number of processes and after any resume."""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn


class LaneDropout(nn.Module):
    """Dropout on `[lanes, ...]`; each lane draws from a generator of its own, begun anew at each step."""

    def __init__(self, rate: float, seed: int) -> None:
        super().__init__()
        self.rate, self.seed = rate, seed
        self._generators: list[torch.Generator] = []

    def begin(self, step: int, lanes: Sequence[int], device: torch.device) -> None:
        """Start the draws of a forward pass over `lanes` (their global ids) at `step`."""
        self._generators = [torch.Generator(device).manual_seed(draw_seed(self.seed, step, lane)) for lane in lanes]

    def forward(self, x: Tensor) -> Tensor:
        """`x` with elements dropped while training."""
        if not self.training or not self.rate:
            return x
        kept = torch.empty_like(x)
        for row, generator in zip(kept, self._generators, strict=True):
            row.bernoulli_(1 - self.rate, generator=generator)
        return x * kept.div_(1 - self.rate)


def draw_seed(seed: int, step: int, lane: int) -> int:
    """63 bits that mix the three."""
    return int.from_bytes(hashlib.sha256(f"{seed} {step} {lane}".encode()).digest()[:8], "little") >> 1
