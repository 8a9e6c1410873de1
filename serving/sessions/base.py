"""What both back ends share: every operation as load, a pure function (records.py), and one guarded write.

A back end brings the primitives at the end. `write` makes each write only if version and fence of its session are still those
that were loaded (compare and swap); what lost that race is loaded and computed again. So no lock is ever held while computing.
"""

import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from serving.sessions import records
from serving.sessions.checks import check_name
from serving.sessions.errors import (
    BusyError,
    ConflictError,
    DamagedError,
    ExistsError,
    InvalidError,
    NotFoundError,
    StaleError,
    StoreError,
    UnavailableError,
)  # fmt: skip
from serving.sessions.records import HistoryWrite, Record
from serving.sessions.responses import ResponseRow, ResponseWrite, advance_response, decode_response, encode_response, more
from serving.sessions.store import (
    LEASE_SECONDS,
    Change,
    Committed,
    Content,
    Damage,
    Evicted,
    Ids,
    Lease,
    Limits,
    Outcome,
    Page,
    Progress,
    Response,
    Session,
    Settings,
    Usage,
)  # fmt: skip

ATTEMPTS = 50
"""Lost races in a row before a write gives up: with a lease there are none, without one a few."""
CACHED = 4096
"""Sessions whose last written row is remembered, so that a commit need not read it. A guard makes a wrong memory harmless."""

Key = tuple[str, str]
Verdict = Literal["made", "lost", "response"]
"""Of a guarded write: made; the session was changed meanwhile; the response has not the expected number of ids."""


@dataclass(frozen=True)
class Raw:
    """A session as a back end holds it."""

    tenant: str
    id: str
    version: int
    fence: int
    owner: str | None
    until: float
    head: bytes
    bounds: bytes

    def record(self) -> Record:
        """DamagedError."""
        record = records.decode(self.head, self.bounds, f"session {self.id!r}")
        if record.version != self.version:
            raise DamagedError(f"session {self.id!r}: its row says version {self.version}, its head {record.version}")
        return record


@dataclass(frozen=True)
class Row:
    """A session with its lease."""

    record: Record
    fence: int
    owner: str | None
    until: float


@dataclass(frozen=True)
class Write:
    """One guarded write."""

    tenant: str
    id: str
    old: Row | None
    """What was loaded: the guard. None: the session must not exist."""
    record: Record | None
    """What it becomes; None: it is removed."""
    seconds: float | None = None
    """Under a lease: how long that lasts now. None: whoever had one is fenced off."""
    snapshot: bytes | None = None
    """The bytes of its present snapshot, where that is new."""
    history: HistoryWrite | None = None
    response: ResponseWrite | None = None

    def blob(self) -> tuple[str, bytes] | None:
        """Hash and bytes of the snapshot that it brings along."""
        if self.snapshot is None or self.record is None:
            return None
        return str(self.record.boundaries[-1].snapshot), self.snapshot

    def references(self) -> dict[str, int]:
        """By how much the count of references to each snapshot changes."""
        after = {} if self.record is None else dict(self.record.snapshots())
        for hash_, count in ({} if self.old is None else self.old.record.snapshots()).items():
            after[hash_] = after.get(hash_, 0) - count
        return {hash_: change for hash_, change in after.items() if change}


class BaseStore(ABC):
    """A SessionStore, given the primitives of a back end."""

    def __init__(self, limits: Limits, clock: Callable[[], float]) -> None:
        self.limits, self.clock = limits, clock
        self._rows: OrderedDict[Key, Row] = OrderedDict()
        self._running: OrderedDict[Key, None] = OrderedDict()
        self._lock = threading.Lock()

    # --- reading -------------------------------------------------------------------------------------------------

    def get(self, tenant: str, id: str) -> Session:
        """See SessionStore."""
        return self._session(tenant, id, self._need(tenant, id))

    def snapshot(self, session: Session) -> bytes | None:
        """See SessionStore."""
        if session.snapshot is None:
            return None
        return self._blob(session.snapshot, f"session {session.id!r}")

    def history(self, tenant: str, id: str) -> Ids:
        """See SessionStore."""
        content = self.content(tenant, id)
        if content.history is None:
            raise InvalidError(f"session {id!r} keeps no history; only one created with keep_history does")
        return content.history

    def content(self, tenant: str, id: str) -> Content:
        """See SessionStore."""
        for _ in range(ATTEMPTS):
            row = self._need(tenant, id)
            record, present = row.record, row.record.boundaries[-1]
            try:
                data = None if present.snapshot is None else self._blob(present.snapshot, f"session {id!r}")
                history = self._history(tenant, id) if record.settings.keep_history else None
            except NotFoundError:
                continue  # it moved on meanwhile; a session that is gone ends the loop
            if history is not None and (self._need(tenant, id).record.version != record.version):
                continue
            tail = records.unpack(record.tail)
            whole = None if history is None else records.unpack(history) + tail
            return Content(record.settings, present.position, data, records.unpack(present.recent), tail, whole)
        raise UnavailableError(f"session {id!r} changes faster than it can be read; try again when it is idle")

    def list(self, tenant: str | None, after: str | None = None, limit: int = 100, model: str | None = None) -> Page:
        """See SessionStore."""
        if tenant is not None:
            check_name("tenant", tenant)
        if not 1 <= limit <= 1000:
            raise InvalidError(f"limit {limit}: must be in 1..1000")
        found: list[Session] = []
        damaged: list[str] = []
        last = None
        for raw in self.scan(tenant, _cursor(tenant, after)):
            name = raw.id if tenant is not None else f"{raw.tenant}/{raw.id}"
            if len(found) == limit:
                return Page(found, last, tuple(damaged))
            try:
                row = _row(raw)
            except DamagedError:
                damaged.append(name)
                continue
            if self._gone(row) or (model is not None and row.record.settings.model != model):
                continue
            found.append(self._session(raw.tenant, raw.id, row))
            last = name
        return Page(found, None, tuple(damaged))

    # --- leases --------------------------------------------------------------------------------------------------

    def lease(self, tenant: str, id: str, owner: str, seconds: float = LEASE_SECONDS) -> Lease:
        """See SessionStore."""
        if not 0 < seconds <= 3600:
            raise InvalidError(f"a lease of {seconds} s: must be in (0, 3600]")
        check_name("owner", owner)
        row = self._need(tenant, id)  # also refuses what has expired or is damaged
        fence, holder, left = self.take(tenant, id, owner, seconds)
        if fence is None:
            raise _busy(id, holder, left) if holder else _missing(id)
        with self._lock:  # the row was read before the lease was ours; the guard finds out if it changed in between
            self._remember((tenant, id), replace(row, fence=fence, owner=owner, until=self.clock() + seconds))
        return Lease(tenant, id, fence, owner, seconds)

    def heartbeat(self, leases: Sequence[Lease]) -> Sequence[Lease | StoreError]:
        """See SessionStore."""
        return [lease if alive else _stale(lease) for lease, alive in zip(leases, self.prolong(leases), strict=True)]

    def release(self, leases: Sequence[Lease]) -> None:
        """See SessionStore."""
        self.prolong([replace(lease, seconds=0.0) for lease in leases])

    # --- writing -------------------------------------------------------------------------------------------------

    def commit(self, changes: Sequence[Change]) -> Sequence[Outcome]:
        """See SessionStore."""
        outcomes: dict[int, Outcome] = {}
        keys = [(change.lease.tenant, change.lease.id) for change in changes if change.lease is not None]
        if len(set(keys)) < len(keys):
            raise InvalidError("two changes of one session in one commit; join them")
        waiting = dict(enumerate(changes))
        for attempt in range(ATTEMPTS):
            rows = self._rows_for(list(waiting.values()), fresh=attempt > 0)
            writes: dict[int, Write | ResponseWrite] = {}
            for i, change in waiting.items():
                try:
                    made = self._prepare(change, rows, fresh=attempt > 0)
                except StoreError as error:
                    outcomes[i] = records.refusal(error, f"session {change.lease.id!r}") if change.lease else error
                    continue
                if isinstance(made, Committed):
                    outcomes[i] = made
                else:
                    writes[i] = made
            verdicts = self._write(list(writes.values()))
            waiting = {}
            for (i, made), verdict in zip(writes.items(), verdicts, strict=True):
                if verdict != "made":
                    waiting[i] = changes[i]
                elif isinstance(made, Write):
                    assert made.record is not None
                    outcomes[i] = Committed(made.record.version, made.record.position)
                else:
                    outcomes[i] = Committed(0, made.count)
            if not waiting:
                return [outcomes[i] for i in range(len(changes))]
        raise UnavailableError(f"{len(waiting)} changes lost {ATTEMPTS} races in a row; try again")

    def _prepare(self, change: Change, rows: dict[Key, Row], fresh: bool) -> Write | ResponseWrite | Committed:
        """What a change writes, or what came of it already."""
        lease, now = change.lease, self.clock()
        if lease is None:
            if change.response is None or change.ids or change.snapshot or change.turn:
                raise InvalidError("a change without a lease can only be progress of a response")
            write = self._prepare_response(change.response, change.response.tenant, None, now, fresh)
            return write or Committed(0, change.response.at + len(change.response.ids))
        row = rows.get((lease.tenant, lease.id))
        if row is None or row.fence != lease.fence:
            raise _stale(lease)
        record, history = row.record, None
        if records.applied(record, change):
            return Committed(record.version, record.position)
        records.check_place(record, change)
        if change.ids or change.snapshot or change.turn:
            record, history = records.advance(record, change, now)
        data = None if change.snapshot is None else change.snapshot.data
        response = None
        if change.response is not None:
            response = self._prepare_response(change.response, lease.tenant, lease.id, now, fresh)
        return Write(lease.tenant, lease.id, row, record, lease.seconds, data, history, response)

    def _prepare_response(
        self, progress: Progress, tenant: str, session: str | None, now: float, fresh: bool
    ) -> ResponseWrite | None:
        ttl = self.limits.response_ttl
        plain = progress.status == "running" and progress.detail is None
        if plain and not fresh and (tenant, progress.id) in self._running:
            return more(progress, tenant, now + ttl)
        found = self._find_response(tenant, progress.id)
        if found is None:
            raise NotFoundError(f"response {progress.id!r}: there is none (or it has expired)")
        if found.session != session:
            raise InvalidError(f"response {found.id!r} belongs to session {found.session!r}")
        return advance_response(found, progress, now, ttl)

    def create(self, tenant: str, id: str, settings: Settings) -> Session:
        """See SessionStore."""
        return self._add(tenant, id, records.new_record(settings, self.clock()), None, None)

    def restore(self, tenant: str, id: str, content: Content) -> Session:
        """See SessionStore."""
        record, history = records.from_content(content, self.clock())
        return self._add(tenant, id, record, content.snapshot, history)

    def put_snapshot(self, tenant: str, id: str, content: Content, expected_version: int) -> Session:
        """See SessionStore."""

        def change(row: Row) -> Write:
            record, history = records.from_content(content, self.clock(), row.record)
            return Write(tenant, id, row, record, None, content.snapshot, history)

        return self._change(tenant, id, expected_version, None, change)

    def rollback(
        self, tenant: str, id: str, position: int, expected_version: int | None = None, lease: Lease | None = None
    ) -> Session:
        """See SessionStore."""

        def change(row: Row) -> Write:
            record, history = records.back_to(row.record, position, self.clock())
            return Write(tenant, id, row, record, None if lease is None else lease.seconds, None, history)

        return self._change(tenant, id, expected_version, lease, change)

    def fork(self, tenant: str, id: str, new: str, position: int | None = None) -> Session:
        """See SessionStore."""
        for _ in range(ATTEMPTS):
            row, now = self._need(tenant, id), self.clock()
            record = row.record if position is None else records.back_to(row.record, position, now)[0]
            record = replace(record, version=1, stream=records.new_stream(), parent=id, created=now, updated=now)
            history = None
            if record.settings.keep_history:
                history = HistoryWrite(0, records.first_pieces(self.read_history(tenant, id), record.boundary))
                if self._need(tenant, id).record.version != row.record.version:
                    continue
            try:
                return self._add(tenant, new, record, None, history)
            except ConflictError:
                continue  # a snapshot that it would share went away: the session has moved on
        raise UnavailableError(f"session {id!r} changes faster than it can be forked; try again when it is idle")

    def delete(self, tenant: str, id: str, expected_version: int | None = None) -> None:
        """See SessionStore."""
        try:
            self._change(tenant, id, expected_version, None, lambda row: Write(tenant, id, row, None))
        except DamagedError:
            self.drop(tenant, id)  # which snapshots it referred to is lost with it: `verify` names those left over

    def _change(
        self, tenant: str, id: str, expected_version: int | None, lease: Lease | None, change: Callable[[Row], Write]
    ) -> Session:
        for _ in range(ATTEMPTS):
            row = self._need(tenant, id)
            if lease is None and row.until > self.clock():
                raise _busy(id, row.owner, row.until - self.clock())
            if lease is not None and row.fence != lease.fence:
                raise _stale(lease)
            if expected_version is not None and row.record.version != expected_version:
                raise ConflictError(
                    f"session {id!r}: version {expected_version} was expected, it is at {row.record.version}; read it again",
                    row.record.version,
                )
            write = change(row)
            if self._write([write]) == ["made"]:
                owner = None if lease is None else row.owner
                return self._session(tenant, id, Row(write.record or row.record, 0, owner, row.until if lease else 0.0))
        raise UnavailableError(f"session {id!r} changes faster than this can be done; try again when it is idle")

    def _add(self, tenant: str, id: str, record: Record, data: bytes | None, history: HistoryWrite | None) -> Session:
        check_name("tenant", tenant)
        check_name("session", id)
        for _ in range(2):
            if self._write([Write(tenant, id, None, record, None, data, history)]) == ["made"]:
                return self._session(tenant, id, Row(record, 0, None, 0.0))
            raw = self.load([(tenant, id)])[0]
            if raw is None:
                raise ConflictError(f"session {id!r}: a snapshot that it refers to is gone")
            row = _row(raw)
            if row.record.stream == record.stream:
                return self._session(tenant, id, row)  # made after all, but the answer was lost
            if not self._gone(row):
                break
            self._write([Write(tenant, id, row, None)])  # expired: its id is free
        raise ExistsError(f"session {id!r} exists; choose another name, or delete that one first")

    # --- responses -----------------------------------------------------------------------------------------------

    def begin(self, response: Response) -> tuple[Response, bool]:
        """See SessionStore."""
        now = self.clock()
        check_name("tenant", response.tenant)
        check_name("response", response.id)
        if response.key is not None and not 0 < len(response.key) <= 255:
            raise InvalidError(f"idempotency key of {len(response.key)} characters: must be 1 to 255")
        made = replace(response, created=now, updated=now, expires=now + self.limits.response_ttl)
        for _ in range(ATTEMPTS):
            other = self.add_response(made, encode_response(made))
            if other is None:
                self._know_running((made.tenant, made.id), made.status == "running")
                return made, True
            found = self._find_response(response.tenant, other)
            if found is None:
                continue
            if (found.id, found.created) == (made.id, made.created):
                return found, True  # made after all, but the answer was lost
            if found.key != response.key or response.key is None:
                raise ExistsError(f"response {response.id!r} exists; choose another id")
            if found.request != response.request:
                raise ConflictError(
                    f"idempotency key {response.key!r} was used for another request; use a new key for a new request"
                )
            return found, False
        raise UnavailableError(f"response {response.id!r} could not be registered; try again")

    def response(self, tenant: str, id: str) -> Response:
        """See SessionStore."""
        found = self._find_response(tenant, id)
        if found is None:
            raise NotFoundError(f"response {id!r}: there is none (or it has expired)")
        return found

    def responses(self, tenant: str, session: str) -> Sequence[Response]:
        """See SessionStore."""
        found = [self._find_response(tenant, id) for id in self.response_ids(tenant, session)]
        return sorted((x for x in found if x is not None), key=lambda x: (x.created, x.id))

    def _find_response(self, tenant: str, id: str) -> Response | None:
        row = self.load_response(tenant, id)
        if row is None:
            return None
        found = decode_response(tenant, id, row)
        if found.expires <= self.clock() and found.status != "running":
            self.drop_response(tenant, id)
            return None
        self._know_running((tenant, id), found.status == "running")
        return found

    def _know_running(self, key: Key, running: bool) -> None:
        with self._lock:
            self._running.pop(key, None)
            if running:
                self._running[key] = None
                while len(self._running) > CACHED:
                    self._running.popitem(last=False)

    # --- upkeep --------------------------------------------------------------------------------------------------

    def evict(self) -> Evicted:
        """See SessionStore."""
        now = self.clock()
        limit, total = self.limits.bytes, self.usage().bytes
        sessions = freed = 0
        over = limit is not None and total > limit
        for raw in self.candidates(now, self.limits.ttl, over):
            try:
                row = _row(raw)
            except DamagedError:
                continue
            expires = row.record.expires(self.limits.ttl)
            expired = expires is not None and expires <= now
            if not expired and (limit is None or total <= limit):
                continue
            if self._write([Write(raw.tenant, raw.id, row, None)]) == ["made"]:  # a lease taken meanwhile loses it the race
                sessions, freed, total = sessions + 1, freed + row.record.stored, total - row.record.stored
        responses, bytes_ = self.evict_responses(now, self.limits.response_bytes)
        return Evicted(sessions, responses, freed + bytes_, self.collect())

    def verify(self) -> Iterator[Damage]:
        """See SessionStore."""
        first = dict(self._examine())
        if not first:
            return
        again = dict(self._examine())  # what another writer was in the middle of has passed by now
        for where, what in first.items():
            if again.get(where) == what:
                yield Damage(where, what)

    def _examine(self) -> Iterator[tuple[str, str]]:
        yield from self.examine()
        wanted: dict[str, int] = {}
        for raw in self.scan(None, None):
            where = f"session {raw.tenant}/{raw.id}"
            try:
                record = raw.record()
                for hash_, count in record.snapshots().items():
                    wanted[hash_] = wanted.get(hash_, 0) + count
                if record.settings.keep_history and len(self._history(raw.tenant, raw.id)) != 4 * record.boundary:
                    yield where, "its history is not as long as its boundary says"
            except StoreError as error:
                yield where, str(error)
        counted = dict(self.blobs())
        for hash_ in wanted.keys() | counted.keys():
            where = f"snapshot {hash_[:16]}"
            if wanted.get(hash_, 0) != counted.get(hash_, 0):
                yield f"{where} (count)", f"counted {counted.get(hash_, 0)} times, referred to {wanted.get(hash_, 0)} times"
            if hash_ in counted:
                try:
                    self._blob(hash_, where)
                except StoreError as error:
                    yield where, str(error)
        for tenant, id in self.all_responses():
            try:
                row = self.load_response(tenant, id)
                if row is not None:
                    decode_response(tenant, id, row)
            except StoreError as error:
                yield f"response {tenant}/{id}", str(error)

    # --- helpers -------------------------------------------------------------------------------------------------

    def _need(self, tenant: str, id: str) -> Row:
        check_name("tenant", tenant)
        check_name("session", id)
        raw = self.load([(tenant, id)])[0]
        if raw is None or self._gone(row := _row(raw)):
            raise _missing(id)
        return row

    def _gone(self, row: Row) -> bool:
        expires = row.record.expires(self.limits.ttl)
        return expires is not None and max(expires, row.until) <= self.clock()

    def _session(self, tenant: str, id: str, row: Row) -> Session:
        owner = row.owner if row.until > self.clock() else None
        return row.record.session(tenant, id, owner, self.limits.ttl)

    def _blob(self, hash_: str, what: str) -> bytes:
        data = self.read_blob(hash_)
        if data is None:
            raise NotFoundError(f"{what}: its snapshot {hash_[:16]} is not in the store (any more); read the session again")
        if records.snapshot_hash(data) != hash_:
            raise DamagedError(f"{what}: snapshot {hash_[:16]} is damaged; go back to an earlier position or restore an export")
        return data

    def _history(self, tenant: str, id: str) -> bytes:
        return b"".join(records.unseal(piece, f"session {id!r} (history)") for piece in self.read_history(tenant, id))

    def _rows_for(self, changes: Iterable[Change], fresh: bool) -> dict[Key, Row]:
        """The rows that changes start from: remembered where the fence still is the lease's, else loaded."""
        rows: dict[Key, Row] = {}
        missing = []
        with self._lock:
            for change in changes:
                if change.lease is None:
                    continue
                key = (change.lease.tenant, change.lease.id)
                row = None if fresh else self._rows.get(key)
                if row is not None and row.fence == change.lease.fence:
                    rows[key] = row
                else:
                    missing.append(key)
        for key, raw in zip(missing, self.load(missing) if missing else [], strict=True):
            if raw is not None:
                rows[key] = _row(raw)
        return rows

    def _write(self, writes: Sequence[Write | ResponseWrite]) -> Sequence[Verdict]:
        if not writes:
            return []
        verdicts = self.write(writes)
        with self._lock:
            for write, verdict in zip(writes, verdicts, strict=True):
                if isinstance(write, Write):
                    key = (write.tenant, write.id)
                    self._rows.pop(key, None)
                    if verdict == "made" and write.record is not None and write.seconds is not None and write.old is not None:
                        self._remember(key, replace(write.old, record=write.record, until=self.clock() + write.seconds))
        for write, verdict in zip(writes, verdicts, strict=True):
            response = write.response if isinstance(write, Write) else write
            if response is not None:
                self._know_running((response.tenant, response.id), verdict == "made" and response.running)
        return verdicts

    def _remember(self, key: Key, row: Row) -> None:
        self._rows[key] = row
        while len(self._rows) > CACHED:
            self._rows.popitem(last=False)

    # --- what a back end brings ----------------------------------------------------------------------------------

    @abstractmethod
    def load(self, keys: Sequence[Key]) -> Sequence[Raw | None]:
        """Rows of sessions."""

    @abstractmethod
    def scan(self, tenant: str | None, after: Key | None) -> Iterator[Raw]:
        """All rows behind `after` in order of tenant and id."""

    @abstractmethod
    def candidates(self, now: float, ttl: float | None, everything: bool) -> Iterator[Raw]:
        """Rows without a live lease, the longest unchanged first: all, or those expired (`ttl`: of those that do not say)."""

    @abstractmethod
    def write(self, writes: Sequence[Write | ResponseWrite]) -> Sequence[Verdict]:
        """All writes whose guards hold, in one transaction that is on disk afterwards."""

    @abstractmethod
    def take(self, tenant: str, id: str, owner: str, seconds: float) -> tuple[int | None, str | None, float]:
        """A new fence; or None with the holder and the seconds left, or no holder: no such session."""

    @abstractmethod
    def prolong(self, leases: Sequence[Lease]) -> Sequence[bool]:
        """Whether each is still held; those last as long as they say from now (0: given back, and its fence is spent)."""

    @abstractmethod
    def drop(self, tenant: str, id: str) -> None:
        """Remove a session that cannot be decoded, with its history and responses."""

    @abstractmethod
    def read_blob(self, hash_: str) -> bytes | None:
        """A snapshot's bytes."""

    @abstractmethod
    def read_history(self, tenant: str, id: str) -> Sequence[bytes]:
        """The sealed pieces of a history."""

    @abstractmethod
    def add_response(self, response: Response, head: bytes) -> str | None:
        """Register a response; or the id of the one that has its key or its id."""

    @abstractmethod
    def load_response(self, tenant: str, id: str) -> ResponseRow | None:
        """A response's bytes."""

    @abstractmethod
    def response_ids(self, tenant: str, session: str) -> Sequence[str]:
        """A session's responses."""

    @abstractmethod
    def all_responses(self) -> Iterator[Key]:
        """Every response."""

    @abstractmethod
    def drop_response(self, tenant: str, id: str) -> None:
        """Remove a response."""

    @abstractmethod
    def evict_responses(self, now: float, limit: int | None) -> tuple[int, int]:
        """Remove expired responses and, longest unchanged first, those over the limit; running ones stay. (count, bytes)."""

    @abstractmethod
    def collect(self) -> int:
        """Remove blobs that no row names, left by writers that crashed."""

    @abstractmethod
    def blobs(self) -> Iterator[tuple[str, int]]:
        """Every snapshot's hash and its count of references."""

    @abstractmethod
    def examine(self) -> Iterator[tuple[str, str]]:
        """What the back end itself finds wrong: (where, what)."""

    @abstractmethod
    def usage(self, tenant: str | None = None) -> Usage:
        """See SessionStore."""

    @abstractmethod
    def close(self) -> None:
        """See SessionStore."""


def _row(raw: Raw) -> Row:
    return Row(raw.record(), raw.fence, raw.owner, raw.until)


def _cursor(tenant: str | None, after: str | None) -> Key | None:
    if after is None:
        return None
    if tenant is not None:
        return tenant, after
    owner, _, id = after.partition("/")
    return owner, id


def _missing(id: str) -> NotFoundError:
    return NotFoundError(f"session {id!r}: there is none (or it has expired); `pmi sessions ls` lists those there are")


def _busy(id: str, owner: str | None, seconds: float) -> BusyError:
    return BusyError(
        f"session {id!r} is in use by {owner!r}; wait until it is done (its lease lasts {seconds:.1f} s unless prolonged)",
        seconds,
    )


def _stale(lease: Lease) -> StaleError:
    return StaleError(f"session {lease.id!r}: {lease.owner!r} has lost its lease (fence {lease.fence}) and may not write it")
