"""The data sets the project knows: which files make which split, how the original is recognised, where it is fetched.

Checks are by size and MD5 of the text itself, whatever it was packed in: a file of the original's size with another
checksum is damaged (an error); another size is another text, and the manifest says `partial`.
"""

import base64
import json
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from lm.data.fetch import TIMEOUT, Remote, fetch, fetch_all
from lm.data.files import write_atomically
from lm.errors import UserError, collecting

ENWIK8_URL = "http://mattmahoney.net/dc/enwik8.zip"
PG19_LISTING = "https://storage.googleapis.com/storage/v1/b/deepmind-gutenberg/o"
PG19_FILES = "https://storage.googleapis.com/deepmind-gutenberg/"


class Sum(NamedTuple):
    """Size and MD5 of a text."""

    size: int
    md5: str


@dataclass(frozen=True)
class Original:
    """One data set: how its files are read and how the original is known."""

    name: str
    tokenizer: str
    """Kind of tokenizer where the user names none."""
    pattern: str
    """Which files of a folder or archive belong to it."""
    split_of: Callable[[str], str | None] | None
    """The split that a file belongs to by its name; where there is no such rule, splits are cut from the whole text."""
    whole_lines: bool = True
    """Where splits are cut: cut after a newline."""
    utf8: bool = True
    """The text must be UTF-8 (Enwik8 is bytes: it ends inside a character)."""
    required: tuple[str, ...] = ("train", "validation", "test")
    sums: Mapping[str, Sum] = field(default_factory=dict)
    """The original's text by split (`all`: the whole)."""
    documents: Mapping[str, int] = field(default_factory=dict)
    words: Mapping[str, int] = field(default_factory=dict)
    tokens: Mapping[str, int] = field(default_factory=dict)
    """Tokens by split with the data set's own tokenizer."""
    types: int | None = None
    """Vocabulary of the original training text, BOS not counted."""
    fetch: Callable[[Path], Path] | None = None


def split_of_path(name: str) -> str | None:
    """The split named by a file or its folders: `train/1.txt`, `train_core60/1.txt`, `valid.txt`, `dev-a/1.txt`."""
    for part in PurePosixPath(name).parts:
        found = re.match(r"(train|valid|validation|test|dev)(?:$|[._-])", part)
        if found:
            return {"valid": "validation"}.get(found[1], found[1])
    return None


def _split_of_wikitext(name: str) -> str | None:
    found = re.match(r"wiki\.(train|valid|test)\.(tokens|raw)", PurePosixPath(name).name)
    return {"train": "train", "valid": "validation", "test": "test"}[found[1]] if found else None


def _fetch_enwik8(folder: Path) -> Path:
    return fetch(ENWIK8_URL, folder / "enwik8.zip")


def _fetch_wikitext(configuration: str) -> Callable[[Path], Path]:
    def fetch_(folder: Path) -> Path:
        import datasets

        names = {"train": "wiki.train.tokens", "validation": "wiki.valid.tokens", "test": "wiki.test.tokens"}
        folder = folder / configuration
        if all((folder / name).exists() for name in names.values()):
            return folder
        try:
            rows = datasets.load_dataset("Salesforce/wikitext", configuration)
        except (OSError, ValueError, RuntimeError) as error:
            raise UserError(
                f"Salesforce/wikitext, {configuration}: cannot be fetched ({_first_line(error)}); "
                "run again with a connection, or pass the wiki.*.tokens files with --source"
            ) from error
        folder.mkdir(parents=True, exist_ok=True)
        for split, name in names.items():
            # The published rows leave out the single space of an empty line: with it the text has its known MD5.
            lines = (line if line else " \n" for line in rows[split]["text"])
            write_atomically(folder / name, "".join(lines).encode())
        return folder

    return fetch_


def _fetch_pg19(folder: Path, listing: str = PG19_LISTING, base: str = PG19_FILES) -> Path:
    """All books from the public bucket, each by the MD5 that the bucket's listing gives."""
    folder = folder / "pg19"
    files: list[Remote] = []
    for split in ("train", "validation", "test"):
        page = ""
        while True:
            query = {"prefix": f"{split}/", "fields": "items(name,md5Hash),nextPageToken", "maxResults": "1000"}
            url = f"{listing}?{urllib.parse.urlencode(query | ({'pageToken': page} if page else {}))}"
            try:
                with urllib.request.urlopen(url, timeout=TIMEOUT) as response:
                    answer = json.load(response)
            except (urllib.error.URLError, TimeoutError, ValueError) as error:
                raise UserError(
                    f"{listing}: cannot be read ({error}); run again to go on, or pass the books' folder with --source"
                ) from error
            for item in answer.get("items", []):
                name = item["name"]
                if re.fullmatch(r"(train|validation|test)/\d+\.txt", name):
                    md5 = base64.b64decode(item["md5Hash"]).hex()
                    files.append(Remote(base + urllib.parse.quote(name), folder / name, md5))
            page = answer.get("nextPageToken", "")
            if not page:
                break
    fetch_all(files, "PG-19")
    return folder


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


ORIGINALS: dict[str, Original] = {
    original.name: original
    for original in (
        Original(
            name="enwik8",
            tokenizer="bytes",
            pattern="enwik8*",
            split_of=None,
            whole_lines=False,
            utf8=False,
            sums={"all": Sum(100_000_000, "a1fa5ffddb56f4953e226637dabbb36a")},
            fetch=_fetch_enwik8,
        ),
        Original(
            name="wikitext103",
            tokenizer="words",
            pattern="wiki.*.tokens*",
            split_of=_split_of_wikitext,
            sums={
                "validation": Sum(1_142_309, "b465742f79b17b85bad5699479b13301"),
                "test": Sum(1_281_077, "f202e4c8148839782adc13e7d1ca58e0"),
            },
            words={"train": 103_227_021 - 1_801_350},  # the known tokens, without an <eos> for each of the known lines
            tokens={"train": 103_227_021, "validation": 217_646, "test": 245_569},
            types=267_735,
            fetch=_fetch_wikitext("wikitext-103-v1"),
        ),
        Original(
            name="wikitext2",
            tokenizer="words",
            pattern="wiki.*.tokens*",
            split_of=_split_of_wikitext,
            sums={
                "train": Sum(10_797_148, "34a77ebe59551b3a3b3d8c0a2797c976"),
                "validation": Sum(1_121_681, "d756d22ab2310e7e60c094bea5c5a8eb"),
                "test": Sum(1_256_449, "781c9418ab9414bd09e4aad825aae752"),
            },
            tokens={"train": 2_088_628, "validation": 217_646, "test": 245_569},
            types=33_278,
            fetch=_fetch_wikitext("wikitext-2-v1"),
        ),
        Original(
            name="pg19",
            tokenizer="pieces",
            pattern="*.txt",
            split_of=split_of_path,
            documents={"train": 28_602, "validation": 50, "test": 100},
            fetch=_fetch_pg19,
        ),
        Original(name="text", tokenizer="pieces", pattern="*.txt", split_of=split_of_path, required=()),
    )
}


def differences(original: Original, found: Mapping[str, Sum], counts: Mapping[str, Mapping[str, int]]) -> list[str]:
    """How the data differs from the original (nothing: it is the original); UserError where it is damaged.

    `found`: size and MD5 by split; `counts`: documents, words, tokens and types by split.
    """
    lines: list[str] = []
    with collecting() as problems:
        for split, known in original.sums.items():
            got = found.get(split)
            if got is None or got == known:
                continue
            if got.size == known.size:
                problems.append(
                    f"{original.name}, {split}: has the original's size ({known.size:,} bytes) but MD5 {got.md5}, "
                    f"expected {known.md5}: the file is damaged; get it again"
                )
            else:
                lines.append(f"{split}: {got.size:,} bytes, the original has {known.size:,}")
    for what in ("documents", "words", "tokens", "types"):
        expected = {"train": original.types} if what == "types" else getattr(original, what)
        for split, number in expected.items():
            value = counts.get(split, {}).get(what)
            if value is not None and number is not None and value != number:
                lines.append(f"{split}: {value:,} {what}, the original has {number:,}")
    return lines
