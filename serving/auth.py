"""API keys: who asks. A key is `pmi-ID-SECRET`; the file keeps a hash of the secret (`pmi keys`), and each key is a tenant's.

The secret has 256 random bits, so that a plain SHA-256 of it cannot be searched. The file is read again when it changes.
"""

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lm.data.files import write_atomically
from lm.errors import UserError
from serving.config import Limits
from serving.sessions.checks import check_name
from serving.sessions.store import LOCAL

FORMAT = 1
LOOK_SECONDS = 1.0
"""How often a service looks whether the file has changed."""


@dataclass(frozen=True)
class Tenant:
    """Who a request is from, and what it may use (None: as the service says)."""

    id: str
    limits: Limits | None = None


@dataclass(frozen=True)
class Key:
    """One key, without its secret."""

    id: str
    tenant: str
    hash: str
    created: float
    limits: Limits | None = None


class Keys:
    """The keys in a file. Thread-safe."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._looked, self._stamp = 0.0, (0, 0)
        self._keys: dict[str, Key] = {}
        self._load()

    def tenant(self, given: str) -> Tenant | None:
        """Whose key this is; None: nobody's."""
        if time.monotonic() - self._looked > LOOK_SECONDS:
            with contextlib.suppress(UserError):  # a file that is being edited badly closes nobody out
                self._load()
        id, secret = _parts(given)
        key = self._keys.get(id)
        # compared also where there is no such key: the time says nothing
        right = hmac.compare_digest(_hash(secret), key.hash if key is not None else _hash(""))
        return Tenant(key.tenant, key.limits) if key is not None and right else None

    def all(self) -> list[Key]:
        """Every key, oldest first."""
        self._load()
        return sorted(self._keys.values(), key=lambda key: key.created)

    def create(self, tenant: str, limits: Limits | None = None) -> str:
        """A new key: shown once, nowhere stored."""
        check_name("tenant", tenant)
        if tenant == LOCAL:
            raise UserError(f"--tenant {tenant!r}: that is the command line's own; choose another name")
        self._load()
        id, secret = secrets.token_hex(4), secrets.token_urlsafe(32).replace("-", "_")
        self._keys[id] = Key(id, tenant, _hash(secret), time.time(), limits)
        self._save()
        return f"pmi-{id}-{secret}"

    def remove(self, id: str) -> None:
        """From now on it opens nothing."""
        self._load()
        if id not in self._keys:
            raise UserError(f"key {id!r}: there is none in {self.path}; `pmi keys ls` lists those there are")
        del self._keys[id]
        self._save()

    def _load(self) -> None:
        with self._lock:
            self._looked = time.monotonic()
            try:
                found = self.path.stat()
                if (found.st_mtime_ns, found.st_ino) == self._stamp:
                    return
                values: dict[str, Any] = json.loads(self.path.read_text())
                if values.get("format") != FORMAT:
                    raise UserError(f"{self.path}: format {values.get('format')!r}; this version reads {FORMAT}")
                keys = [
                    Key(**{**key, "limits": None if key["limits"] is None else Limits.model_validate(key["limits"])})
                    for key in values["keys"]
                ]
            except FileNotFoundError:
                self._keys = {}
                return
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise UserError(f"{self.path}: not a file of keys ({error!r}); restore it, or begin anew") from error
            self._keys, self._stamp = {key.id: key for key in keys}, (found.st_mtime_ns, found.st_ino)

    def _save(self) -> None:
        rows = [
            {**key.__dict__, "limits": None if key.limits is None else key.limits.model_dump(exclude_unset=True)}
            for key in sorted(self._keys.values(), key=lambda key: key.created)
        ]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path, (json.dumps({"format": FORMAT, "keys": rows}, indent=2) + "\n").encode())
        os.chmod(self.path, 0o600)
        self._stamp = (0, 0)


def _parts(given: str) -> tuple[str, str]:
    prefix, _, rest = given.partition("-")
    id, _, secret = rest.partition("-")
    return (id, secret) if prefix == "pmi" else ("", "")


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()
