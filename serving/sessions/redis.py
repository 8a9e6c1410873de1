"""Sessions in Redis: for a service on several machines. Every write is one Lua script that compares and swaps (script.lua).

One primary (replicas are fine), not a cluster: a step's changes are one transaction over many keys. Durable as a call returns
only with `appendonly yes`, `appendfsync always` and `maxmemory-policy noeviction`, which is checked at the start.
"""

import itertools
import re
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import redis
from redis.exceptions import (
    BusyLoadingError,
    ConnectionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TimeoutError,
)  # fmt: skip

from serving.sessions.backend import Key, Raw, Verdict, Write, held
from serving.sessions.base import BaseStore
from serving.sessions.blobs import FolderBlobs
from serving.sessions.errors import FullError, InvalidError, UnavailableError
from serving.sessions.responses import ResponseRow, ResponseWrite, make_room
from serving.sessions.store import Lease, Limits, Response, Usage

PATIENCE = 10.0
"""Seconds that a call waits for a server that does not answer, which may be restarting."""
OPENING_PATIENCE = 2.0
"""The same while the store is opened: a wrong address should not take long to say so."""
STAGED_SECONDS = 3600
"""A snapshot that no commit followed is forgotten so soon."""
REQUIRED = {
    "appendonly": "yes",
    "appendfsync": "always",
    "no-appendfsync-on-rewrite": "no",
    "maxmemory-policy": "noeviction",
}
FIELDS = ("version", "fence", "owner", "until", "head", "bounds")
BATCH = 100


class RedisStore(BaseStore):
    """A SessionStore in a Redis database, under `prefix`; snapshots in it too, or in the folder `blobs`."""

    def __init__(
        self,
        url: str,
        limits: Limits | None = None,
        durability: str = "full",
        prefix: str = "pmi",
        blobs: Path | None = None,
        patience: float = PATIENCE,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.url, self.prefix, self.patience, self._fixed = url, prefix, min(patience, OPENING_PATIENCE), clock
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", prefix):
            raise InvalidError(f"prefix {prefix!r}: must be 1 to 64 letters, digits, _ or -")
        self._redis = redis.Redis.from_url(url, socket_timeout=30, socket_connect_timeout=5)
        script: str = resources.files("serving.sessions").joinpath("script.lua").read_text()
        self._script = self._redis.register_script(script)
        self._files = None if blobs is None else FolderBlobs(blobs)
        if durability == "full":
            self._check_durability()
        seconds, micros = self._try(self._redis.time)
        self.patience = patience
        offset = seconds + micros / 1e6 - time.time()
        super().__init__(limits or Limits(), clock or (lambda: time.time() + offset))

    def _check_durability(self) -> None:
        def read(name: str) -> Any:
            try:
                return self._redis.config_get(name).get(name, "?")
            except ResponseError as error:
                raise InvalidError(
                    f"{self._where}: its settings cannot be read ({error}); "
                    "if you know them to be durable, or need not care, use --durability relaxed"
                ) from error

        found = {name: self._try(read, name) for name in REQUIRED}
        wrong = [f"{name} is {found[name]!r}, must be {value!r}" for name, value in REQUIRED.items() if found[name] != value]
        if wrong:
            raise InvalidError(
                f"{self._where}: answers could be lost in a crash: {'; '.join(wrong)}. "
                "Change its configuration, or accept that with --durability relaxed"
            )

    @property
    def _where(self) -> str:
        """The server without its password."""
        settings = self._redis.connection_pool.connection_kwargs
        return f"redis at {settings.get('host', settings.get('path', '?'))}:{settings.get('port', '')}"

    def _try(self, call: Callable[..., Any], *args: Any, **settings: Any) -> Any:
        """Call, again and again for a while if the server does not answer: all calls may be repeated."""
        began = time.monotonic()
        while True:
            try:
                return call(*args, **settings)
            except (ConnectionError, TimeoutError, BusyLoadingError) as error:
                if time.monotonic() - began > self.patience:
                    raise UnavailableError(f"{self._where} does not answer ({error}); start it, or check --store") from error
                time.sleep(0.05)
            except OutOfMemoryError as error:
                raise FullError(f"{self._where}: its memory is full; raise maxmemory or evict. Nothing was changed") from error
            except ReadOnlyError as error:
                raise UnavailableError(f"{self._where} is a replica; name the primary in --store") from error
            except (RedisError, OSError) as error:
                raise UnavailableError(f"{self._where} refuses ({error}); mend what it names, then try again") from error

    def _run(self, operation: str, *values: Any) -> Any:
        now = "" if self._fixed is None else repr(self._fixed())
        return self._try(self._script, args=[self.prefix, now, operation, *values])

    def _key(self, *parts: str) -> bytes:
        return f"{self.prefix}:{parts[0]}".encode() + b":" * (len(parts) > 1) + "\0".join(parts[1:]).encode()

    def close(self) -> None:
        """See SessionStore."""
        self._redis.close()

    # --- sessions ------------------------------------------------------------------------------------------------

    def load(self, keys: Sequence[Key]) -> Sequence[Raw | None]:
        """See Backend."""

        def read() -> Any:
            pipe = self._redis.pipeline(transaction=False)
            for key in keys:
                pipe.hmget(self._key("s", *key), FIELDS)
            return pipe.execute()

        return [_raw(key, found) for key, found in zip(keys, self._try(read), strict=True)]

    def scan(self, tenant: str | None, after: Key | None) -> Iterator[Raw]:
        """See Backend."""
        low = "-" if tenant is None else f"[{tenant}\0"
        if after is not None:
            low = f"({after[0]}\0{after[1]}"
        high = "+" if tenant is None else f"({tenant}\1"
        while True:
            found = self._try(self._redis.zrangebylex, self._key("index"), low, high, 0, BATCH)
            if not found:
                return
            keys = [_member(name) for name in found]
            yield from (raw for raw in self.load(keys) if raw is not None)
            low = "(" + found[-1].decode()

    def candidates(self, now: float, ttl: float | None, everything: bool) -> Iterator[Raw]:
        """See Backend."""
        last = "+inf" if everything else repr(now - ttl) if ttl is not None else "-inf"
        own = self._try(self._redis.zrangebyscore, self._key("expiry"), "-inf", repr(now))
        idle = self._try(self._redis.zrangebyscore, self._key("idle"), "-inf", last)
        names = [*idle, *(set(own) - set(idle))] if not everything else idle
        for name in names:
            raw = self.load([_member(name)])[0]
            if raw is not None and not held(raw.until, now):
                yield raw

    def write(self, writes: Sequence[Write | ResponseWrite]) -> Sequence[Verdict]:
        """See Backend."""
        brought = dict(blob for write in writes if isinstance(write, Write) and (blob := write.blob()) is not None)
        names = self._stage(list(brought.items()))
        values: list[Any] = [len(writes)]
        for write in writes:
            values += _session_values(write, names) if isinstance(write, Write) else ["response", *_response_values(write)]
        try:
            verdicts, freed = self._run("write", *values)
        except FullError:
            self._discard(names)
            raise
        if self._files is not None:
            deleted = any(isinstance(write, Write) and write.record is None for write in writes)
            (self._files.remove if deleted else self._files.discard)(name.decode() for name in freed)
        if any(verdict != b"made" for verdict in verdicts):
            self._discard(names)
        return [verdict.decode() for verdict in verdicts]

    def _stage(self, blobs: Sequence[tuple[str, bytes]]) -> dict[str, str]:
        """Put snapshots where a commit finds them; without one they are forgotten."""
        if self._files is not None:
            return dict(zip((hash_ for hash_, _ in blobs), self._files.put(blobs), strict=True))
        names = {hash_: f"{hash_}-{secrets.token_hex(4)}" for hash_, _ in blobs}
        for hash_, data in blobs:
            self._try(self._redis.set, self._key("d", names[hash_]), data, ex=STAGED_SECONDS)
        return names

    def _discard(self, names: dict[str, str]) -> None:
        """Forget staged snapshots, but those that a write has taken: its answer may have been lost and the write repeated."""
        if names:
            left = self._run("discard", len(names), *itertools.chain(*names.items()))
            if self._files is not None:
                self._files.discard(name.decode() for name in left)

    def drop(self, tenant: str, id: str) -> None:
        """See Backend."""
        self._run("drop", tenant, id)

    def take(self, tenant: str, id: str, owner: str, seconds: float) -> tuple[int | None, str | None, float]:
        """See Backend."""
        fence, holder, left = self._run("take", tenant, id, owner, repr(seconds), secrets.token_hex(8))
        return fence or None, holder.decode() or None, float(left)

    def prolong(self, leases: Sequence[Lease]) -> Sequence[bool]:
        """See Backend."""
        values = [value for x in leases for value in (x.tenant, x.id, x.fence, repr(x.seconds))]
        return [bool(alive) for alive in self._run("prolong", len(leases), *values)]

    def read_blob(self, hash_: str) -> bytes | None:
        """See Backend."""
        name = self._try(self._redis.hget, self._key("b", hash_), "name")
        if name is None:
            return None
        if self._files is not None:
            return self._files.get(name.decode())
        return self._try(self._redis.get, self._key("d", name.decode()))

    def read_history(self, tenant: str, id: str) -> Sequence[bytes]:
        """See Backend."""
        return self._try(self._redis.lrange, self._key("h", tenant, id), 0, -1)

    # --- responses -----------------------------------------------------------------------------------------------

    def add_response(self, response: Response, head: bytes) -> str | None:
        """See Backend."""
        other = self._run(
            "add_response", response.tenant, response.id, response.session or "", response.key or "", len(response.ids),
            repr(response.expires), int(response.status == "running"), head,
        )  # fmt: skip
        return other.decode() or None

    def load_response(self, tenant: str, id: str) -> ResponseRow | None:
        """See Backend."""

        def read() -> Any:
            pipe = self._redis.pipeline(transaction=True)  # head and pieces of one moment
            pipe.hget(self._key("r", tenant, id), "head")
            pipe.lrange(self._key("p", tenant, id), 0, -1)
            return pipe.execute()

        head, pieces = self._try(read)
        return None if head is None else ResponseRow(head, pieces)

    def response_ids(self, tenant: str, session: str) -> Sequence[str]:
        """See Backend."""
        return [id.decode() for id in self._try(self._redis.smembers, self._key("rs", tenant, session))]

    def all_responses(self) -> Iterator[Key]:
        """See Backend."""
        yield from map(_member, self._try(self._redis.zrange, self._key("responses"), 0, -1))

    def drop_response(self, tenant: str, id: str) -> None:
        """See Backend."""
        self._run("drop_response", tenant, id)

    def evict_responses(self, now: float, limit: int | None) -> tuple[int, int]:
        """See Backend."""

        def drop(key: Key, over: bool = True) -> int | None:
            size = self._run("evict_response", *key, int(over))
            return None if size < 0 else size

        expired = [
            size
            for name in self._try(self._redis.zrangebyscore, self._key("responses"), "-inf", repr(now))
            if (size := drop(_member(name), over=False)) is not None
        ]
        count, freed = len(expired), sum(expired)
        if limit is not None and self.usage().response_bytes > limit:
            keys = [_member(name) for name in self._try(self._redis.zrange, self._key("responses"), 0, -1)]
            used = {tenant: self.usage(tenant).response_bytes for tenant in {tenant for tenant, _ in keys}}
            more, bytes_ = make_room(used, limit, ((key[0], key) for key in keys), drop)
            count, freed = count + more, freed + bytes_
        return count, freed

    # --- upkeep --------------------------------------------------------------------------------------------------

    def collect(self) -> int:
        """See Backend."""
        if self._files is None:
            return 0  # what was staged in Redis goes by itself
        found = self._files.orphans(set())
        known = {
            name.decode() for hash_, _ in self.blobs() if (name := self._try(self._redis.hget, self._key("b", hash_), "name"))
        }
        left = [name for name in found if name not in known]
        self._files.remove(left)
        return len(left)

    def blobs(self) -> Iterator[tuple[str, int]]:
        """See Backend."""
        for hash_ in self._try(self._redis.smembers, self._key("blobs")):
            refs = self._try(self._redis.hget, self._key("b", hash_.decode()), "refs")
            if refs is not None:
                yield hash_.decode(), int(refs)

    def recount(self, hashes: Sequence[str], lower: bool) -> dict[str, tuple[int, int]]:
        """See Backend."""
        found, freed = self._run("recount", int(lower), len(hashes), *hashes)
        if self._files is not None:
            self._files.remove(name.decode() for name in freed)
        return {hash_.decode(): (counted, named) for hash_, counted, named in found}

    def examine(self) -> Iterator[tuple[str, str]]:
        """See Backend."""
        yield from ()

    def usage(self, tenant: str | None = None) -> Usage:
        """See SessionStore."""
        key = self._key("usage") if tenant is None else self._key("usage", tenant)
        fields = ("sessions", "bytes", "responses", "response_bytes")
        return Usage(*(int(value or 0) for value in self._try(self._redis.hmget, key, fields)))


def _raw(key: Key, found: Sequence[bytes | None]) -> Raw | None:
    version, fence, owner, until, head, bounds = found
    if version is None or fence is None or until is None:
        return None
    return Raw(*key, int(version), int(fence), (owner or b"").decode() or None, float(until), head or b"", bounds or b"")


def _member(name: bytes) -> Key:
    tenant, _, id = name.decode().partition("\0")
    return tenant, id


def _session_values(write: Write, names: dict[str, str]) -> list[Any]:
    """A write as the script takes it."""
    old, record = write.old, write.record
    mode = "del" if record is None else "add" if old is None else "set"
    guard = ["", ""] if old is None else [old.record.version, old.fence]
    values = ["session", write.tenant, write.id, mode, *guard, "" if write.seconds is None else repr(write.seconds)]
    if record is None:
        values += [""] * 6
    else:
        changed = old is None or record.boundaries is not old.record.boundaries
        expires = record.expires(None)
        values += [
            record.version, repr(record.updated), "" if expires is None else repr(expires), record.stored, record.head(),
            record.bounds() if changed else "",
        ]  # fmt: skip
    history = write.history
    values += ["", 0] if history is None else [history.keep, len(history.pieces), *history.pieces]
    references = write.references()
    blob = write.blob()
    values.append(len(references))
    for hash_, change in references.items():
        size, name = (len(blob[1]), names[hash_]) if blob is not None and blob[0] == hash_ else (0, "")
        values += [hash_, change, size, name]
    return [*values, *(["0"] if write.response is None else _response_values(write.response))]


def _response_values(write: ResponseWrite) -> list[Any]:
    return [
        "1", write.tenant, write.id, write.at, write.piece or "", write.head or "", write.count, repr(write.expires),
        int(write.running),
    ]  # fmt: skip
