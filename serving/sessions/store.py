"""What a session store keeps and does: the values and the interface that SQLite and Redis both meet.

    store = open_store("sqlite:///sessions.db")                      # serving/sessions/opening.py
    store.create("local", "ada", Settings(model=..., tokenizer=..., segment=64))
    lease = store.lease("local", "ada", owner="engine-1")
    store.commit([Change(lease, at=0, ids=[256, 72, 105], turn=True)])   # one transaction, whatever the number of lanes
    store.release([lease])

A session is the snapshot at its boundary + its tail (the ids since). Position counts the ids read so far, so the tail is
[boundary, position). Version rises by one with every change. All methods may be called from any thread and any process.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from serving.sessions.errors import StoreError

RECENT = 256
"""Ids before the boundary that are kept for penalties, stop strings and detokenising."""
LEASE_SECONDS = 4.0
"""How long a lease lasts without a sign of life: a crashed writer's sessions are free again within 5 s."""
LONGEST_LEASE = 3600.0
LATEST_END = LONGEST_LEASE + 60.0
"""Seconds from now, with a minute for clocks that differ. A lease that ends later was made under a wrong clock, or is damaged:
it has lapsed. (script.lua has this number too.)"""
LOCAL = "local"
"""The tenant of the command line, and of a service without keys."""

Ids = tuple[int, ...]
Status = Literal["running", "interrupted", "done", "failed", "closed"]
"""Of a response. interrupted: may go on; closed: a later turn has made that impossible."""


# --- values --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """What a session is created with."""

    model: str
    """Fingerprint of the model that its snapshots belong to."""
    tokenizer: str
    """Fingerprint of the tokenizer that its ids belong to."""
    segment: int
    """T: boundaries are its multiples."""
    seed: int = 0
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Defaults of sampling: JSON values, up to 4 KB."""
    retain: int = 1
    """Old boundaries kept for rollback, besides the one that the last turn started from."""
    keep_history: bool = False
    """Also keep every id ever read, so that the session can be migrated to another model. Grows with the text: 4 bytes each."""
    ttl: float | None = None
    """Seconds after the last change until it may be evicted (None: the store's default)."""


@dataclass(frozen=True)
class Session:
    """A session as the store holds it. The snapshot's bytes are apart: `store.snapshot(session)`."""

    tenant: str
    id: str
    settings: Settings
    version: int
    position: int
    """Ids read so far."""
    turn: int
    """Where the last turn started: a position that can always be gone back to."""
    boundary: int
    """Position of the snapshot."""
    snapshot: str | None
    """Hash of the snapshot's bytes; None at boundary 0, where the state is the model's initial one."""
    recent: Ids
    """The last (up to 256) ids before the boundary."""
    tail: Ids
    """The ids since the boundary: what resuming reads again."""
    retained: tuple[tuple[int, int], ...]
    """Positions that can be gone back to, as ranges (first, last) with both ends."""
    stream: int
    """Number of its random stream: another one for every session, fork and rollback."""
    parent: str | None
    """The session it was forked from."""
    created: float
    updated: float
    expires: float | None
    bytes: int
    """What it occupies: its row, retained snapshots (shared ones too) and history."""
    owner: str | None
    """Who holds the lease, while someone does."""


@dataclass(frozen=True)
class Content:
    """A session's content as a value: what import, `put_snapshot` and migration bring."""

    settings: Settings
    boundary: int
    snapshot: bytes | None
    recent: Ids
    tail: Ids
    history: Ids | None = None
    """All ids from 0, where they were kept."""

    @property
    def position(self) -> int:
        """Ids read so far."""
        return self.boundary + len(self.tail)


@dataclass(frozen=True)
class Lease:
    """The right to write one session. A writer whose fence is not the newest is refused."""

    tenant: str
    id: str
    fence: int
    owner: str
    seconds: float
    """How long it lasts from each sign of life: lease, heartbeat or commit."""


@dataclass(frozen=True)
class Snapshot:
    """A new snapshot: the state at `position`, a boundary (lm.model.snapshot.dump)."""

    position: int
    data: bytes
    body: bytes | None = None
    """SHA-256 of what follows the header in `data`, where its writer knows it (None: computed)."""


@dataclass(frozen=True)
class Response:
    """One answer: what a resumable stream and a safe retry need."""

    tenant: str
    id: str
    session: str | None
    key: str | None
    """Idempotency key: a second `begin` with it finds this response."""
    request: str
    """Hash of the request: the same key with another request is a conflict."""
    parameters: Mapping[str, Any]
    start: int
    """Position of its first id in the session."""
    ids: Ids = ()
    status: Status = "running"
    detail: Mapping[str, Any] = field(default_factory=dict)
    """Why it ended, usage: JSON values."""
    created: float = 0.0
    updated: float = 0.0
    expires: float = 0.0


@dataclass(frozen=True)
class Progress:
    """More of a response, behind the `at` ids it has."""

    id: str
    at: int
    ids: Sequence[int] = ()
    status: Status = "running"
    detail: Mapping[str, Any] | None = None
    """None: as it was."""
    tenant: str = LOCAL
    """Only looked at where there is no lease, which names the tenant otherwise."""


@dataclass(frozen=True)
class Change:
    """What one lane adds in one step: ids, perhaps a snapshot that became current, perhaps progress of a response."""

    lease: Lease | None
    """None: a response without a session."""
    at: int = 0
    """Position that the ids are appended at: the session's present one. Committing the same change again is no error."""
    ids: Sequence[int] = ()
    snapshot: Snapshot | None = None
    """At a boundary in (present boundary, position after the ids): the newest id always stays in the tail."""
    turn: bool = False
    """A turn starts at `at`."""
    expected_version: int | None = None
    response: Progress | None = None


@dataclass(frozen=True)
class Committed:
    """A change that is on disk."""

    version: int
    position: int


Outcome = Committed | StoreError
"""Of one change. A refused change leaves nothing behind and does not stand in the way of the others."""


@dataclass(frozen=True)
class Page:
    """Some sessions, and the cursor that gives the next ones (None: these are the last)."""

    sessions: list[Session]
    next: str | None
    damaged: tuple[str, ...] = ()
    """Those among them that cannot be read: see `verify`."""


@dataclass(frozen=True)
class Limits:
    """What `evict` enforces. None: no limit."""

    ttl: float | None = None
    """Seconds after its last change that a session may be evicted, where its own settings do not say."""
    bytes: int | None = None
    """Of all sessions: the longest unchanged go first."""
    response_ttl: float = 86_400.0
    response_bytes: int | None = 1 << 30
    """Of all responses: the oldest of the tenant that has most go first."""


@dataclass(frozen=True)
class Evicted:
    """What `evict` removed."""

    sessions: int
    responses: int
    bytes: int
    orphans: int
    """Blob files that a crashed writer left and no session names."""


@dataclass(frozen=True)
class Usage:
    """What a tenant (or all) occupies."""

    sessions: int
    bytes: int
    responses: int
    response_bytes: int


@dataclass(frozen=True)
class Repaired:
    """What `repair` did."""

    counts: int = 0
    """Counts of references set right."""
    removed: int = 0
    """Of these, snapshots that no session refers to: they are gone."""
    kept: int = 0
    """Snapshots counted too often that were left alone: a damaged session may refer to them. Remove that first."""


@dataclass(frozen=True)
class Damage:
    """One thing that `verify` found."""

    where: str
    what: str


# --- the interface -------------------------------------------------------------------------------------------------


class SessionStore(Protocol):
    """Sessions and responses, durable once a call returns."""

    limits: Limits

    def create(self, tenant: str, id: str, settings: Settings) -> Session:
        """A new session at position 0. ExistsError."""

    def get(self, tenant: str, id: str) -> Session:
        """NotFoundError, DamagedError."""

    def snapshot(self, session: Session) -> bytes | None:
        """The bytes of a session's snapshot, checked against their hash; None at boundary 0. NotFoundError, DamagedError."""

    def history(self, tenant: str, id: str) -> Ids:
        """Every id from position 0, tail included. InvalidError unless `keep_history`."""

    def content(self, tenant: str, id: str) -> Content:
        """The whole session as a value, all of one version: what an export writes."""

    def list(self, tenant: str | None, after: str | None = None, limit: int = 100, model: str | None = None) -> Page:
        """Sessions of a tenant (None: of all), in order of id; `model`: only those of this fingerprint."""

    def lease(self, tenant: str, id: str, owner: str, seconds: float = LEASE_SECONDS) -> Lease:
        """The right to write. BusyError while someone, the same owner too, holds it."""

    def heartbeat(self, leases: Sequence[Lease]) -> Sequence[Lease | StoreError]:
        """Prolong leases; StaleError in place of one that was lost."""

    def release(self, leases: Sequence[Lease]) -> None:
        """Give leases back; those already lost are passed over."""

    def commit(self, changes: Sequence[Change]) -> Sequence[Outcome]:
        """Make all changes in one transaction; returns when they are on disk. Prolongs the leases.

        A change may be refused (StaleError, ConflictError, InvalidError, NotFoundError) while the others are made.
        FullError and UnavailableError concern all, and are raised.
        """

    def put_snapshot(self, tenant: str, id: str, content: Content, expected_version: int) -> Session:
        """Replace a session's content. ConflictError if its version is another; BusyError while leased."""

    def restore(self, tenant: str, id: str, content: Content) -> Session:
        """A new session with this content. ExistsError."""

    def fork(self, tenant: str, id: str, new: str, position: int | None = None) -> Session:
        """A new session with the same past (up to `position`), sharing snapshots; only kept history is copied. ExistsError."""

    def rollback(
        self, tenant: str, id: str, position: int, expected_version: int | None = None, lease: Lease | None = None
    ) -> Session:
        """Go back to a retained position. NotRetainedError; BusyError while leased, unless by `lease`."""

    def delete(self, tenant: str, id: str, expected_version: int | None = None) -> None:
        """Remove a session and its responses. NotFoundError; BusyError while leased."""

    def begin(self, response: Response) -> tuple[Response, bool]:
        """Register a response, or find the one with the same key (False). ConflictError: the key was used for another request."""

    def response(self, tenant: str, id: str) -> Response:
        """NotFoundError."""

    def responses(self, tenant: str, session: str) -> Sequence[Response]:
        """A session's responses, oldest first."""

    def evict(self) -> Evicted:
        """Enforce `limits`. Never touches a leased session."""

    def usage(self, tenant: str | None = None) -> Usage:
        """What is stored."""

    def verify(self) -> Iterator[Damage]:
        """Read everything and compare with checksums and counts."""

    def repair(self) -> Repaired:
        """Count the references to snapshots anew and remove those that no session refers to. Sessions are not touched."""

    def close(self) -> None:
        """Release connections; the store cannot be used afterwards."""
