"""Routes of OpenAI: models, completions, chat completions, and the streams that can be resumed."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from typing import Annotated, Any

from fastapi import APIRouter, Header, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from serving.api import schemas
from serving.api.errors import ApiError, as_api_error
from serving.api.http import EventStream, attended, event
from serving.api.schemas import ChatRequest, CompletionRequest, ModelList, ModelObject, Name
from serving.api.service import Caller, Service
from serving.api.turns import Piece, Turn, aside
from serving.engine.request import Logprobs

ERROR = {"model": schemas.ErrorBody}
ERRORS: dict[int | str, dict[str, Any]] = {
    400: ERROR | {"description": "The request makes no sense; the message says what is allowed."},
    401: ERROR | {"description": "No API key, or an unknown one."},
    403: ERROR | {"description": "A quota is used up."},
    404: ERROR | {"description": "No such model, session or response (or another tenant's)."},
    408: ERROR | {"description": "The body came too slowly."},
    409: ERROR | {"description": "The session is busy, at another version, or its model is gone."},
    413: ERROR | {"description": "The body is too large."},
    429: ERROR | {"description": "Too many requests or tokens, or the queue is full; see Retry-After."},
    500: ERROR | {"description": "The service failed."},
    503: ERROR | {"description": "Overloaded, or the store does not answer; see Retry-After."},
}
EVENT = {"id": {"type": "string"}, "event": {"type": "string"}, "data": {"type": "string", "description": "JSON, or [DONE]."}}
STREAM: dict[str, Any] = {"content": {"text/event-stream": {"schema": {"type": "object", "properties": EVENT}}}}
SessionHeader = Annotated[Name | None, Header(alias="X-Session-Id", description="The same as session_id.")]
KeyHeader = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key", min_length=1, max_length=255, pattern=r"^[\x21-\x7e]+$",
        description="A request sent again with the same key is answered with the first one's result.",
    ),
]  # fmt: skip
Token = dict[str, Any]


def routes(service: Service) -> APIRouter:
    """The routes over a service."""
    router = APIRouter(responses=ERRORS)

    @router.get("/v1/models", tags=["models"])
    async def list_models() -> ModelList:
        """The served models."""
        return ModelList(data=[_model(served.client.info) for served in service.models.values() if served.open])

    @router.get("/v1/models/{model}", tags=["models"])
    async def get_model(model: Annotated[str, "A model's id."]) -> ModelObject:
        """One of them."""
        return _model(service.model(model).client.info)

    @router.post("/v1/completions", tags=["completions"], response_model=schemas.Completion, responses={200: STREAM})
    async def complete(
        request: Request, body: CompletionRequest, x_session_id: SessionHeader = None, idempotency_key: KeyHeader = None
    ) -> Response:
        """Continue a text; with a session, append to its memory and go on from there."""
        caller = service.caller(request, idempotency_key)
        async with service.refusals(caller):
            turns = await attended(request, service.complete(caller, body, x_session_id))
            return await answer(service, caller, turns, bool(body.stream), _usage_wanted(body))

    @router.post("/v1/chat/completions", tags=["completions"], response_model=schemas.ChatCompletion, responses={200: STREAM})
    async def chat(
        request: Request, body: ChatRequest, x_session_id: SessionHeader = None, idempotency_key: KeyHeader = None
    ) -> Response:
        """Answer messages; with a session, those that it has not yet had."""
        caller = service.caller(request, idempotency_key)
        async with service.refusals(caller):
            turns = await attended(request, service.chat(caller, body, x_session_id))
            return await answer(service, caller, turns, bool(body.stream), _usage_wanted(body))

    @router.get("/v1/streams/{id}", tags=["completions"], response_class=StreamingResponse, responses={200: STREAM})
    async def resume(
        request: Request, id: Name, last_event_id: Annotated[str | None, Header(alias="Last-Event-ID", max_length=200)] = None
    ) -> Response:
        """Go on with a stream behind the event that was received last."""
        caller = service.caller(request)
        at = 0
        if last_event_id:
            name, _, number = last_event_id.rpartition(":")
            if name != id or not (number.isascii() and number.isdecimal() and len(number) < 12):
                raise ApiError(400, "invalid_value", f"Last-Event-ID {last_event_id!r}: must be {id}:N", "Last-Event-ID")
            at = int(number)
        response = await aside(service.store.response, caller.tenant, id)
        turn = service.turns.resume(response, at)
        if turn.model not in service.models:
            raise ApiError(409, "response_closed", f"response {id!r} cannot go on: its model is not served any more")
        await service.admit(caller, turn.left)
        return await answer(service, caller, [service.noted(turn, caller)], True, True)

    return router


def _model(info: Any) -> ModelObject:
    return ModelObject(
        id=info.name, created=info.created, fingerprint=info.fingerprint, segment=info.segment, vocabulary=info.vocabulary
    )


def _usage_wanted(body: schemas.Generation) -> bool:
    return body.stream_options is not None and bool(body.stream_options.include_usage)


async def answer(service: Service, caller: Caller, turns: list[Turn], stream: bool, usage: bool) -> Response:
    """The answer of some turns, streamed or whole. Errors before the first token are errors of the request."""
    writer = Writer(service, turns, usage)
    if not stream:
        return await attended(caller.request, writer.whole())
    merged = merge([turn.pieces for turn in turns])
    try:
        first = await attended(caller.request, anext(merged))
    except BaseException:
        await merged.aclose()
        raise

    def gone() -> None:
        service.metrics("pmi_disconnects")

    headers = {"X-Response-Id": turns[0].id} if turns[0].resumable else {}
    return EventStream(writer.events(first, merged, caller.request.state.began), headers, gone)


async def merge(streams: list[AsyncGenerator[Piece]]) -> AsyncGenerator[tuple[int, Piece]]:
    """Pieces of several turns as they come, with their numbers."""
    if len(streams) == 1:
        async with contextlib.aclosing(streams[0]) as pieces:
            async for piece in pieces:
                yield 0, piece
        return
    queue: asyncio.Queue[tuple[int, Piece | BaseException | None]] = asyncio.Queue(64)

    async def pump(index: int, stream: AsyncGenerator[Piece]) -> None:
        try:
            async with contextlib.aclosing(stream) as pieces:
                async for piece in pieces:
                    await queue.put((index, piece))
            await queue.put((index, None))
        except Exception as error:
            await queue.put((index, error))

    tasks = [asyncio.ensure_future(pump(index, stream)) for index, stream in enumerate(streams)]
    try:
        running = len(tasks)
        while running:
            index, item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                running -= 1
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Writer:
    """One answer in OpenAI's forms."""

    def __init__(self, service: Service, turns: list[Turn], usage: bool) -> None:
        self.service, self.turns, self.usage = service, turns, usage
        self.chat = turns[0].plan.kind == "chat"
        served = service.models[turns[0].model]
        self.tokenizer = served.tokenizer
        self.head = {
            "id": turns[0].id, "created": int(time.time()), "model": served.client.info.name,
            "system_fingerprint": served.client.info.fingerprint,
        }  # fmt: skip
        self.last: dict[int, Piece] = {}

    async def whole(self) -> JSONResponse:
        """Everything at once."""
        texts = ["" for _ in self.turns]
        scores: list[list[tuple[int, Logprobs]]] = [[] for _ in self.turns]
        async with contextlib.aclosing(merge([turn.pieces for turn in self.turns])) as merged:
            async for index, piece in merged:
                texts[index] += piece.text
                scores[index] += zip(piece.ids, piece.logprobs, strict=False)
                self.last[index] = piece
        choices = []
        for index, text in enumerate(texts):
            finish = {"index": index, "finish_reason": self.last[index].finish, "logprobs": self._logprobs(scores[index])}
            choices.append(finish | ({"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}))
        body = self.head | {
            "object": "chat.completion" if self.chat else "text_completion", "choices": choices, "usage": self._usage(),
            "seed": self.turns[0].plan.sampling.seed, "session": self._session(self.last[0]),
        }  # fmt: skip
        mark = self.last[0].mark
        headers = {} if mark is None else {"X-Session-Position": str(mark.position)}
        if mark is not None and mark.version is not None:
            headers["X-Session-Version"] = str(mark.version)
        return JSONResponse(body, headers=headers | ({"X-Response-Id": self.turns[0].id} if self.turns[0].resumable else {}))

    async def events(
        self, first: tuple[int, Piece], merged: AsyncGenerator[tuple[int, Piece]], began: float
    ) -> AsyncGenerator[bytes]:
        """Everything as it comes; an error in the middle is an event that says how to go on."""
        try:
            begun: set[int] = set()
            async with contextlib.aclosing(merged):
                item: tuple[int, Piece] | None = first
                while item is not None:
                    index, piece = item
                    if not piece.reading:
                        self.last[index] = piece
                        yield self._event(index, piece, index not in begun)
                        begun.add(index)
                    item = await anext(merged, None)
                    if item is not None and self.service.leaving(began):
                        raise ApiError(503, "interrupted", "this part of the service stops; resume the response", retry=1)
            if self.usage:
                yield event(self.head | {"object": self._object, "choices": [], "usage": self._usage()})
            yield event("[DONE]")
        except Exception as error:
            body = as_api_error(error).body()
            if self.turns[0].resumable:
                body["error"]["resume"] = f"/v1/streams/{self.turns[0].id}"
            yield event(body)

    @property
    def _object(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"

    def _event(self, index: int, piece: Piece, first: bool) -> bytes:
        choice: dict[str, Any] = {
            "index": index, "finish_reason": piece.finish,
            "logprobs": self._logprobs(list(zip(piece.ids, piece.logprobs, strict=False))),
        }  # fmt: skip
        if self.chat:
            choice["delta"] = ({"role": "assistant"} if first else {}) | {"content": piece.text}
        else:
            choice["text"] = piece.text
        body = self.head | {"object": self._object, "choices": [choice]}
        if piece.finish is not None:
            body |= {"session": self._session(piece), "seed": piece.usage.seed}
        return event(body, f"{self.turns[0].id}:{piece.count}" if self.turns[0].resumable else None)

    def _session(self, piece: Piece) -> dict[str, Any] | None:
        mark = piece.mark
        return None if mark is None else {"id": mark.id, "version": mark.version, "position": mark.position}

    def _usage(self) -> dict[str, int]:
        read = sum(piece.usage.prompt for piece in self.last.values())
        made = sum(piece.count for piece in self.last.values())
        replayed = sum(piece.usage.replayed for piece in self.last.values())
        return {"prompt_tokens": read, "completion_tokens": made, "total_tokens": read + made, "replayed_tokens": replayed}

    def _logprobs(self, scores: list[tuple[int, Logprobs]]) -> dict[str, Any] | None:
        if not scores:
            return None
        if not self.chat:
            return {
                "tokens": [self._token(id) for id, _ in scores],
                "token_logprobs": [own.own for _, own in scores],
                "top_logprobs": [{self._token(id): value for id, value in own.likeliest} for _, own in scores],
                "text_offset": None,
            }
        return {
            "content": [
                self._detail(id, own.own) | {"top_logprobs": [self._detail(*pair) for pair in own.likeliest]}
                for id, own in scores
            ],
            "refusal": None,
        }

    def _detail(self, id: int, value: float) -> Token:
        return {"token": self._token(id), "logprob": value, "bytes": list(self.tokenizer.decode_bytes([id]))}

    def _token(self, id: int) -> str:
        return self.tokenizer.decode_bytes([id]).decode("utf-8", errors="replace")
