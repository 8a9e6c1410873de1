"""Prepared data made up for tests, without a tokenizer: token i of the split is the number i."""

import hashlib
import io
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from lm.data.prepared import Manifest, Prepared, Shard, Split

BOS = 10**9


def made(folder: Path, lengths: Sequence[int], shard: int = 1000, split: str = "train") -> Prepared:
    """Prepared data whose documents have these lengths; token i of the split is the number i, and BOS is 10**9."""
    total = sum(lengths)
    shards = []
    for number, start in enumerate(range(0, total, shard)):
        tokens = np.arange(start, min(total, start + shard), dtype="<u4")
        name = f"{split}-{number:05}.bin"
        (folder / name).write_bytes(tokens.tobytes())
        shards.append(Shard(file=name, tokens=len(tokens), sha256=hashlib.sha256(tokens.tobytes()).hexdigest()))
    index = np.zeros((len(lengths), 4), dtype=np.int64)
    index[:, 1] = lengths
    index[1:, 0] = np.cumsum(lengths)[:-1]
    buffer = io.BytesIO()
    np.save(buffer, index)
    (folder / f"{split}.index.npy").write_bytes(buffer.getvalue())
    (folder / f"{split}.names.txt").write_text("".join(f"document {i}\n" for i in range(len(lengths))))
    counts = Split(
        documents=len(lengths),
        tokens=total,
        words=0,
        bytes=total,
        unknown=0,
        index_sha256=hashlib.sha256(buffer.getvalue()).hexdigest(),
        shards=shards,
    )
    manifest = Manifest(
        dataset="text",
        request={},
        source={},
        partial=False,
        differences=[],
        tokenizer="made",
        vocab_size=BOS + 1,
        dtype="uint32",
        splits={split: counts},
    )
    tokenizer: Any = SimpleNamespace(bos=BOS)
    return Prepared(folder, manifest, tokenizer)
