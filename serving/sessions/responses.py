"""Responses as stored bytes: a sealed head with ids, then sealed pieces of ids, which are folded into the head when it pauses."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from serving.sessions.errors import ConflictError, NotFoundError
from serving.sessions.records import pack, seal, seal_json, unpack, unseal, unseal_json
from serving.sessions.store import Progress, Response

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


def next_write(
    response: Response | None, known_running: bool, tenant: str, progress: Progress, now: float, ttl: float
) -> ResponseWrite | None:
    """What a progress writes; None if that has been done already. `known_running`: no need to look at `response`.

    NotFoundError, ConflictError.
    """
    ids = tuple(progress.ids)
    end = progress.at + len(ids)
    if known_running and progress.status == "running" and progress.detail is None:
        return ResponseWrite(tenant, progress.id, progress.at, seal(pack(ids)) if ids else None, None, end, now + ttl, True)
    if response is None:
        raise NotFoundError(f"response {progress.id!r}: there is none (or it has expired)")
    if response.ids[progress.at :] == ids and ids and response.status == progress.status:
        return None
    if len(response.ids) != progress.at:
        raise ConflictError(
            f"response {progress.id!r}: ids behind {progress.at}, it has {len(response.ids)}; read it again", len(response.ids)
        )
    detail = response.detail if progress.detail is None else progress.detail
    made = replace(response, ids=response.ids + ids, status=progress.status, detail=detail, updated=now, expires=now + ttl)
    return ResponseWrite(
        tenant, progress.id, progress.at, None, encode_response(made), end, now + ttl, progress.status == "running"
    )
