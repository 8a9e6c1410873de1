"""What the data tests share: prepared data made up of numbers, sources, and the command as a process of its own."""

import hashlib
import io
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from lm.data.prepared import Manifest, Prepared, Shard, Split, open_prepared

"""The fixture `pmi`: exit code, standard output, standard error of a command line."""
REPOSITORY = Path(__file__).parents[2]
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


def write(folder: Path, files: dict[str, str | bytes]) -> Path:
    """Write files of these names and contents into `folder`."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def whole_text(folder: Path, split: str) -> bytes:
    """The text of a prepared split, decoded."""
    data = open_prepared(folder)
    return b"".join(data.tokenizer.decode_bytes(document.tokens().tolist()) for document in data.documents(split))


DRIVER = """
import signal, sys
from lm.data import shards
signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the tests themselves run in the background
shards.SHARD_BYTES = 1 << 15
from lm.cli import app, run
sys.exit(run(app, sys.argv[1:]))
"""


def start(*arguments: object) -> subprocess.Popen:
    """`pmi data prepare` with small shards, as a process of its own."""
    command = [sys.executable, "-c", DRIVER, "data", "prepare", *map(str, arguments)]
    return subprocess.Popen(
        command,
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
