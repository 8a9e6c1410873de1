"""What both back ends share: every operation as load, a pure function (records.py), and one guarded write.

`write` makes each write only if version and fence of its session are still those that were loaded (compare and swap); what lost
that race is loaded and computed again. So no lock is ever held while computing.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from serving.sessions import records
from serving.sessions.backend import Key, Row, Verdict, Write, held
from serving.sessions.checks import check_name
from serving.sessions.errors import (
    BusyError,
    ConflictError,
    DamagedError,
    ExistsError,
    InvalidError,
    KeyReusedError,
    NotFoundError,
    StaleError,
    StoreError,
    UnavailableError,
)  # fmt: skip
from serving.sessions.reading import ATTEMPTS, CACHED, Reader, missing
from serving.sessions.records import HistoryWrite, Record
from serving.sessions.responses import ResponseWrite, advance_response, encode_response, more
from serving.sessions.store import (
    LEASE_SECONDS,
    LONGEST_LEASE,
    Change,
    Committed,
    Content,
    Damage,
    Evicted,
    Lease,
    Limits,
    Outcome,
    Progress,
    Repaired,
    Response,
    Session,
    Settings,
)  # fmt: skip
from serving.sessions.upkeep import examine, references


class BaseStore(Reader):
    """A SessionStore, given the primitives of a back end."""

    def __init__(self, limits: Limits, clock: Callable[[], float]) -> None:
        super().__init__(limits, clock)
        self._rows: OrderedDict[Key, Row] = OrderedDict()

    # --- leases --------------------------------------------------------------------------------------------------

    def lease(self, tenant: str, id: str, owner: str, seconds: float = LEASE_SECONDS) -> Lease:
        """See SessionStore."""
        if not 0 < seconds <= LONGEST_LEASE:
            raise InvalidError(f"a lease of {seconds} s: must be in (0, {LONGEST_LEASE:.0f}]")
        check_name("owner", owner)
        self._need(tenant, id)  # refuses what has expired or is damaged
        fence, holder, left = self.take(tenant, id, owner, seconds)
        if fence is None:
            raise _busy(id, holder, left) if holder else missing(id)
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
            again: dict[int, Change] = {}
            for i, change in waiting.items():
                try:
                    made: Write | ResponseWrite | Outcome = self._prepare(change, rows, fresh=attempt > 0)
                except StoreError as error:
                    made = records.refusal(error, f"session {change.lease.id!r}") if change.lease else error
                if isinstance(made, Write | ResponseWrite):
                    writes[i] = made
                elif attempt == 0:
                    again[i] = change  # what is remembered has no guard but a write's: only what is stored may refuse
                else:
                    outcomes[i] = made
            verdicts = self._write(list(writes.values()))
            waiting = again
            for (i, write), verdict in zip(writes.items(), verdicts, strict=True):
                if verdict != "made":
                    waiting[i] = changes[i]
                elif isinstance(write, Write):
                    assert write.record is not None
                    outcomes[i] = Committed(write.record.version, write.record.position)
                else:
                    outcomes[i] = Committed(0, write.count)
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
            record = records.forked(record, id, now)
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
        tried = False

        def remove(row: Row) -> Write:
            nonlocal tried
            tried = True
            return Write(tenant, id, row, None)

        try:
            self._change(tenant, id, expected_version, None, remove)
        except NotFoundError:
            if not tried:  # else it is gone, by this call whose answer was lost or by another
                raise
        except DamagedError:
            self.drop(tenant, id)  # which snapshots it referred to is lost with it: `repair` removes those left over

    def _change(
        self, tenant: str, id: str, expected_version: int | None, lease: Lease | None, change: Callable[[Row], Write]
    ) -> Session:
        for _ in range(ATTEMPTS):
            row = self._need(tenant, id)
            if lease is None and held(row.until, self.clock()):
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
            row = raw.row()
            if row.record.origin.stream == record.origin.stream:
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
                raise KeyReusedError(
                    f"idempotency key {response.key!r} was used for another request; use a new key for a new request"
                )
            return found, False
        raise UnavailableError(f"response {response.id!r} could not be registered; try again")

    # --- upkeep --------------------------------------------------------------------------------------------------

    def evict(self) -> Evicted:
        """See SessionStore."""
        now = self.clock()
        limit, total = self.limits.bytes, self.usage().bytes
        sessions = freed = 0
        over = limit is not None and total > limit
        for raw in self.candidates(now, self.limits.ttl, over):
            try:
                row = raw.row()
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
        first = dict(examine(self))
        if not first:
            return
        again = dict(examine(self))  # what another writer was in the middle of has passed by now
        for where, what in first.items():
            if again.get(where) == what:
                yield Damage(where, what)

    def repair(self) -> Repaired:
        """See SessionStore."""
        wanted, unknown = references(self)
        wrong = [hash_ for hash_, count in self.blobs() if count != wanted[hash_]]  # or changed meanwhile: counted again below
        differing = self.recount(wrong, lower=not unknown) if wrong else {}
        mended = [named for counted, named in differing.values() if named > counted or not unknown]
        return Repaired(len(mended), mended.count(0), len(differing) - len(mended))

    # --- helpers ------------------------------------------------------------------------------------------------

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
                rows[key] = raw.row()
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
                        self._remember(key, Row(write.record, write.old.fence, write.old.owner, self.clock() + write.seconds))
        for write, verdict in zip(writes, verdicts, strict=True):
            response = write.response if isinstance(write, Write) else write
            if response is not None:
                self._know_running((response.tenant, response.id), verdict == "made" and response.running)
        return verdicts

    def _remember(self, key: Key, row: Row) -> None:
        self._rows[key] = row
        while len(self._rows) > CACHED:
            self._rows.popitem(last=False)


def _busy(id: str, owner: str | None, seconds: float) -> BusyError:
    return BusyError(
        f"session {id!r} is in use by {owner!r}; wait until it is done (its lease lasts {seconds:.1f} s unless prolonged)",
        seconds,
    )


def _stale(lease: Lease) -> StaleError:
    return StaleError(f"session {lease.id!r}: {lease.owner!r} has lost its lease (fence {lease.fence}) and may not write it")
