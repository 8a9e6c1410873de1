"""One text from one model in this process: what `pmi demo` and samples during training use. The engine serves many."""

from collections.abc import Iterator

import torch

from lm.generation.sampling import Batch, Sampling, last_ids, remember, sample
from lm.generation.text import TextStream
from lm.model.pretrained import Checkpoint


def stream(checkpoint: Checkpoint, prompt: str, tokens: int, sampling: Sampling | None = None) -> Iterator[str]:
    """Pieces of text that continue `prompt`; no piece ends inside a character."""
    model, tokenizer = checkpoint.model, checkpoint.tokenizer
    settings = Batch.of([(sampling or Sampling()).checked()], model.device)
    text = TextStream(tokenizer)
    ids = [tokenizer.bos, *tokenizer.encode_prompt(prompt)]
    recent = last_ids(ids, len(ids), model.device)[None]
    with torch.inference_mode():
        state = model.initial_state(1)
        new = torch.tensor([ids], device=model.device)
        for _ in range(tokens):
            hidden, state = model(new, state, donate=True)
            logits = model.head.logits(hidden[:, -1])
            logits[:, tokenizer.bos] = -torch.inf  # never a target in training
            chosen = sample(logits, settings, recent, state.position)
            remember(recent, state.position, chosen)
            new = chosen[:, None]
            piece = text.feed(chosen.tolist())
            if piece:
                yield piece
    rest = text.close()
    if rest:
        yield rest
