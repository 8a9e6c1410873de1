"""Snapshots as files in a folder: whole and on disk before any row names them, never written again.

A file is named by the hash of its content and a random part: removing one can never take away what another writer has just put.
"""

import errno
import os
import secrets
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from lm.data.files import sync_folder
from serving.sessions.errors import FullError

ORPHAN_SECONDS = 3600.0
"""A file that no row names is left alone so long: its writer may be about to commit."""
NO_ROOM = {"ENOSPC", "EDQUOT", "EFBIG"}


class FolderBlobs:
    """Blobs in one folder, by name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def put(self, blobs: Sequence[tuple[str, bytes]]) -> list[str]:
        """Write (hash, data) pairs and return their names; all are on disk then. FullError: none is left behind."""
        names: list[str] = []
        try:
            for hash_, data in blobs:
                name = f"{hash_}-{secrets.token_hex(4)}"
                part = self.folder / f".{name}.part"
                names.append(name)
                with part.open("xb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(part, self.folder / name)
            if names:
                sync_folder(self.folder)
        except OSError as error:
            for name in names:
                (self.folder / f".{name}.part").unlink(missing_ok=True)
            self.remove(names)
            raise full(error, str(self.folder)) or error from error
        return names

    def get(self, name: str) -> bytes | None:
        """The bytes, or None if there is no such file."""
        try:
            return (self.folder / name).read_bytes()
        except FileNotFoundError:
            return None

    def remove(self, names: Iterable[str]) -> None:
        """Remove files; one that is not there is no error."""
        for name in names:
            (self.folder / name).unlink(missing_ok=True)

    def orphans(self, known: set[str]) -> list[str]:
        """Old files whose names are not `known`."""
        before = time.time() - ORPHAN_SECONDS
        found = []
        for entry in os.scandir(self.folder):
            try:
                if entry.name not in known and entry.is_file() and entry.stat().st_mtime < before:
                    found.append(entry.name)
            except FileNotFoundError:
                continue
        return found


def full(error: OSError, where: str) -> FullError | None:
    """A FullError if that is what an OSError says."""
    if errno.errorcode.get(error.errno or 0) in NO_ROOM:
        return FullError(f"{where}: no room left ({error.strerror}); free some or evict sessions. Nothing was changed")
    return None
