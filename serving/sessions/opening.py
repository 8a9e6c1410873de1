"""Stores by URL: sqlite:///FILE or redis://HOST:PORT/DB."""

import os
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from serving.sessions.base import BaseStore
from serving.sessions.errors import InvalidError
from serving.sessions.store import Limits

DURABILITIES = ("full", "relaxed")
FORMS = (
    "sqlite:///FILE (sqlite:////absolute/FILE), sqlite:/// for the default file, or redis://HOST:PORT/DB?blobs=FOLDER&prefix=NAME"
)


def default_file(environment: Mapping[str, str] | None = None) -> Path:
    """The database in the user's data folder."""
    data = (os.environ if environment is None else environment).get("XDG_DATA_HOME") or str(Path.home() / ".local" / "share")
    return Path(data) / "pmi" / "sessions.db"


def store_url(given: str | None, environment: Mapping[str, str] | None = None) -> str:
    """The URL given, else that in PMI_STORE, else the default."""
    return given or (os.environ if environment is None else environment).get("PMI_STORE") or "sqlite:///"


def open_store(url: str | None = None, durability: str = "full", limits: Limits | None = None) -> BaseStore:
    """The store at `url` (default: PMI_STORE, else the user's own file), made if it is not there. InvalidError, UnavailableError.

    durability: relaxed lets the newest answers be lost when the machine (SQLite) or the server (Redis) crashes.
    """
    url = store_url(url)
    if durability not in DURABILITIES:
        raise InvalidError(f"durability {durability!r}: must be one of {', '.join(DURABILITIES)}")
    try:
        parts = urlsplit(url)
        _ = parts.port  # looked at here, where a number that is no port is an error
    except ValueError as error:
        raise InvalidError(f"store {url!r}: {error}; must be {FORMS}") from error
    if "#" in url:
        raise InvalidError(f"store {url!r}: {url[url.index('#') :]!r} cannot be part of it; must be {FORMS}")
    if parts.scheme == "sqlite" and not parts.netloc and parts.path.startswith("/"):
        if "?" in url:
            raise InvalidError(f"store {url!r}: {url[url.index('?') :]!r} is for redis only; must be {FORMS}")
        from serving.sessions.sqlite import SQLiteStore

        path = Path(parts.path[1:]).expanduser() if parts.path[1:] else default_file()
        return SQLiteStore(path, limits, durability)
    if parts.scheme in ("redis", "rediss") and parts.hostname:
        query = parse_qs(parts.query, keep_blank_values=True)
        unknown = query.keys() - {"blobs", "prefix"}
        if unknown:
            raise InvalidError(f"store {url!r}: unknown {', '.join(sorted(unknown))}; must be {FORMS}")
        if parts.path.strip("/") and not parts.path[1:].isdecimal():
            raise InvalidError(f"store {url!r}: database {parts.path!r}: must be a number; {FORMS}")
        from serving.sessions.redis import RedisStore

        bare = parts._replace(query="").geturl()
        blobs = Path(query["blobs"][0]).expanduser() if "blobs" in query else None
        return RedisStore(bare, limits, durability, query.get("prefix", ["pmi"])[0], blobs)
    raise InvalidError(f"store {url!r}: must be {FORMS}")
