"""Reading sessions and responses, from the primitives of a back end."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

from serving.sessions import records
from serving.sessions.backend import Backend, Key, Row, held
from serving.sessions.checks import check_name
from serving.sessions.errors import DamagedError, InvalidError, NotFoundError, UnavailableError
from serving.sessions.responses import decode_response
from serving.sessions.store import Content, Ids, Limits, Page, Response, Session

ATTEMPTS = 50
"""Lost races in a row before an operation gives up: with a lease there are none, without one a few."""
CACHED = 4096
"""Sessions (and responses) that are remembered as last written, so that a commit need not read them."""


class Reader(Backend):
    """The reading half of a SessionStore."""

    def __init__(self, limits: Limits, clock: Callable[[], float]) -> None:
        super().__init__(limits, clock)
        self._running: OrderedDict[Key, None] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, tenant: str, id: str) -> Session:
        """See SessionStore."""
        return self._session(tenant, id, self._need(tenant, id))

    def snapshot(self, session: Session) -> bytes | None:
        """See SessionStore."""
        if session.snapshot is None:
            return None
        return self.read_checked(session.snapshot, f"session {session.id!r}")

    def history(self, tenant: str, id: str) -> Ids:
        """See SessionStore."""
        content = self.content(tenant, id)
        if content.history is None:
            raise InvalidError(f"session {id!r} keeps no history; only one created with keep_history does")
        return content.history

    def content(self, tenant: str, id: str) -> Content:
        """See SessionStore."""
        return self.versioned(tenant, id)[1]

    def versioned(self, tenant: str, id: str) -> tuple[int, Content]:
        """A session's version, and its content at that version."""
        for _ in range(ATTEMPTS):
            row = self._need(tenant, id)
            record, present = row.record, row.record.boundaries[-1]
            try:
                data = None if present.snapshot is None else self.read_checked(present.snapshot, f"session {id!r}")
                history = self.read_whole_history(tenant, id) if record.settings.keep_history else None
            except NotFoundError:
                continue  # it moved on meanwhile; a session that is gone ends the loop
            if history is not None and (self._need(tenant, id).record.version != record.version):
                continue
            tail = records.unpack(record.tail)
            whole = None if history is None else records.unpack(history) + tail
            recent = records.unpack(present.recent)
            return record.version, Content(record.settings, present.position, data, recent, tail, whole)
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
                row = raw.row()
            except DamagedError:
                damaged.append(name)
                continue
            if self._gone(row) or (model is not None and row.record.settings.model != model):
                continue
            found.append(self._session(raw.tenant, raw.id, row))
            last = name
        return Page(found, None, tuple(damaged))

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

    def _need(self, tenant: str, id: str) -> Row:
        check_name("tenant", tenant)
        check_name("session", id)
        raw = self.load([(tenant, id)])[0]
        if raw is None or self._gone(row := raw.row()):
            raise missing(id)
        return row

    def _gone(self, row: Row) -> bool:
        expires = row.record.expires(self.limits.ttl)
        now = self.clock()
        return expires is not None and expires <= now and not held(row.until, now)

    def _session(self, tenant: str, id: str, row: Row) -> Session:
        owner = row.owner if held(row.until, self.clock()) else None
        return row.record.session(tenant, id, owner, self.limits.ttl)

    def read_checked(self, hash_: str, what: str) -> bytes:
        for _ in range(2):  # a file may have been given to another snapshot while it was read: then this one is gone
            data = self.read_blob(hash_)
            if data is None:
                raise NotFoundError(f"{what}: its snapshot {hash_[:16]} is not in the store (any more); read the session again")
            if records.snapshot_hash(data) == hash_:
                return data
        raise DamagedError(f"{what}: snapshot {hash_[:16]} is damaged; go back to an earlier position or restore an export")

    def read_whole_history(self, tenant: str, id: str) -> bytes:
        return b"".join(records.unseal(piece, f"session {id!r} (history)") for piece in self.read_history(tenant, id))


def _cursor(tenant: str | None, after: str | None) -> Key | None:
    if after is None:
        return None
    if tenant is not None:
        return tenant, after
    owner, _, id = after.partition("/")
    return owner, id


def missing(id: str) -> NotFoundError:
    return NotFoundError(f"session {id!r}: there is none (or it has expired); `pmi sessions ls` lists those there are")
