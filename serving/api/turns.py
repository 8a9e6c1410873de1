"""Turns: each applied once, each resumable by anyone from the store, whatever dies meanwhile.

`start` registers a response and generates; `follow` hands out a response from any token on: what is stored, then, if nobody
works on it any more, the rest. A retry, a reconnect and the failover from a dead engine are all `follow`.
"""

import asyncio
import contextlib
import hashlib
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from lm.data.tokenizer import Tokenizer
from serving.api.engines import EngineClient
from serving.api.errors import ApiError
from serving.api.plan import Plan, Text, answer, continuation, place
from serving.engine import EngineStoppedError, QueueFullError, Request, Usage
from serving.engine.request import Logprobs
from serving.sessions.base import BaseStore
from serving.sessions.errors import BusyError, ConflictError, InvalidError, NotFoundError, StoreError
from serving.sessions.store import Response, Session

Result = TypeVar("Result")
POLL = 0.05
"""Seconds between looks at a response that someone else works on."""
GRACE = 10.0
"""Seconds after which a response that nobody has begun is taken over."""
PATIENCE = 30.0
"""Seconds without any progress after which a stream gives up looking for a living engine."""
RETRY_INTERRUPTED, RETRY_FINISHED = 600.0, 60.0
"""For how long after its end a response may be what a retry without a key asks for again. While it runs, always."""
LOOK_BACK = 16
"""Responses among which the one that a session ends with is looked for."""
NOTHING_APPLIED = (BusyError, ConflictError, NotFoundError, InvalidError, QueueFullError)


class EngineLostError(Exception):
    """The engine's process has died, or cannot be reached."""


@dataclass(frozen=True)
class Served:
    """A model that can be asked."""

    client: EngineClient
    tokenizer: Tokenizer
    open: bool = True
    """Whether it takes new texts, or only goes on with its sessions."""


@dataclass(frozen=True)
class Mark:
    """Where a session stands."""

    id: str
    version: int | None
    position: int


@dataclass(frozen=True)
class Piece:
    """Some of an answer."""

    text: str
    count: int
    """Tokens of the answer up to here."""
    usage: Usage
    ids: tuple[int, ...] = ()
    logprobs: tuple[Logprobs, ...] = ()
    finish: str | None = None
    mark: Mark | None = None
    """The session, once it is finished."""
    reading: bool = False
    """Nothing yet: only how far the prompt is read."""


@dataclass(frozen=True)
class Attempt:
    """How a request came."""

    tenant: str
    digest: str
    """Hash of what it asks."""
    key: str | None = None
    """Idempotency key."""
    retry: bool = False
    """The client says that it has sent it before."""


@dataclass
class Turn:
    """A turn under way: its pieces, and what to call it."""

    id: str
    model: str
    pieces: AsyncGenerator[Piece]
    plan: Plan
    session: str | None
    resumable: bool
    joined: bool = False
    """It had been started by an earlier request."""
    had: int = 0
    """Tokens that the response had before this request."""
    left: int = 0
    """Most tokens that may still be made."""


def new_id(prefix: str, key: str | None = None) -> str:
    """An id whose order is that of time, and whose end is that of the idempotency key where there is one."""
    return f"{prefix}-{time.time_ns():016x}{'-' + secrets.token_hex(4) if key is None else _mark_of(key)}"


def _mark_of(key: str) -> str:
    return "-" + hashlib.sha256(key.encode()).hexdigest()[:24]


class Turns:
    """All turns of one ingress, over the store and the served models (by fingerprint)."""

    def __init__(
        self, store: BaseStore, models: Mapping[str, Served], lease: float = 4.0, note: Callable[[str], None] = lambda _: None
    ) -> None:
        self.store, self.models, self.lease, self.note = store, models, lease, note

    async def start(self, plan: Plan, session: Session | None, attempt: Attempt, record: bool, **options: Any) -> Turn:
        """Begin a turn, or join the one that an earlier request began. `record`: keep the answer (with a session, always)."""
        if session is not None:
            plan = place(plan, session)
        fresh = Response(
            attempt.tenant, new_id(PREFIX[plan.kind], attempt.key), None if session is None else session.id, attempt.key,
            attempt.digest, plan.parameters(), plan.start,
        )  # fmt: skip
        if not (record or session is not None or attempt.key is not None):
            pieces = self._generate(plan, attempt.tenant, None, None, **options)
            return Turn(fresh.id, plan.model, pieces, plan, None, resumable=False, left=plan.tokens)
        found, new = await aside(self.store.begin, fresh)
        if not new:
            return self.join(found)
        pieces = self._new(plan, found, **options)
        return Turn(found.id, plan.model, pieces, plan, found.session, resumable=True, left=plan.tokens)

    def known(self, session: Session, attempt: Attempt) -> Response | None:
        """The response of an earlier request that this one repeats: by its key, or as the retry that the client says it is."""
        ids = self._ids(session)
        if attempt.key is not None:
            ids = [id for id in ids if id.endswith(_mark_of(attempt.key))]
        for id in ids[:LOOK_BACK]:
            found = self._load(session, id)
            if found is None or found.request != attempt.digest or found.key != attempt.key:
                continue
            if attempt.key is None and found.status != "running":
                age = RETRY_FINISHED if found.status == "done" else RETRY_INTERRUPTED
                if time.time() - found.updated > age:
                    continue
            return found
        return None

    def join(self, response: Response) -> Turn:
        """A turn that an earlier request has started, from its beginning."""
        self.note("pmi_joined")
        return self.resume(response, 0)

    def resume(self, response: Response, at: int) -> Turn:
        """A turn behind its token `at`."""
        plan, had = Plan.of(response), len(response.ids)
        left = 0 if response.status == "done" else plan.tokens - had
        pieces = self.follow(response.tenant, response.id, at)
        return Turn(response.id, plan.model, pieces, plan, response.session, True, True, had, left)

    def _ids(self, session: Session) -> list[str]:
        """A session's responses, newest first."""
        ids = self.store.response_ids(session.tenant, session.id)
        return sorted(ids, key=lambda id: id.split("-")[1:2], reverse=True)

    def _load(self, session: Session, id: str) -> Response | None:
        try:
            return self.store.response(session.tenant, id)
        except NotFoundError:
            return None

    def said(self, session: Session) -> tuple[Response, str, str | None] | None:
        """The response that the session ends with, its text and what stopped it."""
        served = self.models.get(session.settings.model)
        for id in self._ids(session)[:LOOK_BACK]:
            found = self._load(session, id)
            # the newest that ended here: later ones were taken back
            if found is not None and served is not None and Plan.of(found).start + len(found.ids) == session.position:
                return found, *answer(served.tokenizer, found)
        return None

    # --- generating --------------------------------------------------------------------------------------------

    async def _new(self, plan: Plan, response: Response, **options: Any) -> AsyncGenerator[Piece]:
        """A turn that has just been registered. If nothing of it could be applied, its key is free again."""
        count, over = 0, False
        try:
            generated = self._generate(plan, response.tenant, response.session, response.id, **options)
            async with contextlib.aclosing(generated) as pieces:
                async for piece in pieces:
                    count = piece.count
                    yield piece
            over = True
            return
        except (EngineLostError, EngineStoppedError):
            over = True
            self.note("pmi_failovers")
        except (ApiError, StoreError, QueueFullError) as error:
            over = True
            if count:
                raise
            taken = isinstance(error, BusyError | ConflictError) and time.time() - response.created > GRACE
            if not taken and not await aside(self._begun, response, plan):
                await aside(self.store.drop_response, response.tenant, response.id)
                raise
            if not isinstance(error, NOTHING_APPLIED):
                raise
        finally:
            if not over and not count:  # the reader has left before the first token: if it was waiting for a lane, forget it
                asyncio.get_running_loop().run_in_executor(None, self._abandon, response, plan)
        async with contextlib.aclosing(self.follow(response.tenant, response.id, count)) as pieces:
            async for piece in pieces:
                yield piece

    def _begun(self, response: Response, plan: Plan) -> bool:
        """Whether anything of this response has been applied."""
        try:
            if self.store.response(response.tenant, response.id).ids:
                return True
            if response.session is None:
                return False
            session = self.store.get(response.tenant, response.session)
        except NotFoundError:
            return False
        return session.version != plan.version and self._left(response, session) is not None

    def _abandon(self, response: Response, plan: Plan) -> None:
        with contextlib.suppress(StoreError):
            if not self._begun(response, plan):
                self.store.drop_response(response.tenant, response.id)

    def _left(self, response: Response, session: Session) -> Request | None:
        """What is left of a session's response; None where it cannot go on."""
        request = continuation(response, session)
        plan = Plan.of(response)
        if request is None or response.ids or session.version == plan.version:
            return request
        # nothing of it is written yet, but the session has moved: it is not ours if another response has been applied there
        for id in self._ids(session)[:LOOK_BACK]:
            other = self._load(session, id) if id != response.id else None
            if other is not None and (other.ids or other.status == "done"):
                theirs = Plan.of(other)
                if (theirs.turn, theirs.stream) == (plan.turn, plan.stream):
                    return None
        return request

    async def _generate(
        self, plan: Plan, tenant: str, session: str | None, response: str | None, **options: Any
    ) -> AsyncGenerator[Piece]:
        served = self.models.get(plan.model)
        if served is None:
            raise ApiError(503, "model_unavailable", f"model {plan.model} is not served any more", retry=2)
        progress = bool(options.pop("progress", False))
        request = replace(plan.request(tenant, session, response), **options)
        try:
            async with contextlib.aclosing(served.client.generate(request, progress)) as chunks:
                async for chunk in chunks:
                    yield _piece(chunk, session, 0, plan)
        except EngineLostError as error:
            if response is not None:
                raise
            raise ApiError(503, "engine_lost", "the engine was lost; nothing was kept, send the request again") from error

    async def follow(self, tenant: str, id: str, at: int) -> AsyncGenerator[Piece]:
        """A response from token `at` on: what is stored, then the rest. ApiError where it cannot go on."""
        count, seen, since = at, -1, time.monotonic()
        text: Text | None = None
        plan: Plan | None = None
        while True:
            response = await aside(self.store.response, tenant, id)
            plan = plan or Plan.of(response)
            served = self.models.get(plan.model)
            if served is None:
                raise _closed(response, "its model is not served any more")
            if response.status in ("failed", "closed"):
                raise _closed(response, "it was given up")
            if at > len(response.ids):
                raise ApiError(400, "invalid_value", f"Last-Event-ID {id}:{at}: the response has {len(response.ids)} tokens")
            if text is None:
                text = Text(served.tokenizer, plan, response.ids[:count])
            new, count = response.ids[count:], len(response.ids)
            done = response.status == "done"
            written = text.feed(new, done)
            if done:
                yield await aside(self._last, response, plan, written, new, text.stream.stopped)
                return
            if new:
                yield Piece(written, count, _usage(plan, count), new)
            if count != seen:
                seen, since = count, time.monotonic()
            request = await aside(self._takeover, response, plan, since)
            if request is not None:
                text = None  # from here on the engine makes it
                try:
                    async with contextlib.aclosing(served.client.generate(request)) as chunks:
                        async for chunk in chunks:
                            piece = _piece(chunk, response.session, count, plan)
                            count = piece.count
                            yield piece
                            if piece.finish is not None:
                                return
                except (BusyError, ConflictError):
                    pass  # someone else does it
                except (EngineLostError, EngineStoppedError) as error:
                    self.note("pmi_failovers")
                    if time.monotonic() - since > PATIENCE:
                        raise ApiError(503, "engine_lost", f"no engine answers ({error}); resume the response later") from error
            await asyncio.sleep(POLL)

    def _takeover(self, response: Response, plan: Plan, since: float) -> Request | None:
        """What is left to do, if nobody does it."""
        session = None
        if response.session is not None:
            try:
                session = self.store.get(response.tenant, response.session)
            except NotFoundError as error:
                raise _closed(response, "its session is gone") from error
            if session.owner is not None:
                return None
        request = continuation(response, None) if session is None else self._left(response, session)
        if request is None:
            if response.status == "running" and time.monotonic() - since < 2 * self.lease:
                return None  # perhaps only read between two writes
            raise _closed(response, "its session has gone on with another turn")
        if response.status == "running":
            begun = session is not None and session.version != plan.version
            patience = self.lease if begun or session is None else GRACE
            # under a lease, an owner that is gone is dead; before, it may be waiting for a lane
            if not (begun and session is not None) and time.monotonic() - since < patience:
                return None
        return request

    def _last(self, response: Response, plan: Plan, text: str, new: tuple[int, ...], stopped: str | None) -> Piece:
        finish = "stop" if stopped is not None else "length"
        mark = None
        if response.session is not None:
            end, version = plan.start + len(response.ids), None
            with contextlib.suppress(NotFoundError):
                session = self.store.get(response.tenant, response.session)
                if (session.stream, session.turn, session.position) == (plan.stream, plan.turn, end):
                    version = session.version
            mark = Mark(response.session, version, end)
        count = len(response.ids)
        return Piece(text, count, _usage(plan, count), new, finish=finish, mark=mark)


PREFIX = {"completion": "cmpl", "chat": "chatcmpl", "append": "append"}


def _piece(chunk: Any, session: str | None, before: int, plan: Plan) -> Piece:
    """`before`: tokens that the response had before this request."""
    event, usage = chunk.event, replace(chunk.usage, prompt=plan.start - plan.turn)
    if event is None:
        return Piece("", before, usage, reading=True)
    count = event.position + len(event.ids) - plan.start if plan.tokens else 0
    mark = Mark(session, usage.version, plan.start + count) if event.finish is not None and session is not None else None
    if event.finish in ("cancelled", "deadline"):
        raise ApiError(503, "interrupted", "the engine has ended the response; resume it", retry=1)
    return Piece(event.text, count, usage, event.ids, event.logprobs, event.finish, mark)


def _usage(plan: Plan, count: int) -> Usage:
    return Usage(plan.turn, plan.start - plan.turn, plan.start - plan.turn, 0, count, plan.sampling.seed, plan.stream)


def _closed(response: Response, why: str) -> ApiError:
    return ApiError(
        409, "response_closed", f"response {response.id!r} ended after {len(response.ids)} tokens and cannot go on: {why}"
    )


async def aside(function: Callable[..., Result], *args: Any) -> Result:
    """Run what may block in a thread."""
    return await asyncio.get_running_loop().run_in_executor(None, partial(function, *args))
