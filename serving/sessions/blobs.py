"""Snapshots as files in a folder: whole and on disk before any row names them, not written again while one does.

A file's name has a random part: removing one can never take away what another writer has just put. Files that no row names any
more are written anew by who retired them, which costs a fraction of making one: no blocks to find, no pages to fill.
"""

import contextlib
import errno
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from lm.data.files import sync_folder
from serving.sessions.errors import FullError, StoreError, UnavailableError

ORPHAN_SECONDS = 3600.0
"""A file that no row names is left alone so long: its writer may be about to commit."""
SPARES = 64
"""Files without a row that are kept to be written anew."""
NO_ROOM = {"ENOSPC", "EDQUOT", "EFBIG"}


class FolderBlobs:
    """Blobs in one folder, by name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._spares: deque[tuple[str, float]] = deque()
        self._process = os.getpid()
        with self._errors():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """The disk's errors as the store's."""
        try:
            yield
        except OSError as error:
            if errno.errorcode.get(error.errno or 0) in NO_ROOM:
                raise FullError(
                    f"{self.folder}: no room left ({error.strerror}); free some or evict sessions. Nothing was changed"
                ) from error
            raise UnavailableError(
                f"{error.filename or self.folder}: {error.strerror}; check disk, mount and permissions"
            ) from error

    def put(self, blobs: Sequence[tuple[str, bytes]]) -> list[str]:
        """Write (hash, data) pairs and return their names; all are on disk then. If it fails none is left behind."""
        names: list[str] = []
        made = False
        try:
            with self._errors():
                for hash_, data in blobs:
                    spare = self._spare()
                    if spare is not None and self._write(spare, data, anew=True):
                        names.append(spare)
                        continue
                    names.append(f"{hash_}-{secrets.token_hex(4)}")
                    self._write(names[-1], data, anew=False)
                    made = True
                if made:
                    sync_folder(self.folder)
        except StoreError:
            self.discard(names)
            raise
        return names

    def _write(self, name: str, data: bytes, anew: bool) -> bool:
        """Bring a file to disk; false if it is to be written anew and is not there (any more)."""
        path = self.folder / name
        try:
            with path.open("r+b" if anew else "xb") as file:
                file.write(data)
                file.truncate()
                file.flush()
                os.fsync(file.fileno())
                return not anew or path.stat().st_ino == os.fstat(file.fileno()).st_ino
        except FileNotFoundError:
            if anew:
                return False
            raise
        except OSError:
            self.discard([name])
            raise

    def _spare(self) -> str | None:
        """A file to write anew. Not one retired long ago: whoever collects orphans may be about to remove it."""
        with self._lock:
            self._forget_parents()
            while self._spares:
                name, since = self._spares.pop()
                if time.monotonic() - since < ORPHAN_SECONDS / 2:
                    return name
                self.discard([name])
        return None

    def touch(self, names: Iterable[str]) -> None:
        """Before rows no longer name these files: as orphans they are young."""
        for name in names:
            with self._errors(), contextlib.suppress(FileNotFoundError):
                os.utime(self.folder / name)

    def retire(self, names: Iterable[str]) -> None:
        """No row names these files any more (`touch` them before): keep some to be written anew."""
        for name in names:
            with self._lock:
                self._forget_parents()
                keep = len(self._spares) < SPARES
                if keep:
                    self._spares.append((name, time.monotonic()))
            if not keep:
                self.discard([name])

    def drop_spares(self) -> None:
        """Remove the files that were kept to be written anew."""
        with self._lock:
            self._forget_parents()
            self.remove(name for name, _ in self._spares)
            self._spares.clear()

    def _forget_parents(self) -> None:
        """In a forked process: the spares are its parent's."""
        if self._process != os.getpid():
            self._spares.clear()
            self._process = os.getpid()

    def get(self, name: str) -> bytes | None:
        """The bytes, or None if there is no such file."""
        with self._errors(), contextlib.suppress(FileNotFoundError):
            return (self.folder / name).read_bytes()
        return None

    def remove(self, names: Iterable[str]) -> None:
        """Remove files; one that is not there is no error."""
        for name in names:
            with self._errors():
                (self.folder / name).unlink(missing_ok=True)

    def discard(self, names: Iterable[str]) -> None:
        """Remove files that no row names; one that cannot be removed now is left to `orphans`."""
        for name in names:
            with contextlib.suppress(StoreError):
                self.remove([name])

    def orphans(self, known: set[str]) -> list[str]:
        """Old files whose names are not `known`."""
        before = time.time() - ORPHAN_SECONDS
        found = []
        with self._errors():
            for entry in os.scandir(self.folder):
                with contextlib.suppress(FileNotFoundError):
                    if entry.name not in known and entry.is_file() and entry.stat().st_mtime < before:
                        found.append(entry.name)
        return found
