"""Encoders that reason: what is perceived goes through layers whose mixing part is chosen by configuration.

    model = Reasoner(config.encoder, perception, len(dataset.answers))      # all of it from a configuration: build.py
    logits = model(inputs)                              # [b, answers]

- perceptions, at their end the question and a class token; pre-norm layers of a mixing part and a feed-forward network
- the answer is read from the last position: the class token, or the question where the configuration leaves the token out
- mixer memory is the language model's own memory (lm/model/memory.py) in the paper's order: each layer writes its perceptions and
  then reads what it wrote. One memory goes through all layers (scope global), or each layer starts from its own (scope layer)
- nothing is causal here: a question is asked of a whole story or picture

Axes: b sample, t position, d feature, h head, n slot.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm.model.attention import Span, attend, encoder_span
from lm.model.decoder import InitialMemory
from lm.model.memory import MemoryModule
from lm.model.state import Memory, Open, map_tensors
from lm.reasoning.config import EncoderConfig
from lm.reasoning.perception import Perception

LOCAL = 2
"""Of sparse attention: every head that is a multiple of this is local, the others are strided."""


class Attention(nn.Module):
    """Multi-head attention from `x [b, t, d]` to `y [b, r, d]`."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width, bias=False)
        self.key_value = nn.Linear(width, 2 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        """Attend under `mask` (broadcast to [b, h, t, r], added to the scores)."""
        q = self.query(x)[:, None].unflatten(-1, (self.heads, -1))
        k, v = self.key_value(y)[:, None].unflatten(-1, (2, self.heads, -1)).unbind(3)
        return self.out(attend(q, k, v, mask)[:, 0])


class SelfAttention(Attention):
    """All pairs of positions."""

    def mix(self, x: Tensor, span: Span) -> Tensor:
        """What every position takes from all."""
        return self(x, x, span.mask)


class SparseAttention(Attention):
    """Factorised heads (Child et al., 2019): some see the block a position is in, the others every stride-th position."""

    def mix(self, x: Tensor, span: Span) -> Tensor:
        """What every position takes from those that its heads see."""
        return self(x, x, span.mask + self.pattern(x.shape[1], x.device))

    def pattern(self, t: int, device: torch.device) -> Tensor:
        """[1, h, t, t] with -inf where a head does not look. The class token, at the end, sees all and is seen by all."""
        stride = max(1, round(t**0.5))
        place = torch.arange(t, device=device)
        local = place[:, None] // stride == place // stride
        strided = place[:, None] % stride == place % stride
        seen = torch.stack([local if head % LOCAL == 0 else strided for head in range(self.heads)])
        seen[:, -1] = seen[:, :, -1] = True
        seen |= torch.eye(t, dtype=torch.bool, device=device)
        return torch.zeros(seen.shape, device=device).masked_fill_(~seen, -torch.inf)[None]


class InducedAttention(nn.Module):
    """A set transformer's ISAB: learned points gather from all positions, and the positions read from the points."""

    def __init__(self, width: int, heads: int, points: int) -> None:
        super().__init__()
        self.points = nn.Parameter(torch.randn(points, width))
        self.gather, self.give = Attention(width, heads), Attention(width, heads)
        self.norm, self.norm_risen = nn.LayerNorm(width), nn.LayerNorm(width)
        self.rise = nn.Linear(width, width)

    def mix(self, x: Tensor, span: Span) -> Tensor:
        """What every position takes from the points."""
        points = self.points.expand(x.shape[0], -1, -1)
        gathered = self.norm(points + self.gather(points, x, span.mask))
        gathered = self.norm_risen(gathered + F.relu(self.rise(gathered)))
        return self.give(x, gathered, x.new_zeros(1, 1, 1, 1))


class Layer(nn.Module):
    """A mixing part (the memory's weights stand beside the layers, as they may be shared) and a feed-forward network."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        width, heads = config.width, config.heads
        self.mixer_norm = nn.LayerNorm(width) if config.mixer != "none" else None
        self.mixer: SelfAttention | SparseAttention | InducedAttention | None = None
        if config.mixer == "attention":
            self.mixer = SelfAttention(width, heads)
        elif config.mixer == "sparse":
            self.mixer = SparseAttention(width, heads)
        elif config.mixer == "induced":
            self.mixer = InducedAttention(width, heads, config.inducing)
        self.feedforward_norm = nn.LayerNorm(width)
        self.rise, self.fall = nn.Linear(width, config.feedforward), nn.Linear(config.feedforward, width)

    def feedforward(self, x: Tensor) -> Tensor:
        """What the feed-forward network adds."""
        return self.fall(F.relu(self.rise(self.feedforward_norm(x))))


class Encoder(nn.Module):
    """The layers, applied one after the other, with the memory that goes through them."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config, memory = config, config.memory
        self.layers = nn.ModuleList(Layer(config) for _ in range(1 if config.parameters == "tied" else config.layers))
        self.dropout = nn.Dropout(config.dropout)
        weights = states = 0
        if memory is not None:
            weights = 1 if memory.parameters == "tied" else config.layers
            states = 1 if memory.scope == "global" else config.layers
        self.memories = nn.ModuleList(MemoryModule(config) for _ in range(weights))
        self.initial_memory = InitialMemory(config, states) if states else None

    def forward(self, x: Tensor, real: Tensor | None) -> Tensor:
        """`x [b, t, d]` after all layers; positions that are not `real [b, t]` are padding."""
        span = encoder_span(x, real)
        memories = () if self.initial_memory is None else self.initial_memory(x.shape[0])
        memory = memories[0] if memories else None
        for i in range(self.config.layers):
            layer = cast(Layer, self.layers[i % len(self.layers)])
            if layer.mixer_norm is not None:
                h = layer.mixer_norm(x)
                if layer.mixer is not None:
                    added = layer.mixer.mix(h, span)
                else:
                    assert memory is not None
                    before = memory if len(memories) == 1 else memories[i]
                    added, memory = recall(cast(MemoryModule, self.memories[i % len(self.memories)]), before, h, real, span)
                x = x + self.dropout(added)
            x = x + self.dropout(layer.feedforward(x))
        return x


def recall(module: MemoryModule, memory: Memory, h: Tensor, real: Tensor | None, span: Span) -> tuple[Tensor, Memory]:
    """Write `h [b, t, d]`, then read what was written: what is read, and the memory after (paper, Algorithm 1)."""
    memory = module.write_together(memory, h, real)
    readout = map_tensors(lambda x: x[:, None], module.readout(memory))
    blank = Open(h, h, h)  # only spans within a segment keep an open part
    read, _ = module.read(readout, h[:, None], blank, span, False)
    return read[:, 0], memory


class Look(NamedTuple):
    """What one layer's reading attends to, mean over heads; None for a level that is not read."""

    working: Tensor | None  # [b, t, n]
    long_term: Tensor | None  # [b, t, n]


class Reasoner(nn.Module):
    """Perception, encoder and answer."""

    def __init__(self, config: EncoderConfig, perception: Perception, answers: int) -> None:
        super().__init__()
        self.perception, self.encoder = perception, Encoder(config)
        # where nothing mixes positions, the answer is read from their mean
        self.averages = config.mixer == "none"
        self.token = nn.Parameter(torch.randn(config.width)) if config.answer == "token" and not self.averages else None
        self.norm, self.answer = nn.LayerNorm(config.width), nn.Linear(config.width, answers)
        self._initialise()

    def _initialise(self) -> None:
        for module in self.encoder.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        nn.init.zeros_(self.answer.weight)
        nn.init.zeros_(self.answer.bias)

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        """Scores of the answers [b, answers]."""
        x, real = self.perception(inputs)
        if self.averages:
            x = x.mean(1, keepdim=True)
        elif self.token is not None:
            x = torch.cat([x, self.token.expand(x.shape[0], 1, -1)], 1)
            real = None if real is None else F.pad(real, (0, 1), value=True)
        x = self.encoder(self.encoder.dropout(x), real)
        return self.answer(self.norm(x[:, -1]))

    @torch.inference_mode()
    def look(self, inputs: dict[str, Tensor]) -> list[Look]:
        """What each layer's reading attends to (mixer memory only)."""
        with _noting(self.encoder) as notes:
            self(inputs)
        looks = []
        for module, readout, h in notes:
            own, others = module.read.attention(readout, h)
            looks.append(Look(*(None if level is None else level.mean(-2)[:, 0] for level in (own, others))))
        return looks


@contextmanager
def _noting(encoder: Encoder) -> Iterator[list[tuple[MemoryModule, Any, Tensor]]]:
    """What each layer's reader is given, in order."""
    notes: list[tuple[MemoryModule, Any, Tensor]] = []
    modules = [cast(MemoryModule, module) for module in encoder.memories]
    owners = {id(module.read): module for module in modules}

    def note(reader: nn.Module, given: tuple[Any, ...]) -> None:
        notes.append((owners[id(reader)], given[0], given[1]))

    hooks = [module.read.register_forward_pre_hook(note) for module in modules]
    try:
        yield notes
    finally:
        for hook in hooks:
            hook.remove()
