"""`pmi certify`: the proofs on a checkpoint, trained or fresh."""

import copy
from collections.abc import Callable

import torch

from lm.model.decoder import PMI
from lm.model.proofs import Proof, attempt, draw_zeros, liveness, prove

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def certify(model: PMI, dtype: str, seed: int, segments: int, progress: Callable[[str], None]) -> list[Proof]:
    """All proofs of a checkpoint's model.

    Where a projection is still all zero (a fresh checkpoint), a leak behind it could not be seen: the proofs then run on a copy
    with those drawn at random. Liveness is always measured on the model itself, for that is what will be used.
    """
    model = model.compute_in(DTYPES[dtype])
    fresh = any(p.dim() > 1 and p.numel() and not bool(p.any()) for p in model.parameters())
    subject = draw_zeros(copy.deepcopy(model), seed) if fresh else model
    proofs = prove(subject, seed, segments, progress)
    if not fresh:
        return proofs
    own = attempt(model, liveness, "liveness", torch.Generator().manual_seed(seed))
    return [own if proof.name == own.name else proof for proof in proofs]
