"""Prepared data: memory-mapped token shards with a document index and a manifest; `open_prepared(DIR)` reads them.

DIR/manifest.json           written last: a folder without it is not whole
DIR/tokenizer.json ...      the tokenizer, with its model file
DIR/train-00000.bin ...     tokens, little-endian, in the manifest's dtype; a document may run over several shards
DIR/train.index.npy         int64 [documents, 4]: first token, tokens, words, bytes
DIR/train.names.txt         one document name per line
"""

import hashlib
import json
import mmap
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lm.data.files import sha256_of
from lm.data.tokenizer import Tokenizer, load_tokenizer
from lm.errors import UserError, collecting, from_validation

MANIFEST = "manifest.json"
WORK = ".work"
"""Beside the manifest while data is being prepared; gone when the folder is whole."""
SPLITS = ("train", "validation", "test", "dev")
RELEASE_AFTER = 16 << 20
"""Bytes read through the map before its pages are given back, so that resident memory stays flat on any corpus."""


class Shard(BaseModel):
    """One file of tokens."""

    model_config = ConfigDict(extra="forbid")
    file: str = Field(pattern=r"^[a-z]+-\d{5,}\.bin$")
    """Its name in the folder: never a path that leads elsewhere."""
    tokens: int = Field(gt=0)
    sha256: str


class Split(BaseModel):
    """What a split holds."""

    model_config = ConfigDict(extra="forbid")
    documents: int = Field(gt=0)
    tokens: int = Field(gt=0)
    words: int
    """Whitespace-separated words (ASCII whitespace)."""
    bytes: int
    unknown: int
    """Tokens that are the tokenizer's unknown id."""
    index_sha256: str
    shards: list[Shard]

    @property
    def unknown_rate(self) -> float:
        """The share of tokens that are unknown: what evaluation prints beside a figure on partial data."""
        return self.unknown / self.tokens


class Manifest(BaseModel):
    """What a prepared folder holds, and of what it was made."""

    model_config = ConfigDict(extra="forbid")
    format: Literal[1] = 1
    dataset: str
    request: dict[str, Any]
    """The options that the folder was prepared with."""
    source: dict[str, dict[str, Any]]
    """Size and MD5 of each text file read (the first 1,000), and `all` of them together."""
    partial: bool
    """The data is not the known original: figures on it are not comparable with published ones."""
    differences: list[str]
    """Why it is partial."""
    tokenizer: str
    """The tokenizer's fingerprint."""
    vocab_size: int
    dtype: Literal["uint8", "uint16", "uint32"]
    splits: dict[Annotated[str, Field(pattern="^[a-z]+$")], Split]

    def fingerprint(self) -> str:
        """A short hash of every token and every document boundary."""
        content = {name: [split.index_sha256, [s.sha256 for s in split.shards]] for name, split in self.splits.items()}
        return hashlib.sha256(json.dumps([self.tokenizer, content], sort_keys=True).encode()).hexdigest()[:16]


class Document(NamedTuple):
    """One document of a split. `words` and `bytes` are counts of its text."""

    data: "PreparedSplit"
    number: int
    start: int
    length: int
    words: int
    bytes: int

    @property
    def name(self) -> str:
        """Its name in the source."""
        return self.data.names()[self.number]

    def tokens(self, start: int = 0, stop: int | None = None) -> NDArray[Any]:
        """Its tokens from `start` to `stop`, without BOS: a view of the shard, a copy only where two shards meet."""
        stop = self.length if stop is None else min(stop, self.length)
        return self.data.read(self.start + start, self.start + max(start, stop))


class PreparedSplit:
    """The tokens of one split, as one long array over its shards, and its documents."""

    def __init__(self, folder: Path, name: str, split: Split, dtype: np.dtype[Any]) -> None:
        self.folder, self.name, self.counts, self.dtype = folder, name, split, dtype
        self.index: NDArray[np.int64] = np.load(folder / f"{name}.index.npy", mmap_mode="r").view(np.ndarray)
        self._maps = [_map(folder / shard.file) for shard in split.shards]
        self._arrays = [np.frombuffer(map_, dtype=dtype) for map_ in self._maps]
        self._ends = np.cumsum([shard.tokens for shard in split.shards]).tolist()
        self._read = 0
        self._names: list[str] | None = None

    def __len__(self) -> int:
        return self.counts.documents

    def __getitem__(self, number: int) -> Document:
        start, length, words, size = self.index[number].tolist()
        return Document(self, range(len(self))[number], start, length, words, size)

    def __iter__(self) -> Iterator[Document]:
        return (self[number] for number in range(len(self)))

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each document."""
        return self.index[:, 1]

    def names(self) -> list[str]:
        """The documents' names, in order."""
        if self._names is None:
            path = self.folder / f"{self.name}.names.txt"
            self._names = path.read_bytes().decode("utf-8", errors="replace").split("\n")[:-1]
            if len(self._names) != len(self):
                raise UserError(
                    f"{path}: {len(self._names):,} names for {len(self):,} documents; "
                    "restore it or prepare the data again with --force"
                )
        return self._names

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Tokens `start` to `stop` of the split, read-only."""
        self._read += (stop - start) * self.dtype.itemsize
        if self._read > RELEASE_AFTER:
            self._read = 0
            for map_ in self._maps:  # the pages stay in the page cache; only this process lets go of them
                map_.madvise(mmap.MADV_DONTNEED)
        shard = bisect_right(self._ends, start)
        if stop <= start or shard >= len(self._ends):
            return self._arrays[0][:0]
        first = self._ends[shard - 1] if shard else 0
        if stop <= self._ends[shard]:
            return self._arrays[shard][start - first : stop - first]
        return np.concatenate([self._arrays[shard][start - first :], self.read(self._ends[shard], stop)])


class Prepared:
    """A prepared folder: its manifest, its tokenizer and its splits."""

    def __init__(self, folder: Path, manifest: Manifest, tokenizer: Tokenizer) -> None:
        self.folder, self.manifest, self.tokenizer = folder, manifest, tokenizer
        self.fingerprint = manifest.fingerprint()
        self._splits: dict[str, PreparedSplit] = {}

    def split(self, name: str) -> PreparedSplit:
        """The split called `name`; UserError where the folder has none."""
        if name not in self.manifest.splits:
            raise UserError(f"{self.folder}: no split {name!r}; it has: {', '.join(self.manifest.splits)}")
        if name not in self._splits:
            dtype = np.dtype(self.manifest.dtype).newbyteorder("<")
            self._splits[name] = PreparedSplit(self.folder, name, self.manifest.splits[name], dtype)
        return self._splits[name]

    def documents(self, split: str) -> Iterator[Document]:
        """Each document of a split, in the order of the source."""
        return iter(self.split(split))


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a prepared folder; UserError where there is none, or none that can be read."""
    path = folder / MANIFEST
    if not path.is_file():
        what = "prepared data that is not whole" if (folder / WORK).is_dir() else "no prepared data"
        raise UserError(f"{folder}: {what} (no {MANIFEST}); run (again) `pmi data prepare ... --out {folder}`")
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise from_validation(error, str(path)) from error


def open_prepared(folder: Path | str, verify: bool = False, tokenizer: str | None = None) -> Prepared:
    """Open a prepared folder; UserError with every problem found (missing or changed files, wrong tokenizer).

    Sizes are always checked; `verify` also reads every byte and compares checksums. `tokenizer` is the fingerprint that
    the caller's model was trained with.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    with collecting() as problems:
        for name, split in manifest.splits.items():
            problems += _problems(folder, name, split, np.dtype(manifest.dtype).itemsize, verify)
    loaded = load_tokenizer(folder)
    if loaded.fingerprint() != manifest.tokenizer:
        raise UserError(
            f"{folder}: its tokenizer is {loaded.fingerprint()}, its tokens were made with {manifest.tokenizer}; "
            "restore tokenizer.json or prepare the data again"
        )
    if tokenizer is not None and tokenizer != manifest.tokenizer:
        raise UserError(
            f"{folder}: made with tokenizer {manifest.tokenizer}, the model needs {tokenizer}; "
            "prepare it with `pmi data prepare ... --tokenizer FOLDER`, FOLDER being the model's"
        )
    return Prepared(folder, manifest, loaded)


def _problems(folder: Path, name: str, split: Split, itemsize: int, verify: bool) -> Iterator[str]:
    again = "restore it or prepare the data again with --force"
    index, names = folder / f"{name}.index.npy", folder / f"{name}.names.txt"
    if not index.is_file():
        yield f"{index}: missing, the manifest names it; {again}"
    elif not _fits(index, split):
        yield f"{index}: not an index of the {split.documents:,} documents that the manifest counts; {again}"
    elif verify and sha256_of(index) != split.index_sha256:
        yield f"{index}: its checksum is not the manifest's {split.index_sha256[:16]}; {again}"
    if not names.is_file():
        yield f"{names}: missing, the manifest names it; {again}"
    elif verify and names.read_bytes().count(b"\n") != split.documents:
        yield f"{names}: not one name for each of the {split.documents:,} documents; {again}"
    for shard in split.shards:
        path = folder / shard.file
        if not path.is_file():
            yield f"{path}: missing, the manifest names it; {again}"
        elif path.stat().st_size != shard.tokens * itemsize:
            yield f"{path}: {path.stat().st_size:,} bytes, the manifest says {shard.tokens * itemsize:,}; {again}"
        elif verify and sha256_of(path) != shard.sha256:
            yield f"{path}: its checksum is not the manifest's {shard.sha256[:16]}; {again}"


def _fits(index: Path, split: Split) -> bool:
    try:
        array = np.load(index, mmap_mode="r")
    except (ValueError, OSError, EOFError):
        return False
    return array.dtype == np.int64 and array.shape == (split.documents, 4) and int(array[-1, :2].sum()) == split.tokens


def _map(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
