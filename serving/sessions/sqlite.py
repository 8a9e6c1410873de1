"""Sessions in one SQLite file: the embedded default. Write-ahead log, full sync; snapshots over 1 MB in files beside it.

Safe with many threads (a connection each) and many processes of one machine; not over network file systems.
"""

import os
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from serving.sessions import records
from serving.sessions.backend import Key, Raw, Verdict, Write, held
from serving.sessions.base import BaseStore
from serving.sessions.blobs import FolderBlobs
from serving.sessions.errors import DamagedError, FullError, InvalidError, StoreError, UnavailableError
from serving.sessions.records import SEAL, HistoryWrite
from serving.sessions.responses import ResponseRow, ResponseWrite, make_room
from serving.sessions.store import LATEST_END, Lease, Limits, Response, Usage

FORMAT = 1
INLINE = 1 << 20
"""Snapshots up to this many bytes are kept in the database, larger ones in files."""
BUSY_SECONDS = 30.0
SCHEMA = """
CREATE TABLE IF NOT EXISTS sessions (
    key INTEGER PRIMARY KEY, tenant TEXT NOT NULL, id TEXT NOT NULL, version INTEGER NOT NULL, fence INTEGER NOT NULL,
    owner TEXT, until REAL NOT NULL, updated REAL NOT NULL, expires REAL, bytes INTEGER NOT NULL,
    head BLOB NOT NULL, UNIQUE (tenant, id));
CREATE INDEX IF NOT EXISTS sessions_bytes ON sessions (tenant, bytes);
CREATE TABLE IF NOT EXISTS bounds (key INTEGER PRIMARY KEY, data BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS blobs (
    hash TEXT PRIMARY KEY, refs INTEGER NOT NULL, size INTEGER NOT NULL, file TEXT, data BLOB) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS history (
    key INTEGER NOT NULL, start INTEGER NOT NULL, ids BLOB NOT NULL, PRIMARY KEY (key, start)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS responses (
    key INTEGER PRIMARY KEY, tenant TEXT NOT NULL, id TEXT NOT NULL, session TEXT, idempotency TEXT, count INTEGER NOT NULL,
    expires REAL NOT NULL, running INTEGER NOT NULL, bytes INTEGER NOT NULL, head BLOB NOT NULL,
    UNIQUE (tenant, id), UNIQUE (tenant, idempotency));
CREATE INDEX IF NOT EXISTS responses_session ON responses (tenant, session);
CREATE INDEX IF NOT EXISTS responses_expires ON responses (expires, bytes);
CREATE TABLE IF NOT EXISTS pieces (
    key INTEGER NOT NULL, start INTEGER NOT NULL, ids BLOB NOT NULL, PRIMARY KEY (key, start)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS fences (last INTEGER NOT NULL);
"""
APPEND = (
    "UPDATE sessions SET version = ?, until = ?, updated = ?, expires = ?, head = ? "
    "WHERE tenant = ? AND id = ? AND version = ? AND fence = ?"
)
"""What nearly all writes are: some ids behind the tail. Leaves alone what has an index."""
RAW = "tenant, id, version, fence, owner, until, head, (SELECT data FROM bounds WHERE bounds.key = sessions.key)"

HELD = f"until > ?1 AND until <= ?1 + {LATEST_END}"
"""`held`, at the time ?1."""
LAST = f"SELECT start + (length(ids) - {SEAL}) / 4 FROM pieces WHERE pieces.key = r.key ORDER BY start DESC LIMIT 1"
COUNT = f"coalesce(({LAST}), r.count)"
"""The ids of a response r: those up to its last piece, or those in its head."""


class SQLiteStore(BaseStore):
    """A SessionStore in `path`, its large snapshots in `path`-blobs."""

    def __init__(
        self, path: Path, limits: Limits | None = None, durability: str = "full", clock: Callable[[], float] = time.time
    ) -> None:
        super().__init__(limits or Limits(), clock)
        self.path, self.synchronous = path, "FULL" if durability == "full" else "NORMAL"
        self._local, self._turn = threading.local(), threading.Lock()
        self._open: list[sqlite3.Connection] = []
        self._closed = False
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.touch(mode=0o600)  # what users wrote is nobody else's to read; SQLite gives its other files the same mode
        self._files = FolderBlobs(path.with_name(path.name + "-blobs"))
        with self._errors():
            db = self._db()
            db.execute("PRAGMA journal_mode = WAL")
            version = db.execute("PRAGMA user_version").fetchone()[0]
            if version > FORMAT:
                raise InvalidError(f"{path}: format {version}, this version reads {FORMAT}; use the newer version of pmi")
            if version < FORMAT:
                with self._transaction() as db:
                    for statement in SCHEMA.split(";"):
                        db.execute(statement)
                    if db.execute("SELECT count(*) FROM fences").fetchone()[0] == 0:
                        db.execute("INSERT INTO fences VALUES (0)")
                    db.execute(f"PRAGMA user_version = {FORMAT}")

    # --- connections ---------------------------------------------------------------------------------------------

    def _db(self) -> sqlite3.Connection:
        """This thread's connection; a forked process makes its own."""
        if self._closed:
            raise UnavailableError(f"{self.path}: the store has been closed")
        if getattr(self._local, "process", None) != os.getpid():
            db = sqlite3.connect(self.path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
            db.execute(f"PRAGMA synchronous = {self.synchronous}")
            db.execute("PRAGMA busy_timeout = 30000")
            self._local.db, self._local.process = db, os.getpid()
            with self._lock:
                self._open.append(db)
        return self._local.db

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """SQLite's errors as the store's."""
        try:
            yield
        except sqlite3.Error as error:
            raise self._translated(error) from error
        except UnicodeDecodeError as error:  # so garbled that not even SQLite's message about it can be read
            raise DamagedError(f"{self.path}: the database file is damaged; restore a backup") from error

    def _translated(self, error: sqlite3.Error) -> StoreError:
        text, name = str(error), getattr(error, "sqlite_errorname", "")
        if name.startswith(("SQLITE_FULL", "SQLITE_IOERR_WRITE", "SQLITE_IOERR_FSYNC")):
            return FullError(f"{self.path}: no room left, or the disk fails ({text}). Nothing was changed")
        if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
            return DamagedError(f"{self.path}: {text}; restore a backup, or see what `pmi sessions verify` still finds")
        if name.startswith("SQLITE_BUSY"):
            return UnavailableError(f"{self.path}: another process keeps it locked for over {BUSY_SECONDS:.0f} s ({text})")
        return UnavailableError(f"{self.path}: {text}")

    @contextmanager
    def _synced(self, how: str) -> Iterator[sqlite3.Connection]:
        """A write transaction with its own sync. FULL: it and all before it are on disk at the block's end.

        NORMAL, for leases: every process sees it, but a power cut may undo it, and ends who held them too.
        """
        db = self._db()
        with self._errors():
            db.execute(f"PRAGMA synchronous = {how}")
        try:
            with self._transaction():
                yield db
        finally:
            with self._errors():
                db.execute(f"PRAGMA synchronous = {self.synchronous}")

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """A write transaction: on disk at the block's end, undone if it fails."""
        db = self._db()
        # threads of one process take turns here: SQLite's own waiting sleeps, longer each time, however short the others are
        with self._turn, self._errors():
            db.execute("BEGIN IMMEDIATE")
            try:
                yield db
                db.execute("COMMIT")
            except BaseException:
                if db.in_transaction:
                    db.execute("ROLLBACK")
                raise

    def _query(self, statement: str, *values: Any) -> list[tuple[Any, ...]]:
        with self._errors():
            return self._db().execute(statement, values).fetchall()

    def close(self) -> None:
        """See SessionStore."""
        self._closed = True
        self._files.drop_spares()
        with self._lock:
            for db in self._open:
                db.close()
            self._open.clear()

    # --- sessions ------------------------------------------------------------------------------------------------

    def load(self, keys: Sequence[Key]) -> Sequence[Raw | None]:
        """See Backend."""
        with self._errors():
            db = self._db()
            rows = [db.execute(f"SELECT {RAW} FROM sessions WHERE tenant = ? AND id = ?", key).fetchone() for key in keys]
        return [None if row is None else Raw(*row) for row in rows]

    def scan(self, tenant: str | None, after: Key | None) -> Iterator[Raw]:
        """See Backend."""
        place = after or (tenant or "", "")
        which = "(tenant, id) > (?, ?)" if tenant is None else "tenant = ? AND id > ?"
        while True:
            rows = self._query(f"SELECT {RAW} FROM sessions WHERE {which} ORDER BY tenant, id LIMIT 100", *place)
            yield from (Raw(*row) for row in rows)
            if not rows:
                return
            place = rows[-1][0], rows[-1][1]

    def candidates(self, now: float, ttl: float | None, everything: bool) -> Iterator[Raw]:
        """See Backend."""
        keys = self._query(
            f"SELECT key FROM sessions WHERE NOT ({HELD}) AND (?2 OR coalesce(expires, updated + ?3) <= ?1) "
            "ORDER BY updated, key",
            now, everything, ttl,
        )  # fmt: skip
        for (key,) in keys:
            for row in self._query(f"SELECT {RAW} FROM sessions WHERE key = ?", key):
                yield Raw(*row)

    def write(self, writes: Sequence[Write | ResponseWrite]) -> Sequence[Verdict]:
        """See Backend."""
        brought = dict(blob for write in writes if isinstance(write, Write) and (blob := write.blob()) is not None)
        large = [(hash_, data) for hash_, data in brought.items() if len(data) > INLINE]
        names = dict(zip((hash_ for hash_, _ in large), self._files.put(large), strict=True))
        try:
            try:
                verdicts, used, freed = self._write_all(writes, brought, names, careful=False)
            except _RefusedError:
                verdicts, used, freed = self._write_all(writes, brought, names, careful=True)
        except BaseException:
            self._files.discard(names.values())
            raise
        self._files.discard(name for name in names.values() if name not in used)
        self._give_up(freed, any(isinstance(write, Write) and write.record is None for write in writes))
        return verdicts

    def _give_up(self, files: list[str], deleted: bool) -> None:
        """Files that no row names any more: to be written anew, or removed where what they hold was deleted."""
        if files and self.synchronous != "FULL":
            try:
                with self._synced("FULL") as db:  # else a power cut might bring back rows that need them
                    self._fence(db)
            except StoreError:
                return  # the commit stands; `collect` finds them
        if deleted:
            self._files.remove(files)
            self._files.drop_spares()  # nothing of what is deleted stays in a file
        else:
            self._files.retire(files)

    def _write_all(
        self, writes: Sequence[Write | ResponseWrite], brought: dict[str, bytes], names: dict[str, str], careful: bool
    ) -> tuple[list[Verdict], set[str], list[str]]:
        """All writes in one transaction: verdicts, the files that were needed and those that are no longer.

        Savepoints cost as much as the writes themselves. So first without, and what only appends in one go; only if one is
        refused, all again with care.
        """
        verdicts: list[Verdict] = []
        used: set[str] = set()
        freed: list[str] = []
        appends = [] if careful else [write for write in writes if isinstance(write, Write) and write.appends]
        with self._transaction() as db:
            if appends and db.executemany(APPEND, map(self._append, appends)).rowcount != len(appends):
                raise _RefusedError
            for write in writes:
                if careful:
                    db.execute("SAVEPOINT one")
                unit = _Unit(db, brought, names)
                verdict = self._write_one(unit, write, not careful and isinstance(write, Write) and write.appends)
                if verdict == "made":
                    used |= unit.used
                    freed += unit.freed
                elif not careful:
                    raise _RefusedError
                else:
                    db.execute("ROLLBACK TO one")
                if careful:
                    db.execute("RELEASE one")
                verdicts.append(verdict)
            self._files.touch(freed)
        return verdicts, used, freed

    def _append(self, write: Write) -> tuple[Any, ...]:
        """The values of APPEND."""
        old, record = write.old, write.record
        assert old is not None
        assert record is not None
        return (
            record.version, self.clock() + (write.seconds or 0.0), record.updated, record.expires(None), record.head(),
            write.tenant, write.id, old.record.version, old.fence,
        )  # fmt: skip

    def _write_one(self, unit: "_Unit", write: Write | ResponseWrite, appended: bool) -> Verdict:
        """One write (`appended`: but for its response); what it did is undone by the caller if it is refused."""
        db = unit.db
        if isinstance(write, ResponseWrite):
            return "made" if self._write_response(db, write) else "response"
        if appended:
            return "made" if write.response is None or self._write_response(db, write.response) else "response"
        old, record, tenant, id = write.old, write.record, write.tenant, write.id
        if record is None:
            assert old is not None
            row = db.execute(
                "DELETE FROM sessions WHERE tenant = ? AND id = ? AND version = ? AND fence = ? RETURNING key",
                (tenant, id, old.record.version, old.fence),
            ).fetchone()
            if row is None:
                return "lost"
            self._remove_parts(db, row[0], tenant, id)
        elif old is None:
            row = db.execute(
                "INSERT INTO sessions (tenant, id, version, fence, until, updated, expires, bytes, head) "
                "VALUES (?, ?, ?, ?, 0, ?, ?, ?, ?) "
                "ON CONFLICT DO NOTHING RETURNING key",
                (tenant, id, record.version, self._fence(db), record.updated, record.expires(None), record.stored, record.head()),
            ).fetchone()
            if row is None:
                return "lost"
            db.execute("INSERT INTO bounds VALUES (?, ?)", (row[0], record.bounds()))
        else:
            leased = write.seconds is not None
            row = db.execute(
                "UPDATE sessions SET version = ?, fence = ?, owner = ?, until = ?, updated = ?, expires = ?, bytes = ?, head = ? "
                "WHERE tenant = ? AND id = ? AND version = ? AND fence = ? RETURNING key",
                (
                    record.version, old.fence if leased else self._fence(db), old.owner if leased else None,
                    self.clock() + (write.seconds or 0.0) if leased else 0.0, record.updated, record.expires(None),
                    record.stored, record.head(), tenant, id, old.record.version, old.fence,
                ),
            ).fetchone()  # fmt: skip
            if row is None:
                return "lost"
            if record.boundaries is not old.record.boundaries:
                db.execute("UPDATE bounds SET data = ? WHERE key = ?", (record.bounds(), row[0]))
        if write.history is not None and record is not None:
            self._write_history(db, row[0], write.history)
        if not all(unit.refer(hash_, change) for hash_, change in write.references().items()):
            return "lost"
        if write.response is not None and not self._write_response(db, write.response):
            return "response"
        return "made"

    def _write_history(self, db: sqlite3.Connection, key: int, history: HistoryWrite) -> None:
        db.execute("DELETE FROM history WHERE key = ? AND start >= ?", (key, history.keep))
        start = history.keep
        for piece in history.pieces:
            db.execute("INSERT INTO history VALUES (?, ?, ?)", (key, start, piece))
            start += (len(piece) - SEAL) // 4

    def _remove_parts(self, db: sqlite3.Connection, key: int, tenant: str, id: str) -> None:
        db.execute("DELETE FROM bounds WHERE key = ?", (key,))
        db.execute("DELETE FROM history WHERE key = ?", (key,))
        db.execute("DELETE FROM pieces WHERE key IN (SELECT key FROM responses WHERE tenant = ? AND session = ?)", (tenant, id))
        db.execute("DELETE FROM responses WHERE tenant = ? AND session = ?", (tenant, id))

    def drop(self, tenant: str, id: str) -> None:
        """See Backend."""
        with self._transaction() as db:
            for (key,) in db.execute("DELETE FROM sessions WHERE tenant = ? AND id = ? RETURNING key", (tenant, id)).fetchall():
                self._remove_parts(db, key, tenant, id)

    def _fence(self, db: sqlite3.Connection) -> int:
        """A number that no lease of this store ever had: also not one of a session that was deleted."""
        return db.execute("UPDATE fences SET last = last + 1 RETURNING last").fetchone()[0]

    def take(self, tenant: str, id: str, owner: str, seconds: float) -> tuple[int | None, str | None, float]:
        """See Backend."""
        with self._synced("NORMAL") as db:
            row = db.execute("SELECT key, owner, until FROM sessions WHERE tenant = ? AND id = ?", (tenant, id)).fetchone()
            now = self.clock()
            if row is None:
                return None, None, 0.0
            if held(row[2], now):
                return None, row[1], row[2] - now
            fence = self._fence(db)
            db.execute("UPDATE sessions SET fence = ?, owner = ?, until = ? WHERE key = ?", (fence, owner, now + seconds, row[0]))
        return fence, owner, seconds

    def prolong(self, leases: Sequence[Lease]) -> Sequence[bool]:
        """See Backend."""
        alive = []
        with self._synced("NORMAL") as db:
            now = self.clock()
            for lease in leases:
                fence = lease.fence if lease.seconds else self._fence(db)  # given back: worth nothing from now on
                done = db.execute(
                    "UPDATE sessions SET until = ?, fence = ? WHERE tenant = ? AND id = ? AND fence = ?",
                    (now + lease.seconds if lease.seconds else 0.0, fence, lease.tenant, lease.id, lease.fence),
                )
                alive.append(done.rowcount == 1)
        return alive

    def read_blob(self, hash_: str) -> bytes | None:
        """See Backend."""
        for file, data in self._query("SELECT file, data FROM blobs WHERE hash = ?", hash_):
            return self._files.get(file) if file is not None else data
        return None

    def read_history(self, tenant: str, id: str) -> Sequence[bytes]:
        """See Backend."""
        rows = self._query(
            "SELECT ids FROM history WHERE key = (SELECT key FROM sessions WHERE tenant = ? AND id = ?) ORDER BY start",
            tenant,
            id,
        )
        return [ids for (ids,) in rows]

    # --- responses -----------------------------------------------------------------------------------------------

    def _write_response(self, db: sqlite3.Connection, write: ResponseWrite) -> bool:
        if write.head is None:
            if write.piece is None:
                statement = f"SELECT 1 FROM responses r WHERE tenant = ? AND id = ? AND {COUNT} = ?"
                return db.execute(statement, (write.tenant, write.id, write.at)).fetchone() is not None
            added = db.execute(
                f"INSERT INTO pieces SELECT key, ?, ? FROM responses r WHERE tenant = ? AND id = ? AND {COUNT} = ?",
                (write.at, write.piece, write.tenant, write.id, write.at),
            )
            return added.rowcount == 1
        row = db.execute(
            "UPDATE responses AS r SET count = ?, head = ?, expires = ?, running = ?, bytes = ? "
            f"WHERE tenant = ? AND id = ? AND {COUNT} = ? RETURNING key",
            (write.count, write.head, write.expires, write.running, len(write.head), write.tenant, write.id, write.at),
        ).fetchone()
        if row is None:
            return False
        db.execute("DELETE FROM pieces WHERE key = ?", row)
        return True

    def add_response(self, response: Response, head: bytes) -> str | None:
        """See Backend."""
        with self._transaction() as db:
            other = db.execute(
                "SELECT id FROM responses WHERE tenant = ? AND idempotency = ?", (response.tenant, response.key)
            ).fetchone() or db.execute(
                "SELECT id FROM responses WHERE tenant = ? AND id = ?", (response.tenant, response.id)
            ).fetchone()  # fmt: skip
            if other is not None:
                return other[0]
            db.execute(
                "INSERT INTO responses (tenant, id, session, idempotency, count, expires, running, bytes, head) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    response.tenant, response.id, response.session, response.key, len(response.ids), response.expires,
                    response.status == "running", len(head), head,
                ),
            )  # fmt: skip
        return None

    def load_response(self, tenant: str, id: str) -> ResponseRow | None:
        """See Backend."""
        with self._errors():
            db = self._db()
            db.execute("BEGIN")  # head and pieces of one moment
            try:
                row = db.execute("SELECT key, head FROM responses WHERE tenant = ? AND id = ?", (tenant, id)).fetchone()
                if row is None:
                    return None
                pieces = db.execute("SELECT ids FROM pieces WHERE key = ? ORDER BY start", (row[0],)).fetchall()
            finally:
                db.execute("COMMIT")
        return ResponseRow(row[1], [ids for (ids,) in pieces])

    def response_ids(self, tenant: str, session: str) -> Sequence[str]:
        """See Backend."""
        return [id for (id,) in self._query("SELECT id FROM responses WHERE tenant = ? AND session = ?", tenant, session)]

    def all_responses(self) -> Iterator[Key]:
        """See Backend."""
        yield from ((tenant, id) for tenant, id in self._query("SELECT tenant, id FROM responses"))

    def drop_response(self, tenant: str, id: str) -> None:
        """See Backend."""
        with self._transaction() as db:
            for row in db.execute("DELETE FROM responses WHERE tenant = ? AND id = ? RETURNING key", (tenant, id)).fetchall():
                db.execute("DELETE FROM pieces WHERE key = ?", row)

    def evict_responses(self, now: float, limit: int | None) -> tuple[int, int]:
        """See Backend."""
        with self._transaction() as db:
            leased = f"EXISTS (SELECT 1 FROM sessions s WHERE (s.tenant, s.id) = (r.tenant, r.session) AND {HELD})"
            rows = db.execute(
                f"SELECT key, tenant, bytes, expires, running FROM responses r WHERE NOT (running AND {leased}) ORDER BY expires",
                (now,),
            ).fetchall()

            def drop(row: tuple[int, int]) -> int:
                for table in ("responses", "pieces"):
                    db.execute(f"DELETE FROM {table} WHERE key = ?", row[:1])
                return row[1]

            expired = [drop((key, size)) for key, _, size, expires, _ in rows if expires <= now]
            count, freed = len(expired), sum(expired)
            if limit is not None:
                used = dict(db.execute("SELECT tenant, sum(bytes) FROM responses GROUP BY tenant").fetchall())
                left = ((tenant, (key, size)) for key, tenant, size, expires, running in rows if expires > now and not running)
                more, bytes_ = make_room(used, limit, left, drop)
                count, freed = count + more, freed + bytes_
        return count, freed

    # --- upkeep --------------------------------------------------------------------------------------------------

    def collect(self) -> int:
        """See Backend."""
        candidates = self._files.orphans({file for (file,) in self._query("SELECT file FROM blobs WHERE file IS NOT NULL")})
        self._files.remove(candidates)
        return len(candidates)

    def blobs(self) -> Iterator[tuple[str, int]]:
        """See Backend."""
        yield from ((hash_, refs) for hash_, refs in self._query("SELECT hash, refs FROM blobs"))

    def recount(self, hashes: Sequence[str], lower: bool) -> dict[str, tuple[int, int]]:
        """See Backend."""
        named: Counter[str] = Counter()
        differing: dict[str, tuple[int, int]] = {}
        with self._transaction() as db:
            for (bounds,) in db.execute("SELECT data FROM bounds JOIN sessions USING (key)"):
                with suppress(DamagedError):
                    named.update(records.named_snapshots(bounds))
            unit = _Unit(db, {}, {})
            for hash_ in hashes:
                for (counted,) in db.execute("SELECT refs FROM blobs WHERE hash = ?", (hash_,)).fetchall():
                    if counted != named[hash_]:
                        differing[hash_] = counted, named[hash_]
                        if lower or counted < named[hash_]:
                            unit.refer(hash_, named[hash_] - counted)
            self._files.touch(unit.freed)
        self._give_up(unit.freed, deleted=True)
        return differing

    def examine(self) -> Iterator[tuple[str, str]]:
        """See Backend."""
        for (line,) in self._query("PRAGMA integrity_check(20)"):
            if line != "ok":
                yield f"{self.path}: {line}", "the database file is damaged; restore a backup"

    def usage(self, tenant: str | None = None) -> Usage:
        """See SessionStore."""
        where, values = ("WHERE tenant = ?", (tenant,)) if tenant is not None else ("", ())
        sessions = self._query(f"SELECT count(*), coalesce(sum(bytes), 0) FROM sessions {where}", *values)[0]
        responses = self._query(f"SELECT count(*), coalesce(sum(bytes), 0) FROM responses {where}", *values)[0]
        return Usage(*sessions, *responses)


class _RefusedError(Exception):
    """One of several writes was refused."""


class _Unit:
    """One write's dealings with snapshots."""

    def __init__(self, db: sqlite3.Connection, brought: dict[str, bytes], names: dict[str, str]) -> None:
        self.db, self.brought, self.names = db, brought, names
        self.used: set[str] = set()
        self.freed: list[str] = []

    def refer(self, hash_: str, change: int) -> bool:
        """Count references; False if a snapshot that is referred to is neither here nor brought along."""
        row = self.db.execute("UPDATE blobs SET refs = refs + ? WHERE hash = ? RETURNING refs, file", (change, hash_)).fetchone()
        if row is None:
            if hash_ not in self.brought:
                return change < 0  # less than nothing: a damaged store must not stand in the way of removing things
            name, data = self.names.get(hash_), self.brought[hash_]
            self.db.execute("INSERT INTO blobs VALUES (?, ?, ?, ?, ?)", (hash_, change, len(data), name, None if name else data))
            if name is not None:
                self.used.add(name)
        elif row[0] <= 0:
            self.db.execute("DELETE FROM blobs WHERE hash = ?", (hash_,))
            if row[1] is not None:
                self.freed.append(row[1])
        return True
