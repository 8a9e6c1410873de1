"""Streaming generation of one text: `pmi generate`."""

import codecs
from collections.abc import Iterator

import torch
from torch import Tensor

from lm.model.pretrained import Checkpoint


def choose(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    """A token id from logits [vocab]: the largest at temperature 0, else drawn."""
    if temperature == 0:
        return int(logits.argmax())
    logits = (logits.float() - logits.max()) / temperature  # from the top, so that no temperature overflows
    if top_k is not None and top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[-1], -torch.inf)
    return int(torch.multinomial(logits.softmax(-1), 1, generator=generator))


def stream(
    checkpoint: Checkpoint, prompt: str, tokens: int, temperature: float = 0.8, top_k: int | None = None, seed: int = 0
) -> Iterator[str]:
    """Pieces of text that continue `prompt`; no piece ends inside a character."""
    model, tokenizer = checkpoint.model, checkpoint.tokenizer
    generator = torch.Generator().manual_seed(seed)
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    with torch.inference_mode():
        state = model.initial_state(1)
        new = torch.tensor([[tokenizer.bos, *tokenizer.encode(prompt)]], device=model.device)
        for _ in range(tokens):
            hidden, state = model(new, state, donate=True)
            logits = model.head.logits(hidden[0, -1]).cpu()
            logits[tokenizer.bos] = -torch.inf  # never a target in training
            token = choose(logits, temperature, top_k, generator)
            piece = decoder.decode(tokenizer.decode_bytes([token]))
            if piece:
                yield piece
            new = torch.tensor([[token]], device=model.device)
    rest = decoder.decode(b"", final=True)
    if rest:
        yield rest
