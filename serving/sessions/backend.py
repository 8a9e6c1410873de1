"""What a back end brings: a few primitives, chief among them one guarded write. All operations are built on these (base.py)."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from serving.sessions import records
from serving.sessions.errors import DamagedError
from serving.sessions.records import HistoryWrite, Record
from serving.sessions.responses import ResponseRow, ResponseWrite
from serving.sessions.store import LATEST_END, Lease, Limits, Response, Usage

Key = tuple[str, str]
Verdict = Literal["made", "lost", "response"]
"""Of a guarded write: made; the session was changed meanwhile; the response has not the expected number of ids."""


def held(until: float, now: float) -> bool:
    """Whether a lease that says it lasts until then does."""
    return now < until <= now + LATEST_END


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

    def row(self) -> "Row":
        """Decoded; DamagedError."""
        return Row(self.record(), self.fence, self.owner, self.until)

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

    @property
    def appends(self) -> bool:
        """Whether all it does, besides a response, is to append ids under a lease."""
        return (
            self.old is not None
            and self.record is not None
            and self.seconds is not None
            and self.record.boundaries is self.old.record.boundaries
            and self.history is None
        )

    def blob(self) -> tuple[str, bytes] | None:
        """Hash and bytes of the snapshot that it brings along."""
        if self.snapshot is None or self.record is None:
            return None
        return str(self.record.boundaries[-1].snapshot), self.snapshot

    def references(self) -> dict[str, int]:
        """By how much the count of references to each snapshot changes."""
        if self.record is not None and self.old is not None and self.record.boundaries is self.old.record.boundaries:
            return {}
        after = {} if self.record is None else dict(self.record.snapshots())
        for hash_, count in ({} if self.old is None else self.old.record.snapshots()).items():
            after[hash_] = after.get(hash_, 0) - count
        return {hash_: change for hash_, change in after.items() if change}


class Backend(ABC):
    """The primitives."""

    def __init__(self, limits: Limits, clock: Callable[[], float]) -> None:
        self.limits, self.clock = limits, clock

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
        """Remove expired responses and then those over the limit (see `make_room`); running ones stay. (count, bytes)."""

    @abstractmethod
    def collect(self) -> int:
        """Remove blobs that no row names, left by writers that crashed."""

    @abstractmethod
    def blobs(self) -> Iterator[tuple[str, int]]:
        """Every snapshot's hash and its count of references."""

    @abstractmethod
    def recount(self, hashes: Sequence[str], lower: bool) -> dict[str, tuple[int, int]]:
        """Of these snapshots, those whose count is not that of the boundaries which name them: (counted, named).

        In one transaction such counts are set right, those that are too high only with `lower`: 0 removes the snapshot.
        """

    @abstractmethod
    def examine(self) -> Iterator[tuple[str, str]]:
        """What the back end itself finds wrong: (where, what)."""

    @abstractmethod
    def usage(self, tenant: str | None = None) -> Usage:
        """See SessionStore."""

    @abstractmethod
    def close(self) -> None:
        """See SessionStore."""
