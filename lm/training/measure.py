"""Measuring while training: loss on the validation split with carried memory, and a sample of generated text."""

from itertools import islice

import torch

from lm.config import EvaluationConfig, ModelConfig
from lm.data.lanes import Lanes
from lm.data.prepared import Prepared
from lm.data.tokenizer import Tokenizer
from lm.generation.stream import stream
from lm.model import PMI, State
from lm.model.pretrained import Checkpoint
from lm.training.backends import Backend
from lm.training.world import World

SPLIT = "validation"


def validation_loss(
    backend: Backend, data: Prepared, config: EvaluationConfig, model: ModelConfig, blank: State, segments: int, world: World
) -> float:
    """Nats per token over the validation split (or its first tokens), read in stretches side by side, memory carried.

    Every rank makes the same number of calls, so sharded weights can be gathered in each.
    """
    split, t = data.split(SPLIT), model.segment
    whole = int((-(-split.lengths // t)).sum())
    stretches = max(world.size, min(config.lanes, whole))
    lanes = Lanes(data, SPLIT, lanes=stretches, segment=t, rank=world.rank, world=world.size)
    left = max(1, min(whole // stretches, config.tokens // (t * stretches)))
    state, total, count = blank.select([0] * len(lanes.own)), 0.0, 0
    backend.train(False)
    with torch.no_grad():
        while left:
            batch = lanes.next_batch(min(segments, left))
            mask = batch.mask()
            inputs = (x.to(world.device) for x in (batch.tokens, batch.targets, mask, batch.starts))
            loss, state = backend.forward(*inputs, state, 0, batch.lanes.tolist())
            total, count = total + float(loss), count + int(mask.sum())
            left -= batch.starts.shape[1]
    backend.train(True)
    nats, tokens = world.sum([total, count])
    return nats / tokens


def sample(backend: Backend, config: EvaluationConfig, model: ModelConfig, tokenizer: Tokenizer, world: World) -> str:
    """Generated text behind the prompt, from a whole copy of the weights on the first rank; "" on the others."""
    if not config.sample:
        return ""
    weights = {name: whole if world.first else None for name, gather in backend.weights() if (whole := gather()) is not None}
    if not world.first:
        return ""
    with torch.random.fork_rng():  # building a model draws numbers that training must not miss
        copy = PMI(model)
    with torch.no_grad():
        for name, parameter in copy.named_parameters():
            value = weights.get(name)
            if value is not None:
                parameter.copy_(value)
    pieces = stream(Checkpoint(copy.eval(), tokenizer, ""), config.prompt, config.sample)
    return config.prompt + "".join(islice(pieces, config.sample))
