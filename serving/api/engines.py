"""The engines as the API sees them: one protocol, met in this process (tests, here) and over Ray (serving/deployments.py)."""

import asyncio
import dataclasses
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from lm.model.pretrained import Checkpoint
from serving.api.errors import ApiError
from serving.engine import Engine, Event, QueueFullError, Request, Usage
from serving.sessions.store import Content, SessionStore

CROWD = 4
"""Streams from which on each gets its events more seldom, so that all together cost no more."""
PROGRESS_SECONDS = 0.5
"""Between two signs of life while a long prompt is read."""


@dataclass(frozen=True)
class ModelInfo:
    """What the API must know of a model without having it."""

    name: str
    fingerprint: str
    tokenizer: str
    """Fingerprint of the tokenizer."""
    segment: int
    vocabulary: int
    created: int
    """When its weights were written."""


@dataclass(frozen=True)
class Chunk:
    """Some tokens, or (event None) only how far the prompt is read."""

    event: Event | None
    usage: Usage


class EngineClient(Protocol):
    """One model's engines, wherever they are."""

    info: ModelInfo

    def generate(self, request: Request, progress: bool = False) -> AsyncGenerator[Chunk]:
        """Tokens as they come; raises what the engine raises. Closing the iterator frees the lane."""

    async def inspect(self, tenant: str, session: str) -> dict[str, Any]:
        """A look into a session's memory."""

    async def check(self, data: bytes) -> Content:
        """The session in a file's bytes, checked as hostile input."""


class LocalEngine:
    """An engine in this process."""

    def __init__(self, engine: Engine, info: ModelInfo, store: SessionStore, coalesce: float = 0.02) -> None:
        self.engine, self.info, self.store, self.coalesce = engine, info, store, coalesce

    async def generate(self, request: Request, progress: bool = False) -> AsyncGenerator[Chunk]:
        """See EngineClient."""
        limit = self.engine.config.queue
        if sum(self.engine.load) >= limit:
            raise QueueFullError(f"{limit} requests are in lanes or waiting for one, and no more are allowed; try again later")
        stream = self.engine.submit(request)
        events = aiter(stream)
        waiting: asyncio.Future[Event] | None = None
        try:
            while True:
                if progress:
                    waiting = asyncio.ensure_future(anext(events))
                    while not (await asyncio.wait({waiting}, timeout=PROGRESS_SECONDS))[0]:
                        yield Chunk(None, dataclasses.replace(stream.usage))
                try:
                    event = await (waiting or anext(events))
                except StopAsyncIteration:
                    return
                yield Chunk(event, dataclasses.replace(stream.usage))
                if event.finish is not None:
                    return
                # what comes meanwhile is one event; the more streams, the fewer events each
                await asyncio.sleep(self.coalesce * max(1.0, self.engine.load[0] / CROWD))
        finally:
            stream.cancel()
            if waiting is not None:
                waiting.cancel()

    async def inspect(self, tenant: str, session: str) -> dict[str, Any]:
        """See EngineClient."""
        try:
            from serving.sessions.states import inspect_session
        except ImportError as error:
            raise ApiError(501, "not_implemented", "inspection is not part of this version") from error
        found = await _aside(self.store.get, tenant, session)
        return {"version": found.version} | (await _aside(inspect_session, self.store, found, self.engine.checkpoint)).row()

    async def check(self, data: bytes) -> Content:
        """See EngineClient."""
        from serving.sessions.files import load_session

        return await _aside(load_session, data, self.engine.checkpoint)


def describe(name: str, checkpoint: Checkpoint, created: int) -> ModelInfo:
    """What the API must know of a checkpoint."""
    mine, config = checkpoint.identity, checkpoint.model.config
    return ModelInfo(name, mine.model, mine.tokenizer, config.segment, config.vocab_size, created)


async def _aside(function: Any, *args: Any) -> Any:
    return await asyncio.get_running_loop().run_in_executor(None, partial(function, *args))
