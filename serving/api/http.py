"""HTTP itself: keys, bodies of bounded size in bounded time, request ids, logs, streams that notice when their reader leaves."""

import asyncio
import contextlib
import json
import logging
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.api.errors import ApiError, as_api_error
from serving.api.turns import new_id
from serving.auth import Tenant
from serving.config import HttpSettings, is_local

Result = TypeVar("Result")
KEEP_ALIVE = 15.0
"""Seconds of silence after which a comment keeps a stream's connection open."""
GONE = 499
"""Status, for logs and metrics only, of a client that has left."""
OPEN = ("/health", "/openapi.json", "/docs", "/docs/oauth2-redirect", "/metrics")
"""Paths that need no key."""
log = logging.getLogger("pmi.api")


class ClientGoneError(Exception):
    """Nobody is left to answer."""


class Front:
    """What every request passes first: an id, who asks, its body, and afterwards its line in the log."""

    def __init__(
        self, app: ASGIApp, tenant: Callable[[str | None], Tenant], count: Callable[..., None], settings: HttpSettings,
        local: bool, before_import: Callable[[Request, int], Awaitable[None]],
    ) -> None:  # fmt: skip
        """`local`: there are no keys, so only this machine may ask."""
        self.app, self.tenant, self.count, self.settings = app, tenant, count, settings
        self.local, self.before_import = local, before_import
        self._now, self._imports = 0, 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {key.decode("latin-1").lower(): value.decode("latin-1") for key, value in scope["headers"]}
        given = headers.get("x-request-id", "")
        id = given if re.fullmatch(r"[A-Za-z0-9_.:-]{1,64}", given) else new_id("req")
        state: dict[str, Any] = scope.setdefault("state", {})
        facts: dict[str, Any] = {"request": id, "method": scope["method"], "path": scope["path"]}
        state["facts"] = facts
        began, status = time.perf_counter(), 0
        state["began"] = began

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", []), (b"x-request-id", id.encode())]
            try:
                async with asyncio.timeout(self.settings.send_seconds):
                    await send(message)
            except TimeoutError as error:
                raise ClientGoneError from error

        self._now += 1
        try:
            try:
                ongoing = self.settings.ongoing
                if self._now > ongoing and scope["path"] not in OPEN:
                    raise ApiError(503, "service_overloaded", f"{ongoing} requests are under way here; try again later")
                if scope["path"] not in OPEN:
                    self._check_place(scope)
                    state["tenant"] = self.tenant(_bearer(headers))
                    facts["tenant"] = state["tenant"].id
                inner = await self._body(scope, headers, receive)
                await self.app(scope, inner, answer)
            except ClientGoneError:
                status = GONE
            except Exception as error:
                problem = as_api_error(error)
                if problem.code == "internal_error":
                    log.exception("failed", extra={"facts": facts})
                self.count("pmi_errors", 1.0, code=problem.code)
                if status:
                    raise  # too late for an answer; the connection is closed
                await error_response(problem)(scope, receive, answer)
        finally:
            self._now -= 1
            self._imports -= state.get("importing", 0)
            facts |= {"status": status, "seconds": round(time.perf_counter() - began, 4)}
            if scope["path"] not in OPEN:
                log.info("request", extra={"facts": facts})
                route = getattr(scope.get("route"), "path", "other")
                self.count("pmi_requests", 1.0, tenant=facts.get("tenant", "none"), route=route, status=str(status))

    def _check_place(self, scope: Scope) -> None:
        """403 for other machines where there are no keys: `http.host` is not where a cluster's proxy listens."""
        client = scope.get("client") or (None,)
        if self.local and not is_local(client[0]):
            raise ApiError(
                403, "no_keys", "this service has no API keys, so it answers its own machine only; make some with "
                "`pmi keys create` and give their file as `keys`",
            )  # fmt: skip

    def _check_imports(self, state: dict[str, Any], size: int) -> None:
        """503 for a large body while others are held in memory."""
        if size > self.settings.body_bytes and not state.get("importing"):
            if self._imports >= self.settings.imports:
                raise ApiError(503, "service_overloaded", f"{self._imports} large files are being imported; try again", retry=5)
            self._imports += 1
            state["importing"] = 1

    async def _body(self, scope: Scope, headers: dict[str, str], receive: Receive) -> Receive:
        """The body, read whole within its limits of size and time."""
        if scope["method"] in ("GET", "HEAD", "OPTIONS"):
            return receive
        imports = scope["method"] == "PUT" and scope["path"].endswith("/memory")
        limit = self.settings.import_bytes if imports else self.settings.body_bytes
        given = headers.get("content-length", "")
        length = int(given) if given.isdecimal() and len(given) < 20 else 0
        if length > limit:
            raise _too_large(limit)
        if imports:
            await self.before_import(Request(scope), length)
            self._check_imports(scope["state"], length)
        parts: list[bytes] = []
        size, more = 0, True
        try:
            async with asyncio.timeout(self.settings.body_seconds):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGoneError
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    more = message.get("more_body", False)
                    if size > limit:
                        raise _too_large(limit)
                    self._check_imports(scope["state"], size)
        except TimeoutError as error:
            seconds = self.settings.body_seconds
            raise ApiError(408, "slow_request", f"the request's body took longer than {seconds:g} s") from error
        body: bytes | None = b"".join(parts)

        async def replay() -> Message:
            nonlocal body
            if body is not None:
                given, body = body, None
                return {"type": "http.request", "body": given, "more_body": False}
            return await receive()

        return replay


def _bearer(headers: dict[str, str]) -> str | None:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" and key.strip() else None


def _too_large(limit: int) -> ApiError:
    return ApiError(413, "body_too_large", f"the request's body is larger than {limit:,} bytes; send it in parts (append)")


def error_response(error: ApiError) -> Response:
    """An error as the answer."""
    return JSONResponse(error.body(), error.status, error.headers())


async def attended(request: Request, work: Awaitable[Result]) -> Result:
    """The result of `work`, which is cancelled when the client leaves (ClientGoneError)."""
    task, left = asyncio.ensure_future(work), asyncio.ensure_future(_left(request.receive))
    try:
        await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        for each in (task, left):
            await _stopped(each)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _stopped(task: "asyncio.Future[Any]") -> None:
    task.cancel()
    with contextlib.suppress(BaseException):
        await task


class EventStream(Response):
    """Server-sent events, each on its way as soon as it is made; when the reader leaves, `events` is closed at once."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes], headers: dict[str, str], gone: Callable[[], None]) -> None:
        super().__init__(
            None, headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no", **headers}, media_type=self.media_type
        )
        self.raw_headers = [(key, value) for key, value in self.raw_headers if key != b"content-length"]
        self.events, self.gone = events, gone

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        self._sent = asyncio.get_running_loop().time()
        tasks = [asyncio.ensure_future(work) for work in (self._send(send), _left(receive), self._keep_alive(send))]
        sending = tasks[0]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        except ClientGoneError:  # it does not read
            self.gone()
            raise
        finally:
            if not sending.done():  # the reader has left, or the proxy has cancelled us because it did
                self.gone()
            for task in tasks:
                await _stopped(task)

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        loop = asyncio.get_running_loop()
        async with contextlib.aclosing(self.events) as events:
            async for event in events:
                self._sent = loop.time()
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _keep_alive(self, send: Send) -> None:
        """A comment whenever there was silence, so that nobody in between takes the connection for dead."""
        loop = asyncio.get_running_loop()
        while True:
            silence = loop.time() - self._sent
            await asyncio.sleep(KEEP_ALIVE - silence)
            if loop.time() - self._sent >= KEEP_ALIVE:
                self._sent = loop.time()
                await send({"type": "http.response.body", "body": b": still here\n\n", "more_body": True})


def event(data: dict[str, Any] | str, id: str | None = None) -> bytes:
    """One event."""
    # ASCII only: some clients take U+2028 and its like for the end of a line
    text = data if isinstance(data, str) else json.dumps(data, separators=(",", ":"))
    return (f"id: {id}\ndata: {text}\n\n" if id else f"data: {text}\n\n").encode()


class JsonLines(logging.Formatter):
    """Log lines as JSON: time, level, what happened, and its facts. Facts never hold text of users."""

    def format(self, record: logging.LogRecord) -> str:
        """See logging."""
        line = {"time": round(record.created, 3), "level": record.levelname.lower(), "event": record.getMessage()}
        line |= getattr(record, "facts", {})
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def set_up_logging(level: int = logging.INFO) -> None:
    """Structured lines on stderr, once per process."""
    if not log.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(JsonLines())
        log.addHandler(handler)
        log.propagate = False
    log.setLevel(level)
