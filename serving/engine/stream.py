"""The caller's end of one request: iterate over it, in a thread or in an event loop.

    for event in engine.submit(request): ...
    async for event in engine.submit(request): ...

What has gathered since the last look comes as one event. Leaving an `async for` early, or `cancel()`, frees the lane.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from types import TracebackType

from serving.engine.request import Event, FinishReason, Usage

Waiting = tuple[asyncio.AbstractEventLoop, "asyncio.Future[None]"]


class Stream:
    """Events of one request as they come; raises what went wrong, at once."""

    def __init__(self, cancel: "Callable[[Stream], None]") -> None:
        self._cancel = cancel
        self._changed = threading.Condition()
        self._waiting: Waiting | None = None
        self._event: Event | None = None
        self._error: BaseException | None = None
        self._closed = False
        self.usage = Usage()
        """What it has cost so far; the seed used."""
        self.finish: FinishReason | None = None
        """Why it ended, once it has."""

    def cancel(self) -> None:
        """Ask for the end: the lane is free at the next step. What was generated until then still comes."""
        self._cancel(self)

    def result(self) -> Event:
        """Everything, as one event."""
        found: Event | None = None
        for event in self:
            found = event if found is None else found.then(event)
        assert found is not None
        return found

    def waited(self, seconds: float) -> bool:
        """Wait for something to take, so long at most; whether there is."""
        with self._changed:
            return self._changed.wait_for(self._ready, seconds)

    # --- the caller's side -------------------------------------------------------------------------------------

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.cancel()

    def __iter__(self) -> Iterator[Event]:
        while True:
            with self._changed:
                self._changed.wait_for(self._ready)
                event = self._take()
            if event is None:
                return
            yield event

    async def __aiter__(self) -> AsyncIterator[Event]:
        loop = asyncio.get_running_loop()
        try:
            while True:
                with self._changed:
                    event = self._take() if self._ready() else None
                    done = event is None and self._closed
                    if event is None and not done:
                        self._waiting = (loop, loop.create_future())
                        waiting = self._waiting[1]
                if done:
                    return
                if event is None:
                    await waiting
                else:
                    yield event
        finally:
            if not self._closed:
                self.cancel()

    def _ready(self) -> bool:
        return self._event is not None or self._closed

    def _take(self) -> Event | None:
        event, self._event = self._event, None
        if event is None and self._error is not None:
            raise self._error
        return event

    # --- the engine's side -------------------------------------------------------------------------------------

    def _push(self, event: Event | None, error: BaseException | None) -> "Waiting | None":
        with self._changed:
            if self._closed:
                return None
            if event is not None:
                self._event = event if self._event is None else self._event.then(event)
                self.finish = event.finish
            self._error = error
            self._closed = error is not None or (event is not None and event.finish is not None)
            waiting, self._waiting = self._waiting, None
            self._changed.notify_all()
        return waiting


def deliver(items: Iterable[tuple[Stream, Event | None, BaseException | None]]) -> None:
    """Hand events or errors to streams; each event loop is woken once for all of its own."""
    loops: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = {}
    for stream, event, error in items:
        waiting = stream._push(event, error)
        if waiting is not None:
            loops.setdefault(waiting[0], []).append(waiting[1])
    for loop, futures in loops.items():
        if not loop.is_closed():
            loop.call_soon_threadsafe(_wake, futures)


def _wake(futures: list["asyncio.Future[None]"]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)
