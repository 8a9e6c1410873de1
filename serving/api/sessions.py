"""Routes of sessions: make, look at, feed, fork, take back, carry elsewhere, move to another model."""

import contextlib
import secrets
import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from serving.api import schemas
from serving.api.completions import ERRORS, STREAM, KeyHeader
from serving.api.errors import ApiError, as_api_error
from serving.api.http import EventStream, attended, event
from serving.api.plan import Plan
from serving.api.schemas import Name, SessionObject
from serving.api.service import Caller, Service
from serving.api.turns import Piece, Turn, aside, new_id
from serving.engine import Request as EngineRequest
from serving.sessions.errors import ExistsError, NotFoundError
from serving.sessions.records import ROW
from serving.sessions.store import Content, Session, Settings
from serving.sessions.store import Response as Stored

VersionQuery = Annotated[int | None, Query(ge=0, le=schemas.LARGEST, description="Refuse (409) unless the session is at it.")]
BINARY: dict[str, Any] = {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}
PIECE = 1 << 20
"""Bytes of an export that are sent at once."""
WHOLE_BODY = {"requestBody": {"required": True, **BINARY}}


def routes(service: Service) -> APIRouter:
    """The routes over a service."""
    router = APIRouter(prefix="/v1/sessions", tags=["sessions"], responses=ERRORS)
    store = service.store

    def shown(session: Session) -> SessionObject:
        served, settings = service.models.get(session.settings.model), session.settings
        return SessionObject(
            id=session.id, model=None if served is None else served.client.info.name, fingerprint=settings.model,
            version=session.version, position=session.position, turn=session.turn, boundary=session.boundary,
            tail=len(session.tail), retained=[list(pair) for pair in session.retained], bytes=session.bytes,
            busy=session.owner is not None, seed=settings.seed, sampling=dict(settings.sampling),
            keep_history=settings.keep_history, parent=session.parent,
            created=int(session.created), updated=int(session.updated),
            expires=None if session.expires is None else int(session.expires),
        )  # fmt: skip

    async def find(caller: Caller, id: str) -> Session:
        caller.facts["session"] = id
        return await aside(store.get, caller.tenant, id)

    @router.post("", status_code=201)
    async def create(request: Request, body: schemas.CreateSession) -> SessionObject:
        """A new session at position 0."""
        caller = service.caller(request)
        await service.admit(caller, 0)
        await service.check_room(caller, 1)
        info = service.model(body.model).client.info
        settings = Settings(
            info.fingerprint, info.tokenizer, info.segment, body.seed, body.sampling(), body.retain, body.keep_history, body.ttl
        )  # fmt: skip
        id = body.id or f"s-{secrets.token_hex(8)}"
        caller.facts["session"] = id
        return shown(await service.made(caller, await aside(store.create, caller.tenant, id, settings)))

    @router.get("")
    async def list_sessions(
        request: Request,
        after: Annotated[Name | None, Query(description="Those behind this one.")] = None,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    ) -> schemas.SessionList:
        """The tenant's sessions in order of their ids."""
        page = await aside(store.list, service.caller(request).tenant, after, limit)
        data = [shown(session) for session in page.sessions]
        return schemas.SessionList(data=data, has_more=page.next is not None, next=page.next)

    @router.get("/{id}")
    async def get(request: Request, id: Name) -> SessionObject:
        """A session."""
        return shown(await find(service.caller(request), id))

    @router.delete("/{id}")
    async def delete(request: Request, id: Name, expected_version: VersionQuery = None) -> schemas.Deleted:
        """Remove a session and its responses."""
        caller = service.caller(request)
        caller.facts["session"] = id
        await aside(store.delete, caller.tenant, id, expected_version)
        return schemas.Deleted(id=id)

    @router.post("/{id}/append", response_model=schemas.Appended, responses={200: STREAM})
    async def append(request: Request, id: Name, body: schemas.AppendRequest, idempotency_key: KeyHeader = None) -> Response:
        """Read text into a session without generating; as a stream, with progress."""
        caller = service.caller(request, idempotency_key)
        turn = await attended(request, _append(service, caller, id, body))
        if not body.stream:
            return JSONResponse(await attended(request, _read(turn)))
        first = await attended(request, anext(turn.pieces))
        return EventStream(_progress(turn, first), {}, lambda: service.metrics("pmi_disconnects"))

    @router.post("/{id}/fork", status_code=201)
    async def fork(request: Request, id: Name, body: schemas.ForkRequest) -> SessionObject:
        """A new session with the same past, sharing its snapshots."""
        caller = service.caller(request)
        await service.admit(caller, 0)
        await service.check_room(caller, 1)
        new = body.id or f"s-{secrets.token_hex(8)}"
        await find(caller, id)
        return shown(await service.made(caller, await aside(_fork, service, caller.tenant, id, new, body.position)))

    @router.post("/{id}/rollback")
    async def rollback(request: Request, id: Name, body: schemas.RollbackRequest) -> SessionObject:
        """Go back to a retained position: by default to the start of the last turn, to have it answered anew."""
        caller = service.caller(request)
        session = await find(caller, id)
        position = session.turn if body.position is None else body.position
        expected = session.version if body.expected_version is None else body.expected_version
        return shown(await aside(store.rollback, caller.tenant, id, position, expected))

    @router.get("/{id}/inspect")
    async def inspect(request: Request, response: Response, id: Name) -> dict[str, Any]:
        """A look into the memory: length of slots, gates, and what the last segment's tokens read."""
        caller = service.caller(request)
        session = await find(caller, id)
        found = await service.model_of(session).client.inspect(caller.tenant, id)
        response.headers.update(_place(found["version"], found["position"]))
        return found

    @router.get("/{id}/memory", response_class=Response, responses={200: BINARY})
    async def export(request: Request, id: Name) -> Response:
        """The whole session as one file (safetensors)."""
        from serving.sessions.files import dump_session

        caller = service.caller(request)
        caller.facts["session"] = id
        version, content = await aside(store.versioned, caller.tenant, id)
        data = await aside(dump_session, content)
        name = f"{id.replace(':', '_')}.safetensors"
        headers = {"Content-Disposition": f'attachment; filename="{name}"', "Content-Length": str(len(data))}
        headers |= _place(version, content.position)
        return StreamingResponse(_pieces(data), headers=headers, media_type="application/octet-stream")

    @router.put("/{id}/memory", openapi_extra=WHOLE_BODY)
    async def import_(request: Request, id: Name, expected_version: VersionQuery = None) -> SessionObject:
        """Make a session of an exported file, or replace one (then `expected_version` must be given)."""
        caller = service.caller(request)
        caller.facts["session"] = id
        await service.admit(caller, 0)
        data = await request.body()
        content = await _checked(service, data)
        try:
            session: Session | None = await aside(store.get, caller.tenant, id)
        except NotFoundError:
            session = None
        if session is None and expected_version is None:
            await service.check_room(caller, 1, ROW + len(data))
            return shown(await service.made(caller, await aside(store.restore, caller.tenant, id, content)))
        if expected_version is None:
            raise ExistsError(f"session {id!r} exists; give its version as expected_version to replace it")
        await service.check_room(caller, 0, ROW + len(data) - (0 if session is None else session.bytes))
        return shown(await aside(store.put_snapshot, caller.tenant, id, content, expected_version))

    @router.post("/{id}/migrate")
    async def migrate(request: Request, id: Name, body: schemas.MigrateRequest) -> SessionObject:
        """Read the kept history under another model. The session keeps its id."""
        caller = service.caller(request)
        session = await find(caller, id)
        return shown(await attended(request, _migrate(service, caller, session, body)))

    return router


def _place(version: int, position: int) -> dict[str, str]:
    return {"X-Session-Version": str(version), "X-Session-Position": str(position)}


async def _pieces(data: bytes) -> AsyncGenerator[bytes]:
    """A large answer in messages of a size that everything in between takes."""
    for start in range(0, len(data), PIECE):
        yield data[start : start + PIECE]  # bytes, not a view: Ray pickles it


async def _append(service: Service, caller: Caller, id: str, body: schemas.AppendRequest) -> Turn:
    caller.facts["session"] = id
    session = await aside(service.store.get, caller.tenant, id)
    return await service.append(caller, body, session)


async def _read(turn: Turn) -> dict[str, Any]:
    last: Piece | None = None
    async with contextlib.aclosing(turn.pieces) as pieces:
        async for piece in pieces:
            last = piece
    if last is None or last.mark is None:
        raise ApiError(503, "interrupted", "the engine has ended the response; send the request again", retry=1)
    return _appended(turn, last)


def _appended(turn: Turn, piece: Piece) -> dict[str, Any]:
    assert piece.mark is not None
    usage = {"prompt_tokens": piece.usage.prompt, "completion_tokens": 0, "total_tokens": piece.usage.prompt}
    mark = {"id": piece.mark.id, "version": piece.mark.version, "position": piece.mark.position}
    return {
        "object": "session.appended", "id": turn.id, "session": mark, "usage": usage | {"replayed_tokens": piece.usage.replayed}
    }  # fmt: skip


async def _progress(turn: Turn, first: Piece) -> AsyncGenerator[bytes]:
    try:
        async with contextlib.aclosing(turn.pieces) as pieces:
            piece: Piece | None = first
            while piece is not None:
                if piece.finish is None:
                    read = {"read": piece.usage.read, "total": piece.usage.prompt}
                    yield event({"object": "session.progress", "id": turn.id, **read}, f"{turn.id}:0")
                elif piece.mark is not None:
                    yield event(_appended(turn, piece), f"{turn.id}:0")
                piece = await anext(pieces, None)
        yield event("[DONE]")
    except Exception as error:
        body = as_api_error(error).body()
        body["error"]["resume"] = f"/v1/streams/{turn.id}"
        yield event(body)


def _fork(service: Service, tenant: str, id: str, new: str, position: int | None) -> Session:
    """Fork, and tell the new session which messages it has had."""
    store = service.store
    made = store.fork(tenant, id, new, position)
    said = service.turns.said(replace(made, id=id))
    if said is not None:
        found, plan = said[0], Plan.of(said[0])
        copied = replace(plan, stream=made.stream).parameters()
        store.begin(Stored(tenant, new_id("fork"), new, None, found.request, copied, found.start, found.ids, "done"))
    return made


async def _checked(service: Service, data: bytes) -> Content:
    """The session in a file, as its model's engine finds it."""
    problem: Exception | None = None
    for served in service.models.values():
        if served.client.info.fingerprint.encode() in data[: 1 << 20]:
            return await served.client.check(data)
    for served in service.models.values():
        try:
            return await served.client.check(data)
        except Exception as error:
            problem = problem or error
    raise problem or ApiError(503, "model_unavailable", "no model is served", retry=2)


async def _migrate(service: Service, caller: Caller, session: Session, body: schemas.MigrateRequest) -> Session:
    """Read the history into a session of the new model, then put that in place of the old one's content."""
    store, served = service.store, service.model(body.model)
    info = served.client.info
    version = session.version if body.expected_version is None else body.expected_version
    history = await aside(store.history, caller.tenant, session.id)
    if session.settings.tokenizer != info.tokenizer:
        raise ApiError(
            409, "tokenizer_differs",
            f"session {session.id!r} has ids of tokenizer {session.settings.tokenizer}, model {info.name} has {info.tokenizer}; "
            "`pmi sessions migrate` can translate them where both checkpoints are at hand",
        )  # fmt: skip
    await service.admit(caller, len(history))
    settings = replace(session.settings, model=info.fingerprint, segment=info.segment)
    part = f"migrating-{int(time.time())}-{secrets.token_hex(6)}"
    await aside(store.create, caller.tenant, part, settings)
    try:
        if len(history) > 1:
            request = EngineRequest(history[1:], 0, tenant=caller.tenant, session=part, text=False)  # BOS comes by itself
            async with contextlib.aclosing(served.client.generate(request)) as chunks:
                async for _ in chunks:
                    pass
        content = await aside(store.content, caller.tenant, part)
        return await aside(store.put_snapshot, caller.tenant, session.id, content, version)
    finally:
        with contextlib.suppress(Exception):
            await aside(store.delete, caller.tenant, part)
