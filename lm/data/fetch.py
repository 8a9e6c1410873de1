"""Fetch a file once, whole and checked: resumable, atomic, by its checksum.

fetch("http://mattmahoney.net/dc/enwik8.zip", Path("enwik8.zip"))
"""

import hashlib
import http.client
import os
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm  # type: ignore[import-untyped]

from lm.data.files import sync_folder
from lm.errors import UserError

TIMEOUT = 60.0
"""Seconds without a byte before a connection counts as lost."""
CHUNK = 1 << 20
CONNECTIONS = 8


class Remote(NamedTuple):
    """A file to fetch and the MD5 it must have (None: its content is checked after reading)."""

    url: str
    path: Path
    md5: str | None = None


def fetch(url: str, path: Path, md5: str | None = None, progress: bool = True) -> Path:
    """Fetch `url` to `path`, going on where an earlier attempt stopped; `path` exists only when whole and checked."""
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    try:
        _fetch_rest(url, part, progress)
    except urllib.error.HTTPError as error:
        raise UserError(f"{url}: the server answers {error.code} {error.reason}; {_by_hand(path)}") from error
    except (urllib.error.URLError, TimeoutError, ConnectionError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise UserError(f"{url}: cannot be reached ({reason}); run again to go on, or {_by_hand(path)}") from error
    if md5 is not None:
        with part.open("rb") as file:
            found = hashlib.file_digest(file, "md5").hexdigest()
        if found != md5:
            part.unlink()  # going on from wrong bytes can never end well
            raise UserError(f"{url}: MD5 {found}, expected {md5}; the download was removed, run again, or {_by_hand(path)}")
    os.replace(part, path)
    sync_folder(path.parent)
    return path


def fetch_all(files: Iterable[Remote], what: str) -> None:
    """Fetch many files over several connections; those that are there already are kept."""
    missing = [file for file in files if not file.path.exists()]
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        jobs = [pool.submit(fetch, file.url, file.path, file.md5, False) for file in missing]
        try:
            for job in tqdm(jobs, desc=what, unit=" files", disable=not jobs):
                job.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _fetch_rest(url: str, part: Path, progress: bool) -> None:
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code == 416 and have:  # nothing is left to send: the part is whole (its checksum decides)
            return
        raise
    with response:
        resumed = response.status == 206
        rest = response.headers.get("Content-Length")
        total = int(rest) + (have if resumed else 0) if rest else None
        with (
            part.open("ab" if resumed else "wb") as file,
            tqdm.wrapattr(
                file, "write", desc=part.name, total=total, initial=have if resumed else 0, disable=not progress
            ) as out,
        ):
            shutil.copyfileobj(response, out, CHUNK)
            file.flush()
            os.fsync(file.fileno())
    size = part.stat().st_size
    if total is not None and size != total:
        raise ConnectionError(f"the connection ended after {size:,} of {total:,} bytes")


def _by_hand(path: Path) -> str:
    return f"get {path.name} some other way and pass it with --source"
