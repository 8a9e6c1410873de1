"""Shards: tokenize a plan's text into files of tokens, in parallel, each finished or absent, and index the documents.

Used by `pmi data prepare`. A finished shard has a record in DIR/.work with the hash of its text and its tokenizer: run
again, it is taken as it is.
"""

import hashlib
import io
import json
import os
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from lm.data.children import dependent_children
from lm.data.files import sha256_of, write_atomically
from lm.data.prepared import WORK, Shard, Split
from lm.data.staging import Planned, Span, Staged
from lm.data.tokenizer import Tokenizer, load_tokenizer
from lm.errors import UserError

SHARD_BYTES = 16 << 20
"""Text per shard: what an interruption can cost, and what one process holds in memory."""


def write_shards(
    out: Path, staged: Staged, splits: dict[str, list[Planned]], tokenizer: Tokenizer, processes: int
) -> dict[str, Split]:
    """Write every shard and every split's index into `out`, where `tokenizer` is saved already."""
    rows: list[dict[str, Any]] = []
    for split, documents in splits.items():
        spans = [(span, number) for number, document in enumerate(documents) for span in document.spans]
        for number, group in enumerate(_groups(spans)):
            row = {"file": f"{split}-{number:05}.bin", "split": split}
            rows.append(row | {"spans": [list(span) for span, _ in group], "documents": [n for _, n in group]})
    processes = min(processes, len(rows))
    with dependent_children():
        done = datasets.Dataset.from_list(rows).map(
            write_shard,
            fn_kwargs={"blocks": staged.blocks, "out": str(out), "fingerprint": tokenizer.fingerprint()},
            num_proc=processes if processes > 1 else None,
            keep_in_memory=True,
            new_fingerprint=os.urandom(8).hex(),  # never from a cache: the files are the result
            desc="Tokenizing (shards)",
        )
    return {name: _indexed(out, name, documents, done) for name, documents in splits.items()}


def _groups(spans: list[tuple[Span, int]]) -> Iterator[list[tuple[Span, int]]]:
    group: list[tuple[Span, int]] = []
    size = 0
    for span, document in spans:
        group.append((span, document))
        size += span.stop - span.start
        if size >= SHARD_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def write_shard(row: dict[str, Any], blocks: Any, out: str, fingerprint: str) -> dict[str, Any]:
    """Tokenize one shard's text and write it, unless it is there already; runs in a process of `datasets`."""
    folder = Path(out)
    tokenizer = _load(folder, fingerprint)
    spans = [Span(*span) for span in row["spans"]]
    contents = [text_of(blocks, span) for span in spans]
    key = hashlib.sha256(f"{fingerprint} {row['documents']} {spans}".encode())
    for content in contents:
        key.update(content)
    path, record = folder / row["file"], folder / WORK / f"{row['file']}.json"
    try:
        found: dict[str, Any] = json.loads(record.read_text())
        if found["key"] == key.hexdigest() and path.stat().st_size == sum(found["tokens"]) * tokenizer.dtype.itemsize:
            return found
    except (OSError, ValueError, KeyError):
        pass  # no record, or one of another attempt: the shard is written
    arrays = []
    for content in contents:
        ids = tokenizer.encode_bytes(content)
        if tokenizer.lossless and not tokenizer.gives_back(content, ids):
            raise UserError(
                f"{row['file']}: tokenizer {tokenizer.kind} does not give back the text that begins {content[:40]!r}; "
                "use --tokenizer bytes, and report the text"
            )
        arrays.append(ids.astype(tokenizer.dtype.newbyteorder("<")))
    tokens = np.concatenate(arrays)
    raw = tokens.view(np.uint8).data
    write_atomically(path, raw)
    result = {
        "key": key.hexdigest(),
        "sha256": hashlib.sha256(raw).hexdigest(),
        "tokens": [len(array) for array in arrays],
        "words": [len(content.split()) for content in contents],
        "bytes": [len(content) for content in contents],
        "unknown": int((tokens == tokenizer.unknown).sum()) if tokenizer.unknown is not None else 0,
    }
    write_atomically(record, json.dumps(result).encode())
    return result


def _indexed(out: Path, name: str, documents: list[Planned], shards: Any) -> Split:
    """Write a split's document index and names, and sum up its counts."""
    index = np.zeros((len(documents), 4), dtype=np.int64)
    files: list[Shard] = []
    unknown = 0
    for row in shards:
        if row["split"] != name:
            continue
        numbers = np.asarray(row["documents"])
        for column, what in enumerate(("tokens", "words", "bytes"), start=1):
            np.add.at(index[:, column], numbers, row[what])
        files.append(Shard(file=row["file"], tokens=sum(row["tokens"]), sha256=row["sha256"]))
        unknown += row["unknown"]
    index[1:, 0] = np.cumsum(index[:-1, 1])
    buffer = io.BytesIO()
    np.save(buffer, index)
    write_atomically(out / f"{name}.index.npy", buffer.getvalue())
    write_atomically(out / f"{name}.names.txt", "".join(f"{document.name}\n" for document in documents).encode())
    totals = index.sum(axis=0).tolist()
    return Split(
        documents=len(documents),
        tokens=totals[1],
        words=totals[2],
        bytes=totals[3],
        unknown=unknown,
        index_sha256=sha256_of(out / f"{name}.index.npy"),
        shards=files,
    )


def text_of(blocks: Any, span: Span) -> bytes:
    """The text of a span."""
    text: bytes = blocks[span.block]["text"]
    return text[span.start : span.stop]


@lru_cache(maxsize=1)
def _load(folder: Path, fingerprint: str) -> Tokenizer:
    return load_tokenizer(folder)
