"""The writer: puts each step's tokens into the session store, and only then hands them to their callers.

One transaction for all lanes, made while the next step is computed: one per step, or where steps are quicker than PACE one in so
many seconds, for what they add together (a sequence's first token and its end do not wait for it). Far ahead of a slow store the
loop waits.
"""

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from lm.model.snapshot import Captured, Identity, SnapshotError, encode
from serving.engine.request import Event
from serving.engine.sequence import Sequence
from serving.engine.stream import Stream, deliver
from serving.sessions.errors import StoreError, UnavailableError
from serving.sessions.store import Change, Committed, Lease, Outcome, Progress, SessionStore, Snapshot, Status

AHEAD = 64
"""Steps that the loop may be ahead of the store."""
PACE = 0.1
"""Seconds between transactions, unless someone waits for a first token or an end: nobody reads faster than that."""
PATIENCE = 10.0
"""Seconds that the writer tries again when the store does not answer, before the sequences fail."""


@dataclass
class Entry:
    """What one step (or several) adds to one sequence."""

    sequence: Sequence
    at: int
    ids: list[int] = field(default_factory=list)
    snapshot: Captured | None = None
    turn: bool = False
    response_at: int = 0
    response_ids: list[int] = field(default_factory=list)
    status: Status = "running"
    event: Event | None = None
    error: BaseException | None = None
    first: bool = False
    final: bool = False

    @property
    def urgent(self) -> bool:
        """Whether a caller waits for a first token or an end."""
        return self.first or self.final

    def absorb(self, later: "Entry") -> None:
        """Take in what a later step adds."""
        self.ids += later.ids
        self.response_ids += later.response_ids
        self.snapshot = later.snapshot or self.snapshot
        self.turn, self.first = self.turn or later.turn, self.first or later.first
        self.status, self.error, self.final = later.status, later.error, later.final
        if later.event is not None:
            self.event = later.event if self.event is None else self.event.then(later.event)


class Journal:
    """A thread that commits and delivers. `refused(sequence)` is called when the store no longer takes a sequence's ids."""

    def __init__(
        self, store: SessionStore, identity: Identity, refused: Callable[[Sequence], None], died: Callable[[BaseException], None]
    ) -> None:
        self.store, self._identity, self._refused, self._died = store, identity, refused, died
        self._steps: queue.Queue[list[Entry] | None] = queue.Queue(AHEAD)
        self._held: dict[Sequence, float] = {}  # leases to be prolonged, and when they last were
        self._lock = threading.Lock()
        self._beating = True
        self.transactions, self.bytes, self.seconds = 0, 0, 0.0
        """For measuring: transactions made, the bytes of ids and snapshots in them, and the seconds until they were on disk."""
        self.snapshots, self.snapshot_bytes, self.snapshot_seconds = 0, 0, 0.0
        """Of these, snapshots: how many, and the seconds that encoding them took."""
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    @property
    def holds(self) -> int:
        """Sequences whose end is not yet on disk."""
        with self._lock:
            return len(self._held)

    def hold(self, sequence: Sequence) -> None:
        """Keep this sequence's lease alive until its last entry."""
        with self._lock:
            self._held[sequence] = time.monotonic()

    def abandon(self) -> list[Stream]:
        """Prolong no leases any more: another engine shall have the sessions. Returns the callers this thread cannot tell."""
        self._beating = False
        if self._thread is not threading.current_thread() and self._thread.is_alive():
            return []  # only the loop is dead: what it left here will still be committed and handed out
        with self._lock:
            return [sequence.stream for sequence in self._held]

    def write(self, entries: list[Entry]) -> None:
        """Commit and deliver `entries` soon; waits only if the store is several steps behind."""
        while self._thread.is_alive():
            try:
                self._steps.put(entries, timeout=1)
            except queue.Full:
                continue
            return

    def close(self) -> None:
        """Commit what is left and end the thread."""
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._steps.put(None)
            self._thread.join()

    # --- the thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        waiting: dict[Sequence, Entry] = {}
        closing, last = False, 0.0
        try:
            while not closing:
                closing = self._gather(waiting, last + PACE - time.monotonic() if waiting else 0.5)
                whole = closing or time.monotonic() >= last + PACE
                due = list(waiting) if whole else [sequence for sequence, entry in waiting.items() if entry.urgent]
                if whole:
                    last = time.monotonic()
                if due:
                    began = time.perf_counter()  # a slow disk is waited for: processor time would not show it
                    self._commit([waiting.pop(sequence) for sequence in due])
                    self.seconds += time.perf_counter() - began
                self._heartbeat()
        except BaseException as error:
            self._died(error)

    def _gather(self, waiting: dict[Sequence, Entry], seconds: float) -> bool:
        """Add everything that has come to `waiting`, after so many seconds without anything at most; true: close."""
        try:
            step = self._steps.get(timeout=max(0.0, seconds))
            while step is not None:
                for entry in step:
                    earlier = waiting.get(entry.sequence)
                    if earlier is None:
                        waiting[entry.sequence] = entry
                    else:
                        earlier.absorb(entry)
                step = self._steps.get_nowait()
        except queue.Empty:
            return False
        return True

    def _commit(self, entries: list[Entry]) -> None:
        with self._lock:
            entries = [entry for entry in entries if entry.sequence in self._held]  # the others were refused before
        changes: dict[int, Change] = {}
        failures: dict[int, BaseException] = {}
        for i, entry in enumerate(entries):
            try:
                changes[i] = self._change(entry)
            except SnapshotError as error:
                failures[i] = error
        try:
            outcomes = self._insist(list(changes.values()))
        except StoreError as error:
            outcomes = [error] * len(changes)
        failures |= {i: outcome for i, outcome in zip(changes, outcomes, strict=True) if isinstance(outcome, StoreError)}
        for i, outcome in zip(changes, outcomes, strict=True):
            if isinstance(outcome, Committed):
                entries[i].sequence.stream.usage.version = outcome.version
        now, ended = time.monotonic(), []
        for i, entry in enumerate(entries):
            with self._lock:
                if entry.final or i in failures:
                    del self._held[entry.sequence]
                    ended.append(entry.sequence)
                else:
                    self._held[entry.sequence] = now
        leases = [sequence.lease for sequence in ended if sequence.lease is not None]
        if leases:
            self._release(leases)
        deliver(
            (entry.sequence.stream, None if i in failures else entry.event, failures.get(i, entry.error))
            for i, entry in enumerate(entries)
        )
        for i in failures:
            self._refused(entries[i].sequence)

    def _change(self, entry: Entry) -> Change:
        snapshot = None
        if entry.snapshot is not None:
            began = time.perf_counter()
            snapshot = Snapshot(entry.snapshot.position, *encode(entry.snapshot, self._identity))
            self.snapshots += 1
            self.snapshot_bytes += len(snapshot.data)
            self.snapshot_seconds += time.perf_counter() - began
            self.bytes += len(snapshot.data)
        self.bytes += 4 * (len(entry.ids) + len(entry.response_ids))
        request = entry.sequence.request
        progress = None
        if request.response is not None:
            progress = Progress(request.response, entry.response_at, entry.response_ids, entry.status, tenant=request.tenant)
        if entry.sequence.lease is None:
            return Change(None, response=progress)
        return Change(entry.sequence.lease, entry.at, entry.ids, snapshot, entry.turn, response=progress)

    def _insist(self, changes: list[Change]) -> Iterable[Outcome]:
        """Commit; again for a while, if the store does not answer (committing the same change twice is no error)."""
        self.transactions += 1
        give_up, pause = time.monotonic() + PATIENCE, 0.05
        while True:
            try:
                return self.store.commit(changes)
            except UnavailableError:
                if time.monotonic() + pause > give_up:
                    raise
                time.sleep(pause)
                pause = min(2 * pause, 1.0)

    def _heartbeat(self) -> None:
        now = time.monotonic()
        with self._lock:
            due = [s for s, last in self._held.items() if s.lease is not None and now - last > s.lease.seconds / 4]
            for sequence in due:
                self._held[sequence] = now
        if not due or not self._beating:
            return
        try:
            outcomes = self.store.heartbeat([s.lease for s in due if s.lease is not None])
        except StoreError:
            return  # the next commit will say what is wrong
        lost = [(s, outcome) for s, outcome in zip(due, outcomes, strict=True) if isinstance(outcome, StoreError)]
        for sequence, error in lost:
            with self._lock:
                del self._held[sequence]
            deliver([(sequence.stream, None, error)])
            self._refused(sequence)

    def _release(self, leases: list[Lease]) -> None:
        with contextlib.suppress(StoreError):  # they run out by themselves
            self.store.release(leases)
