"""Where text comes from: files and folders, plain or in .gz, .xz, .bz2, .zip and .tar.*, read as streams.

Nothing is ever extracted to disk. `texts(path)` gives each text's name and stream; whatever is wrong with a file (cut
short, damaged, a member that points outside the archive) is a UserError that names it.
"""

import bz2
import fnmatch
import gzip
import hashlib
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, Any, NamedTuple

from lm.errors import UserError

BLOCK = 1 << 20
"""Bytes read at a time; a document's text is handled in blocks of about this size, cut after a newline."""

PACKED: dict[str, Callable[[Path], IO[bytes]]] = {
    ".gz": gzip.open,  # type: ignore[dict-item]
    ".tgz": gzip.open,  # type: ignore[dict-item]
    ".xz": lzma.open,
    ".bz2": bz2.open,
}
DAMAGED = (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile, tarfile.TarError, zipfile.BadZipFile)
ARCHIVE_END = 1024
"""A tar ends with two blocks of 512 zero bytes; one without them has been cut short."""


class Text(NamedTuple):
    """One text of a source: its name inside the source and its bytes, to be read before the next text is asked for."""

    name: str
    stream: IO[bytes]
    path: Path
    """The file or archive it is read from."""


def texts(source: Path, pattern: str = "*") -> Iterator[Text]:
    """Every text of `source` whose file name matches `pattern`, in a fixed order: folders sorted, archives as stored.

    A single plain or compressed file is taken whatever its name.
    """
    if source.is_dir():
        files = sorted(path for path in source.rglob("*") if path.is_file() and not _hidden(path.relative_to(source)))
        for path in files:
            for text in _texts_of_file(path, str(PurePosixPath(path.relative_to(source)))):
                if fnmatch.fnmatch(PurePosixPath(text.name).name, pattern):
                    yield text
    elif source.is_file():
        for text in _texts_of_file(source, source.name):
            if not is_archive(source.name) or fnmatch.fnmatch(PurePosixPath(text.name).name, pattern):
                yield text
    else:
        raise UserError(f"--source {source}: there is no such file or folder")


def is_archive(name: str) -> bool:
    """Whether a file of this name holds members (zip, tar) rather than one text."""
    path = PurePosixPath(name)
    return path.suffix in (".zip", ".tar", ".tgz") or (path.suffix in PACKED and PurePosixPath(path.stem).suffix == ".tar")


def _texts_of_file(path: Path, name: str) -> Iterator[Text]:
    with _naming(path):
        if zipfile.is_zipfile(path) or path.suffix == ".zip":
            yield from _zip_members(path)
            return
        unpack = PACKED.get(path.suffix)
        with unpack(path) if unpack else path.open("rb") as stream:
            if is_archive(path.name):
                yield from _tar_members(path, stream)
            else:
                yield Text(name.removesuffix(path.suffix) if unpack else name, stream, path)


def _zip_members(path: Path) -> Iterator[Text]:
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            _refuse_outside(path, member.filename)
            if member.flag_bits & 1:
                raise UserError(f"{path}: member {member.filename!r} is encrypted; unpack it first")
            if not member.is_dir():
                with archive.open(member) as stream:
                    yield Text(member.filename, stream, path)


def _tar_members(path: Path, stream: IO[bytes]) -> Iterator[Text]:
    tail = _Tail(stream)
    # Streaming mode ("r|"): one pass, whatever the compression; seeking back in an .xz would decompress it again.
    with tarfile.open(fileobj=tail, mode="r|") as archive:  # type: ignore[call-overload]
        for member in archive:
            _refuse_outside(path, member.name)
            if member.isdir():
                continue
            content = archive.extractfile(member) if member.isfile() else None
            if content is None:
                raise UserError(f"{path}: member {member.name!r} is a link or a device; only files and folders are read")
            yield Text(member.name, content, path)
    while tail.read(BLOCK):
        pass
    if tail.last.strip(b"\0") or len(tail.last) < ARCHIVE_END:
        raise UserError(f"{path}: the archive is cut short (it lacks its end mark); get the file again")


class _Tail:
    """A stream that remembers the last bytes read from it."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.stream = stream
        self.last = b""

    def read(self, size: int = -1) -> bytes:
        data = self.stream.read(size)
        self.last = (self.last + data[-ARCHIVE_END:])[-ARCHIVE_END:]
        return data


def _refuse_outside(path: Path, member: str) -> None:
    parts = PurePosixPath(member.replace("\\", "/"))
    if parts.is_absolute() or ".." in parts.parts or (len(member) > 1 and member[1] == ":"):
        raise UserError(f"{path}: member {member!r} points outside the archive; refuse such a file, get the original")


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except DAMAGED as error:
        raise UserError(f"{path}: cut short or damaged ({error}); get the file again") from error
    except PermissionError as error:
        raise UserError(f"{path}: may not be read ({error.strerror}); allow it or copy the file") from error


class Reading:
    """Reads a text in blocks while taking its size and MD5, the sum by which the originals are known."""

    def __init__(self, text: Text) -> None:
        self.name = text.name
        self.size = 0
        self._stream, self._path = text.stream, text.path
        self._md5 = hashlib.md5(usedforsecurity=False)

    @property
    def md5(self) -> str:
        """The MD5 of what has been read."""
        return self._md5.hexdigest()

    def blocks(self) -> Iterator[bytes]:
        """The text in blocks that end after a newline (but for the last), so that words and pieces are never cut."""
        rest: list[bytes] = []
        while data := self._read():
            self.size += len(data)
            self._md5.update(data)
            cut = data.rfind(b"\n") + 1
            if cut:
                yield b"".join([*rest, data[:cut]])
                rest = [data[cut:]] if cut < len(data) else []
            else:
                rest.append(data)
        if rest:
            yield b"".join(rest)

    def _read(self) -> bytes:
        with _naming(self._path):
            return self._stream.read(BLOCK)


def decoded(data: bytes, name: str, offset: int) -> str:
    """`data` as text; UserError with the place where it is not UTF-8 (`offset`: where `data` starts in the text)."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        bad: Any = data[error.start : error.start + 1]
        raise UserError(
            f"{name}: byte {offset + error.start:,} (0x{bad.hex()}) is not UTF-8; "
            f"convert the file first, for example: iconv -f latin1 -t utf-8 {name}"
        ) from error
