"""Where text comes from: files and folders, plain or in .gz, .xz, .bz2, .zip and .tar.*, read as streams.

Nothing is ever extracted to disk. `texts(path)` gives each text's name and stream; whatever is wrong with a file (cut
short, damaged, a member that points outside the archive, a bomb) is a UserError that names it.
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
from typing import IO, Any, NamedTuple, Protocol

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
EXPANSION = 200
"""Times its own size that a packed file may unpack to; text packs by 3 to 10, so more is a bomb, or no text."""
SURE = 1 << 30
"""Bytes that any packed file may unpack to, however well it packs."""
LONGEST_LINE = 64 << 20
"""Bytes of a line: a line is never cut, so this bounds the memory that a text without newlines can take."""


class Stream(Protocol):
    """What bytes are read from."""

    def read(self, size: int = -1, /) -> bytes: ...


class Text(NamedTuple):
    """One text of a source: its name inside the source and its bytes, to be read before the next text is asked for."""

    name: str
    stream: Stream
    path: Path
    """The file or archive it is read from."""


def texts(source: Path, pattern: str = "*") -> Iterator[Text]:
    """Every text of `source` whose file name matches `pattern`, in a fixed order: folders sorted, archives as stored.

    A single plain or compressed file is taken whatever its name.
    """
    if source.is_dir():
        for path in _files(source):
            for text in _texts_of_file(path, str(PurePosixPath(path.relative_to(source)))):
                if _wanted(text.name, pattern):
                    yield text
    elif source.is_file():
        for text in _texts_of_file(source, source.name):
            if not is_archive(source.name) or _wanted(text.name, pattern):
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
            elif unpack:
                yield Text(name.removesuffix(path.suffix), _Unpacked(stream, path), path)
            else:
                yield Text(name, stream, path)


def _zip_members(path: Path) -> Iterator[Text]:
    unpacked = _Unpacked(None, path)
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            _refuse_outside(path, member.filename)
            if member.flag_bits & 1:
                raise UserError(f"{path}: member {member.filename!r} is encrypted; unpack it first")
            if not member.is_dir():
                with archive.open(member) as stream:
                    unpacked.stream = stream
                    yield Text(member.filename, unpacked, path)


def _tar_members(path: Path, stream: IO[bytes]) -> Iterator[Text]:
    tail = _Unpacked(stream, path)
    # Streaming mode ("r|"): one pass, whatever the compression; seeking back in an .xz would decompress it again.
    with tarfile.open(fileobj=tail, mode="r|") as archive:  # type: ignore[call-overload]
        for member in archive:
            _refuse_outside(path, member.name)
            if member.isdir():
                continue
            content = archive.extractfile(member) if member.isfile() and not member.issparse() else None
            if content is None:
                kind = "sparse, a link or a device"
                raise UserError(f"{path}: member {member.name!r} is {kind}; only plain files and folders are read")
            yield Text(member.name, content, path)
    while tail.read(BLOCK):
        pass
    if tail.last.strip(b"\0") or len(tail.last) < ARCHIVE_END:
        raise UserError(f"{path}: the archive is cut short (it lacks its end mark); get the file again")


class _Unpacked:
    """What is unpacked from a file: it remembers the last bytes read, and is a UserError where they are far too many."""

    def __init__(self, stream: Any, path: Path) -> None:
        self.stream, self._path = stream, path
        self.last = b""
        self._left = max(SURE, EXPANSION * path.stat().st_size)

    def read(self, size: int = -1, /) -> bytes:
        data: bytes = self.stream.read(size)
        self.last = (self.last + data[-ARCHIVE_END:])[-ARCHIVE_END:]
        self._left -= len(data)
        if self._left < 0:
            raise UserError(
                f"{self._path}: unpacks to more than {EXPANSION} times its size, as no text does; "
                "if it is one all the same, unpack it yourself and pass the folder with --source"
            )
        return data


def _refuse_outside(path: Path, member: str) -> None:
    parts = PurePosixPath(member.replace("\\", "/"))
    if parts.is_absolute() or ".." in parts.parts or (len(member) > 1 and member[1] == ":"):
        raise UserError(f"{path}: member {member!r} points outside the archive; refuse such a file, get the original")


def _files(folder: Path) -> list[Path]:
    """The files below a folder, sorted; links to files are followed, links to folders refused rather than left out."""
    found = []
    for path in sorted(folder.rglob("*")):
        if _hidden(str(path.relative_to(folder))):
            continue
        if path.is_file():
            found.append(path)
        elif path.is_symlink():
            raise UserError(f"{path}: a link to a folder or to nothing; copy the files there, or remove the link")
    return found


def _wanted(name: str, pattern: str) -> bool:
    return fnmatch.fnmatch(PurePosixPath(name).name, pattern) and not _hidden(name)


def _hidden(name: str) -> bool:
    return any(part.startswith(".") for part in PurePosixPath(name).parts)


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
        length = 0
        while data := self._read():
            self.size += len(data)
            self._md5.update(data)
            cut = data.rfind(b"\n") + 1
            if cut:
                yield b"".join([*rest, data[:cut]])
                rest, length = [], 0
            if cut < len(data):
                rest.append(data[cut:])
                length += len(data) - cut
            if length > LONGEST_LINE:
                raise UserError(
                    f"{self._path}: {self.name!r} has a line of more than {LONGEST_LINE >> 20} MB; "
                    "put newlines into it, for example: fold -s -w 10000"
                )
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
