"""A session as the store's own value, and all that can happen to it, as pure functions. Both back ends store what these give.

A record is split in two: the head (small, written at every commit: metadata and tail) and the boundaries (written when a snapshot
or a turn comes). Each is sealed: bytes that carry their own checksum. Ids are kept as little-endian int32.
"""

import hashlib
import json
import secrets
import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from serving.sessions.errors import ConflictError, DamagedError, InvalidError, NotRetainedError, StoreError
from serving.sessions.store import RECENT, Change, Content, Ids, Session, Settings

FORMAT = 2
"""Version of the encoding."""
SEAL = 8
"""Bytes of a seal."""
ROW = 4096
"""What a session's head is counted as: a page, whatever the tail holds just now."""
MAX_SAMPLING = 4096
MAX_RETAIN, MAX_TTL = 1024, 1e10
"""Old boundaries that a session may keep, and the seconds it may live unchanged."""
HEAD = struct.Struct("<HQQQdI")
"""Of a head: format, version, turn, boundary, time of the change, length of the origin."""


# --- bytes -----------------------------------------------------------------------------------------------------------


def pack(ids: Sequence[int]) -> bytes:
    """Ids as bytes; InvalidError if one is no id."""
    try:
        if min(ids, default=0) < 0:
            raise InvalidError(f"token id {min(ids)}: must be 0 or more")
        return struct.pack(f"<{len(ids)}i", *ids)
    except struct.error as error:
        raise InvalidError(f"token ids must be whole numbers below 2^31 ({error})") from error


def unpack(data: bytes) -> Ids:
    """Bytes as ids."""
    return tuple(np.frombuffer(data, "<i4").tolist())


def seal(data: bytes) -> bytes:
    """`data` behind its checksum."""
    return hashlib.blake2b(data, digest_size=SEAL).digest() + data


def unseal(data: bytes | None, what: str) -> bytes:
    """What was sealed; DamagedError if a bit of it changed."""
    if not isinstance(data, bytes) or hashlib.blake2b(data[SEAL:], digest_size=SEAL).digest() != data[:SEAL]:
        raise DamagedError(f"{what}: stored bytes do not match their checksum; restore it from an export or a backup")
    return data[SEAL:]


def seal_json(value: Mapping[str, Any], rest: bytes) -> bytes:
    """A mapping and bytes behind it, sealed."""
    text = json.dumps(value, separators=(",", ":")).encode()
    return seal(struct.pack("<I", len(text)) + text + rest)


def unseal_json(data: bytes | None, what: str) -> tuple[dict[str, Any], bytes]:
    """The reverse of `seal_json`."""
    plain = unseal(data, what)
    length = struct.unpack_from("<I", plain)[0]
    return json.loads(plain[4 : 4 + length]), plain[4 + length :]


def new_stream() -> int:
    """A number for a new random stream."""
    return secrets.randbits(62)


# --- the record ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Boundary:
    """A retained boundary: its snapshot, the ids before it, and those behind it that can be gone back to."""

    position: int
    snapshot: str | None
    size: int
    recent: bytes
    ids: bytes = b""  # of the present boundary: empty, they are the tail

    def last(self) -> int:
        """The last position that can be gone back to from here."""
        return self.position + len(self.ids) // 4


@dataclass(frozen=True)
class HistoryWrite:
    """Keep the first `keep` ids of the history, then append sealed pieces. Pieces end at boundaries, and so do cuts."""

    keep: int
    pieces: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class Origin:
    """What of a session hardly ever changes."""

    settings: Settings
    stream: int
    parent: str | None
    created: float

    @cached_property
    def encoded(self) -> bytes:
        """As JSON; made once, not at every commit."""
        values = {**vars(self.settings), "sampling": dict(self.settings.sampling)}
        about = {"settings": values, "stream": self.stream, "parent": self.parent, "created": self.created}
        return json.dumps(about, separators=(",", ":")).encode()


@dataclass(frozen=True)
class Record:
    """Everything of a session but lease and snapshot bytes."""

    origin: Origin
    version: int
    turn: int
    updated: float
    tail: bytes
    boundaries: tuple[Boundary, ...]  # rising; the last one is present

    @property
    def settings(self) -> Settings:
        """What it was created with."""
        return self.origin.settings

    @property
    def boundary(self) -> int:
        """Position of the present snapshot."""
        return self.boundaries[-1].position

    @property
    def position(self) -> int:
        """Ids read so far."""
        return self.boundary + len(self.tail) // 4

    @property
    def stored(self) -> int:
        """Bytes it counts as; changes with snapshots only, so that the books are not rewritten at every token."""
        kept = sum(x.size + len(x.recent) + len(x.ids) for x in self.boundaries)
        return ROW + kept + (4 * self.boundary if self.settings.keep_history else 0)

    def snapshots(self) -> Counter[str]:
        """How often it refers to each snapshot."""
        return Counter(x.snapshot for x in self.boundaries if x.snapshot is not None)

    def expires(self, default: float | None) -> float | None:
        """When it may be evicted."""
        ttl = default if self.settings.ttl is None else self.settings.ttl
        return None if ttl is None else self.updated + ttl

    def head(self) -> bytes:
        """The small part, sealed."""
        about = self.origin.encoded
        fixed = HEAD.pack(FORMAT, self.version, self.turn, self.boundary, self.updated, len(about))
        return seal(fixed + about + self.tail)

    def bounds(self) -> bytes:
        """The boundaries, sealed."""
        about = [{**asdict(x), "recent": len(x.recent), "ids": len(x.ids)} for x in self.boundaries]
        return seal_json({"boundaries": about}, b"".join(x.recent + x.ids for x in self.boundaries))

    def session(self, tenant: str, id: str, owner: str | None, default_ttl: float | None) -> Session:
        """As callers see it."""
        present = self.boundaries[-1]
        return Session(
            tenant=tenant, id=id, settings=self.settings, version=self.version, position=self.position, turn=self.turn,
            boundary=present.position, snapshot=present.snapshot, recent=unpack(present.recent), tail=unpack(self.tail),
            retained=retained(self), stream=self.origin.stream, parent=self.origin.parent, created=self.origin.created,
            updated=self.updated,
            expires=self.expires(default_ttl), bytes=self.stored, owner=owner,
        )  # fmt: skip


def named_snapshots(bounds: bytes | None) -> Counter[str]:
    """How often a session refers to each snapshot, by its boundaries alone: its head may be damaged. DamagedError."""
    listed, _ = unseal_json(bounds, "boundaries")
    return Counter(x["snapshot"] for x in listed["boundaries"] if x["snapshot"] is not None)


def decode(head: bytes | None, bounds: bytes | None, what: str) -> Record:
    """A record from its two sealed parts; DamagedError."""
    plain = unseal(head, what)
    format_, version, turn, boundary, updated, length = HEAD.unpack_from(plain)
    if format_ != FORMAT:
        raise DamagedError(f"{what}: written in format {format_}, this version reads {FORMAT}; use the version that wrote it")
    about = json.loads(plain[HEAD.size : HEAD.size + length])
    listed, rest = unseal_json(bounds, f"{what} (boundaries)")
    boundaries, place = [], 0
    for item in listed["boundaries"]:
        middle = place + item["recent"]
        end = middle + item["ids"]
        boundaries.append(Boundary(item["position"], item["snapshot"], item["size"], rest[place:middle], rest[middle:end]))
        place = end
    if not boundaries or boundaries[-1].position != boundary:
        raise DamagedError(f"{what}: its two parts are not of one version; restore it from an export or a backup")
    origin = Origin(Settings(**about["settings"]), about["stream"], about["parent"], about["created"])
    return Record(origin, version, turn, updated, plain[HEAD.size + length :], tuple(boundaries))


# --- what can happen to it -------------------------------------------------------------------------------------------


def new_record(settings: Settings, now: float) -> Record:
    """A session at position 0."""
    check_settings(settings)
    start = Boundary(0, None, 0, b"")
    return Record(Origin(settings, new_stream(), None, now), 1, 0, now, b"", (start,))


def from_content(content: Content, now: float, old: Record | None = None) -> tuple[Record, HistoryWrite | None]:
    """A session with the given content: new, or in place of `old`'s."""
    check_content(content)
    digest = None if content.snapshot is None else snapshot_hash(content.snapshot)
    size = len(content.snapshot or b"")
    boundary = Boundary(content.boundary, digest, size, pack(content.recent))
    origin = Origin(content.settings, new_stream(), None, now if old is None else old.origin.created)
    version = 1 if old is None else old.version + 1
    made = Record(origin, version, content.position, now, pack(content.tail), (boundary,))
    if content.history is not None:
        return made, HistoryWrite(0, (seal(pack(content.history[: content.boundary])),) if content.boundary else ())
    return made, HistoryWrite(0) if old is not None and old.settings.keep_history else None


def snapshot_hash(data: bytes, body: bytes | None = None) -> str:
    """The address of a snapshot: the hash of its header and of the hash of its body, which is what follows the header.

    A snapshot's checksum is made from the same hash, so that one pass over the bytes serves both. `body`: that hash, if known.
    """
    header = 8 + int.from_bytes(data[:8], "little")
    if body is None:
        body = hashlib.sha256(memoryview(data)[header:]).digest()
    digest = hashlib.sha256(memoryview(data)[:header])
    digest.update(body)
    return digest.hexdigest()


def check_place(record: Record, change: Change) -> None:
    """ConflictError unless the change is for the session as it is."""
    if change.expected_version is not None and change.expected_version != record.version:
        raise ConflictError(
            f"version {change.expected_version} was expected, the session is at {record.version}; read it again", record.version
        )
    if change.at != record.position:
        raise ConflictError(f"ids for position {change.at}, the session is at {record.position}; read it again", record.position)


def advance(record: Record, change: Change, now: float) -> tuple[Record, HistoryWrite | None]:
    """The session after a change whose place has been checked; InvalidError."""
    present = record.boundaries[-1]
    tail = record.tail + pack(change.ids)
    turn = record.position if change.turn else record.turn
    boundaries, history = record.boundaries, None
    if change.snapshot is not None:
        place, end = change.snapshot.position, present.position + len(tail) // 4
        if not present.position < place < end or place % record.settings.segment:
            raise InvalidError(
                f"a snapshot at {place}: must be a multiple of the segment {record.settings.segment}, "
                f"above the present boundary {present.position} and below position {end} (the newest id stays in the tail)"
            )
        cut = 4 * (place - present.position)
        closed = replace(present, ids=tail[:cut])
        recent = (present.recent + closed.ids)[-4 * RECENT :]
        data = change.snapshot.data
        address = snapshot_hash(data, change.snapshot.body)
        boundaries = (*boundaries[:-1], closed, Boundary(place, address, len(data), recent))
        tail = tail[cut:]
        if record.settings.keep_history:
            history = HistoryWrite(present.position, (seal(closed.ids),))
    if change.turn or change.snapshot is not None:
        boundaries = _prune(boundaries, turn, record.settings.retain)
    return Record(record.origin, record.version + 1, turn, now, tail, boundaries), history


def applied(record: Record, change: Change) -> bool:
    """Whether the change has already been made: its writer, who alone holds the lease, commits it a second time."""
    if not change.ids or record.position != change.at + len(change.ids):
        return False
    ids = pack(change.ids)
    visible = ids[-len(record.tail) :] if record.tail else b""
    return (
        record.tail.endswith(visible)
        and (change.expected_version is None or record.version == change.expected_version + 1)
        and (change.snapshot is None or record.boundary == change.snapshot.position)
    )


def back_to(record: Record, position: int, now: float) -> tuple[Record, HistoryWrite | None]:
    """The session as it was at a retained position, under a new version; NotRetainedError."""
    spans = retained(record)
    if not any(first <= position <= last for first, last in spans):
        shown = ", ".join(f"{first}..{last}" if first < last else str(first) for first, last in spans)
        raise NotRetainedError(f"position {position} is not retained; these are: {shown}")
    place = max(i for i, x in enumerate(record.boundaries) if x.position < position or position == x.position == 0)
    chosen = record.boundaries[place]
    ids = record.tail if place == len(record.boundaries) - 1 else chosen.ids
    tail = ids[: 4 * (position - chosen.position)]
    turn = min(record.turn, position)
    boundaries = _prune((*record.boundaries[:place], replace(chosen, ids=b"")), turn, record.settings.retain)
    history = None
    if record.settings.keep_history and chosen.position < record.boundary:
        history = HistoryWrite(chosen.position)
    origin = replace(record.origin, stream=new_stream())
    made = replace(record, origin=origin, version=record.version + 1, turn=turn, updated=now, tail=tail, boundaries=boundaries)
    return made, history


def retained(record: Record) -> tuple[tuple[int, int], ...]:
    """The positions that can be gone back to, as ranges."""
    spans: list[tuple[int, int]] = []
    for i, x in enumerate(record.boundaries):
        last = record.position if i == len(record.boundaries) - 1 else x.last()
        first = x.position + (x.position > 0)
        if last < first:
            continue
        if spans and spans[-1][1] + 1 >= first:
            first = spans.pop()[0]
        spans.append((first, last))
    return tuple(spans)


def forked(record: Record, parent: str, now: float) -> Record:
    """The first version of a session with the same past."""
    return replace(record, origin=Origin(record.settings, new_stream(), parent, now), version=1, updated=now)


def first_pieces(pieces: Sequence[bytes], count: int) -> tuple[bytes, ...]:
    """The sealed pieces of a history that hold its first `count` ids."""
    kept, total = [], 0
    for piece in pieces:
        if total >= count:
            break
        kept.append(piece)
        total += (len(piece) - SEAL) // 4
    return tuple(kept)


def _prune(boundaries: tuple[Boundary, ...], turn: int, retain: int) -> tuple[Boundary, ...]:
    """The present boundary, `retain` before it, and of the one that the turn started from what leads up to the turn."""
    kept = len(boundaries) - 1 - retain
    if kept <= 0:
        return boundaries
    anchors = [i for i, x in enumerate(boundaries) if x.position < turn or turn == x.position == 0]
    if not anchors or anchors[-1] >= kept:
        return boundaries[kept:]
    anchor = boundaries[anchors[-1]]
    return (replace(anchor, ids=anchor.ids[: 4 * (turn - anchor.position)]), *boundaries[kept:])


# --- checks ----------------------------------------------------------------------------------------------------------


def check_settings(settings: Settings) -> None:
    """InvalidError with every problem."""
    problems = []
    if settings.segment < 1:
        problems.append(f"segment {settings.segment}: must be at least 1")
    if not 0 <= settings.retain <= MAX_RETAIN:
        problems.append(f"retain {settings.retain}: must be in 0..{MAX_RETAIN}")
    if not 0 <= settings.seed < 2**63:
        problems.append(f"seed {settings.seed}: must be in 0..2^63-1")
    if settings.ttl is not None and not 0 < settings.ttl <= MAX_TTL:
        problems.append(f"ttl {settings.ttl}: must be seconds, more than 0 and at most {MAX_TTL:g}")
    for name in ("model", "tokenizer"):
        if not 0 < len(getattr(settings, name)) <= 128:
            problems.append(f"{name} {getattr(settings, name)[:40]!r}: must be a fingerprint of 1 to 128 characters")
    try:
        size = len(json.dumps(dict(settings.sampling), allow_nan=False))
        if size > MAX_SAMPLING:
            problems.append(f"sampling: {size} bytes as JSON; at most {MAX_SAMPLING}")
        if not _flat(dict(settings.sampling), 2):
            problems.append("sampling: values must be plain, or lists or mappings of plain values")
    except (TypeError, ValueError, RecursionError) as error:
        problems.append(f"sampling: not JSON ({error})")
    if problems:
        raise InvalidError(problems)


def _flat(value: Any, depth: int) -> bool:
    """Whether containers are nested no deeper than `depth`."""
    if isinstance(value, dict | list | tuple):
        parts = value.values() if isinstance(value, dict) else value
        return depth > 0 and all(_flat(part, depth - 1) for part in parts)
    return True


def check_content(content: Content) -> None:
    """InvalidError with every problem."""
    check_settings(content.settings)
    problems = []
    if content.boundary < 0 or content.boundary % content.settings.segment:
        problems.append(f"boundary {content.boundary}: must be a multiple of the segment {content.settings.segment}")
    if (content.boundary == 0) != (content.snapshot is None):
        problems.append(f"boundary {content.boundary}: a snapshot belongs to every boundary but 0")
    if content.boundary and not content.tail:
        problems.append("the tail is empty: the newest id must be in it")
    if len(content.recent) != min(RECENT, content.boundary):
        problems.append(f"{len(content.recent)} recent ids: must be {min(RECENT, content.boundary)}")
    if content.settings.keep_history != (content.history is not None):
        problems.append("the history must come if, and only if, keep_history is set")
    elif content.history is not None and (
        len(content.history) != content.position
        or content.history[content.boundary :] != content.tail
        or content.history[max(0, content.boundary - RECENT) : content.boundary] != content.recent
    ):
        problems.append("the history does not end in the recent ids and the tail")
    if problems:
        raise InvalidError(problems)


def refusal(error: StoreError, where: str) -> StoreError:
    """The same error, naming the session it is about."""
    error.problems = [f"{where}: {problem}" for problem in error.problems]
    error.args = ("\n".join(error.problems),)
    return error
