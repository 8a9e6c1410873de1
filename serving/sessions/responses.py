"""Responses as stored bytes: a sealed head with ids, then sealed pieces of ids, which are folded into the head when it pauses."""

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from serving.sessions.errors import ConflictError
from serving.sessions.records import pack, seal, seal_json, unpack, unseal, unseal_json
from serving.sessions.store import Progress, Response

Item = TypeVar("Item")
FIELDS = ("session", "key", "request", "parameters", "start", "status", "detail", "created", "updated", "expires")


@dataclass(frozen=True)
class ResponseRow:
    """A response as a back end holds it."""

    head: bytes
    pieces: Sequence[bytes]


@dataclass(frozen=True)
class ResponseWrite:
    """More of a response; made only if it has `at` ids now."""

    tenant: str
    id: str
    at: int
    piece: bytes | None
    """Sealed ids to append, or None."""
    head: bytes | None
    """A new head that holds all ids: the pieces go. None: as it is."""
    count: int
    """Ids afterwards."""
    expires: float
    running: bool


def encode_response(response: Response) -> bytes:
    """The head, with all ids."""
    values: dict[str, Any] = {name: getattr(response, name) for name in FIELDS}
    return seal_json({**values, "parameters": dict(response.parameters), "detail": dict(response.detail)}, pack(response.ids))


def decode_response(tenant: str, id: str, row: ResponseRow) -> Response:
    """A response from its stored parts; DamagedError."""
    what = f"response {id!r}"
    about, ids = unseal_json(row.head, what)
    ids += b"".join(unseal(piece, what) for piece in row.pieces)
    return Response(tenant=tenant, id=id, ids=unpack(ids), **{name: about[name] for name in FIELDS})


def more(progress: Progress, tenant: str, expires: float) -> ResponseWrite:
    """More ids for a response that runs on: its head need not be read."""
    piece = seal(pack(progress.ids)) if progress.ids else None
    return ResponseWrite(tenant, progress.id, progress.at, piece, None, progress.at + len(progress.ids), expires, True)


def advance_response(response: Response, progress: Progress, now: float, ttl: float) -> ResponseWrite | None:
    """A response with its progress; None if that has been made already. ConflictError."""
    ids = tuple(progress.ids)
    if ids and response.ids[progress.at :] == ids and response.status == progress.status:
        return None
    if len(response.ids) != progress.at:
        raise ConflictError(
            f"response {progress.id!r}: ids behind {progress.at}, it has {len(response.ids)}; read it again", len(response.ids)
        )
    detail = response.detail if progress.detail is None else progress.detail
    made = replace(response, ids=response.ids + ids, status=progress.status, detail=detail, updated=now, expires=now + ttl)
    running = progress.status == "running"
    return ResponseWrite(
        response.tenant, response.id, progress.at, None, encode_response(made), len(made.ids), made.expires, running
    )


def make_room(
    used: Mapping[str, int], limit: int, waiting: Iterable[tuple[str, Item]], drop: Callable[[Item], int | None]
) -> tuple[int, int]:
    """Drop responses until all tenants together use no more than `limit`: always the first of the tenant that uses most.

    So one that fills the store pushes out its own only. `waiting`: (tenant, item), oldest first; `drop` says how many bytes
    that gave, None: it stays. The number dropped, and their bytes.
    """
    queues: defaultdict[str, deque[Item]] = defaultdict(deque)
    for tenant, item in waiting:
        queues[tenant].append(item)
    total, count, freed = sum(used.values()), 0, 0
    largest = [(-used.get(tenant, 0), tenant) for tenant in queues]
    heapq.heapify(largest)
    while largest and total - freed > limit:
        size, tenant = heapq.heappop(largest)
        given = drop(queues[tenant].popleft())
        if given is not None:
            count, freed, size = count + 1, freed + given, size + given
        if queues[tenant]:
            heapq.heappush(largest, (size, tenant))
    return count, freed
