"""The engine: one loop that steps all active sequences together.

    with Engine(checkpoint, EngineConfig(lanes=32), store) as engine:
        for event in engine.submit(Request(prompt=tokenizer.encode("The whale"), session="ada")):
            print(event.text, end="")

Each turn of the loop: admit and end sequences; one step of every decoding lane; then at most one segment of prompt, by the next
of the sequences that read, so that a prompt of any length delays the others by no more than that. Sequences with a session pass
through the journal: their callers get tokens that are on disk. docs/engine.md tells the rest.
"""

import contextlib
import heapq
import os
import socket
import threading
import time
import uuid
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

import torch
from torch import Tensor

from lm.errors import UserError
from lm.generation.sampling import remember, sample
from lm.machine import come_first
from lm.model.pretrained import Checkpoint
from lm.model.snapshot import capture
from serving.engine.admission import FairQueue
from serving.engine.config import Counters, EngineConfig
from serving.engine.errors import EngineError, EngineStoppedError, StepError
from serving.engine.journal import Entry, Journal
from serving.engine.opening import open_new, open_session
from serving.engine.request import Event, FinishReason, Logprobs, Request
from serving.engine.sequence import Sequence
from serving.engine.slab import Slab, likeliest, next_logits
from serving.engine.stream import Stream, deliver
from serving.sessions.store import SessionStore, Status

FAILURES = 3
"""Steps in a row that may fail before the loop gives up."""
SHARE = 4
"""A short piece of prompt counts as this part of a segment at least, for it costs a pass over the weights."""


class Engine:
    """Generates for many callers at once. `submit` and `close` may be called from any thread."""

    def __init__(self, checkpoint: Checkpoint, config: EngineConfig | None = None, store: SessionStore | None = None) -> None:
        self.checkpoint, self.config, self.store = checkpoint, config or EngineConfig(), store
        if self.config.dtype == "bfloat16":
            checkpoint.model.compute_in(torch.bfloat16)
        self.counters = Counters()
        # whoever looks at a lease can find the process that holds it
        self.owner = f"engine-{socket.gethostname()[:64]}-{os.getpid()}-{uuid.uuid4().hex[:12]}"
        self._segment = checkpoint.model.config.segment
        self._changed = threading.Condition()
        # under the lock: what callers and helpers leave for the loop
        self._queue: FairQueue[Sequence] = FairQueue(self.config.queue)
        self._calls: deque[tuple[Sequence, FinishReason | BaseException | None]] = deque()
        self._stopping = False
        self._error: BaseException | None = None
        # the loop's own
        self._live: dict[Stream, Sequence] = {}
        self._opening = 0
        self._reading: deque[Sequence] = deque()
        self._decoding: list[Sequence] = []
        self._deadlines: list[tuple[float, int, Sequence]] = []
        self._entries: list[Entry] = []
        self._events: list[tuple[Stream, Event | None, BaseException | None]] = []
        self._failed_in_a_row = 0
        with torch.inference_mode():
            self._slab = Slab(checkpoint.model, self.config.lanes, checkpoint.tokenizer.bos)
        self.journal = None if store is None else Journal(store, checkpoint.identity, self._on_refused, self._die)
        self._helpers = ThreadPoolExecutor(2, "engine-open")
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    # --- callers -----------------------------------------------------------------------------------------------

    def submit(self, request: Request) -> Stream:
        """Queue a request. UserError for one that makes no sense, QueueFullError, EngineStoppedError."""
        problems = list(request.problems(self.checkpoint.model.config.vocab_size, self.store is not None))
        if problems:
            raise UserError(problems)
        stream = Stream(self._on_cancel)
        sequence = Sequence(request, stream)
        with self._changed:
            if self._error is not None or self._stopping:
                raise self._stopped()
            self._queue.put(request.tenant, sequence)
            self._live[stream] = sequence
            if sequence.deadline is not None:
                heapq.heappush(self._deadlines, (sequence.deadline, id(sequence), sequence))
            self._changed.notify()
        return stream

    @property
    def alive(self) -> bool:
        """Whether the loop runs; what a health check asks."""
        return self._error is None and not self._stopping and self._thread.is_alive()

    @property
    def load(self) -> tuple[int, int]:
        """(active sequences, waiting ones)."""
        with self._changed:
            return len(self._live) - len(self._queue), len(self._queue)

    def close(self, drain: float = 0.0) -> None:
        """End the loop; sequences still active after `drain` seconds are cut off where they are (their sessions are whole)."""
        give_up = time.monotonic() + drain
        while self.alive and self._live and time.monotonic() < give_up:
            time.sleep(0.02)
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()
        self._helpers.shutdown()
        if self.journal is not None and self.store is not None:
            self.journal.close()
            opened = [sequence.lease for sequence, _ in self._calls if sequence.opening and sequence.lease is not None]
            if opened and self._error is None:  # sessions that were opened too late
                self.store.release(opened)

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _stopped(self) -> EngineStoppedError:
        why = "it was closed" if self._error is None else f"{type(self._error).__name__}: {self._error}"
        return EngineStoppedError(f"the engine has stopped ({why}); send the request to another one")

    # what other threads leave for the loop

    def _on_cancel(self, stream: Stream) -> None:
        with self._changed:
            sequence = self._live.get(stream)
            if sequence is not None:
                self._calls.append((sequence, "cancelled"))
                self._changed.notify()

    def _on_refused(self, sequence: Sequence) -> None:
        self._on_opened(sequence, EngineError("refused"))

    def _on_opened(self, sequence: Sequence, error: BaseException | None) -> None:
        with self._changed:
            self._calls.append((sequence, error))
            self._changed.notify()

    # --- the loop ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        come_first()
        if self.config.threads is not None:
            torch.set_num_threads(self.config.threads)
        try:
            with torch.inference_mode():
                while self._turn():
                    pass
        except BaseException as error:
            with contextlib.suppress(Exception):
                self._flush()  # what was produced or concluded before is still owed to its callers
            self._die(error)

    def _turn(self) -> bool:
        """One turn; false when the loop is to end."""
        with self._changed:
            idle = not self._decoding and not self._reading
            if idle and not self._stopping and not self._calls and (not len(self._queue) or not self._room):
                self._changed.wait(self._patience())
            if self._stopping:
                for sequence in [*self._live.values()]:
                    self._end(sequence, self._stopped())
                self._flush()
                return False
            self._heed()
        if self._decoding:
            self._decode()
        budget = self._segment
        while self._reading and (cost := max(self._portion(self._reading[0]), self._segment // SHARE, 1)) <= budget:
            budget -= cost
            self._read(self._reading.popleft())
        self._flush()
        return True

    @property
    def _room(self) -> bool:
        return self._opening + len(self._reading) + len(self._decoding) < self.config.lanes

    def _patience(self) -> float | None:
        return max(0.0, self._deadlines[0][0] - time.monotonic()) if self._deadlines else None

    def _heed(self) -> None:
        """What happened meanwhile: sessions opened or lost, cancellations, deadlines, requests (the lock is held)."""
        while self._calls:
            sequence, call = self._calls.popleft()
            if sequence.opening and not isinstance(call, str):  # its session was opened, or could not be
                sequence.opening = False
                self._opening -= 1
                if sequence.lease is not None:
                    self._hold(sequence)
                if call is None and sequence.finish is None:
                    self._reading.append(sequence)
                    self.counters.opened += 1
                    self.counters.replayed += sequence.stream.usage.replayed
                else:
                    self._conclude(sequence, call or sequence.finish or "cancelled")
            elif call is not None:
                self._end(sequence, call)
        now = time.monotonic()
        while self._deadlines and self._deadlines[0][0] <= now:
            self._end(heapq.heappop(self._deadlines)[2], "deadline")
        while len(self._queue) and self._room:
            sequence = self._queue.pop()
            if sequence.request.session is None:
                open_new(self.checkpoint, sequence)
                if sequence.durable:
                    self._hold(sequence)
                self._reading.append(sequence)
            else:
                sequence.opening = True
                self._opening += 1
                self._helpers.submit(self._open, sequence)

    def _hold(self, sequence: Sequence) -> None:
        """From here on the journal knows the sequence, and keeps its lease alive."""
        assert self.journal is not None
        self.journal.hold(sequence)
        sequence.held = True

    def _open(self, sequence: Sequence) -> None:
        assert self.store is not None
        error: BaseException | None = None
        try:
            open_session(self.checkpoint, self.store, self.owner, self.config.lease, sequence)
        except BaseException as problem:
            error = problem
        self._on_opened(sequence, error)

    def _decode(self) -> None:
        """One token for every lane."""
        try:
            logits, overflow = self._slab.step()
        except Exception as error:
            self._fail_step(error)
            return
        self._failed_in_a_row = 0
        self.counters.steps += 1
        count = len(self._decoding)
        ids, scores = self._slab.token[:count].tolist(), self._logprobs(logits, self._slab.token[:count], self._decoding)
        finished = []
        lost = [] if overflow is None else [self._decoding[lane] for lane in overflow.lanes]
        for lane, sequence in enumerate(self._decoding):
            if sequence in lost:
                continue
            sequence.position += 1
            self._produced(sequence, ids[lane], scores.get(lane))
            if sequence.finish is not None:
                finished.append(sequence)
        for sequence in finished:
            self._leave(sequence)
        for sequence in lost:
            self.counters.failures += 1
            self._conclude(sequence, StepError(f"the state is not finite behind {sequence.position}; what was received is kept"))

    def _logprobs(self, logits: Tensor, chosen: Tensor, sequences: list[Sequence]) -> dict[int, Logprobs]:
        wanted = {i: s.request.logprobs for i, s in enumerate(sequences) if s.request.logprobs is not None}
        if not wanted:
            return {}
        lanes = list(wanted)
        found = likeliest(logits[lanes], chosen[lanes], max(wanted.values()))
        return {i: Logprobs(row.own, row.likeliest[: wanted[i]]) for i, row in zip(lanes, found, strict=True)}

    def _portion(self, sequence: Sequence) -> int:
        """How many ids a sequence reads next: up to the end of its segment."""
        return min(self._segment - sequence.position % self._segment, len(sequence.unread) - sequence.cursor)

    def _read(self, sequence: Sequence) -> None:
        """Read the next portion of a sequence's prompt."""
        t, model = self._segment, self.checkpoint.model
        if sequence.request.tokens == 0 and sequence.position >= (sequence.end - 1) // t * t:
            self._conclude(sequence, "length")  # the ids since the last boundary are the tail: nothing needs to read them
            return
        count = self._portion(sequence)
        try:
            ids = torch.tensor([sequence.unread[sequence.cursor : sequence.cursor + count]], device=model.device)
            assert sequence.state is not None
            hidden, sequence.state = model(ids, sequence.state, donate=True)
            sequence.position += count
            sequence.cursor += count
            usage = sequence.stream.usage
            read = max(0, sequence.cursor - usage.replayed)
            self.counters.prompt += read - usage.read
            usage.read = read
            if sequence.cursor == len(sequence.unread):
                self._first(sequence, hidden)
            else:
                self._pass_boundary(sequence)
                self._reading.append(sequence)
        except Exception as error:
            self.counters.failures += 1
            self._conclude(sequence, StepError(f"the model could not read the prompt at {sequence.position}: {error}"))

    def _pass_boundary(self, sequence: Sequence) -> None:
        """In the middle of a prompt, at a boundary: some are stored, so that little is read again after a crash."""
        boundary, t = sequence.position, self._segment
        last = boundary == (sequence.end - 1) // t * t
        assert sequence.state is not None
        if sequence.lease is None or not (last or boundary // t % self.config.snapshot_segments == 0):
            return
        sequence.snapshot = capture(self.checkpoint.model, sequence.state, 0)
        if not last:
            ids = boundary + 1 - sequence.journalled
            self._journal(sequence, sequence.unwritten[:ids], None)
            del sequence.unwritten[:ids]

    def _first(self, sequence: Sequence, hidden: Tensor) -> None:
        """The prompt is read: choose the first token and join the decoding lanes."""
        state, settings, recent = sequence.state, sequence.settings, sequence.recent
        assert state is not None
        assert settings is not None
        assert recent is not None
        logits = next_logits(self.checkpoint.model, hidden, self.checkpoint.tokenizer.bos)
        token = sample(logits, settings, recent, state.position)
        remember(recent, state.position, token)
        scores = self._logprobs(logits, token, [sequence])
        self._produced(sequence, int(token), scores.get(0))
        if sequence.finish is None:
            sequence.lane = self._slab.admit(state, settings, recent, token)
            self._decoding.append(sequence)
            sequence.state = None
        else:
            self._forget(sequence)

    def _produced(self, sequence: Sequence, token: int, scores: Logprobs | None) -> None:
        """A token was chosen at the sequence's position: text, finish, journal or delivery."""
        request = sequence.request
        sequence.produced += 1
        self.counters.generated += 1
        sequence.stream.usage.generated = sequence.produced
        text = ""
        if sequence.text is not None:
            text = sequence.text.feed([token])
            if sequence.text.stopped is not None:
                sequence.finish = "stop"
        if sequence.produced >= request.tokens and sequence.finish is None:
            sequence.finish = "length"
        if sequence.finish is not None and sequence.text is not None:
            text += sequence.text.close()
        event = Event(sequence.position, (token,), text, () if scores is None else (scores,), sequence.finish)
        if not sequence.durable:
            self._events.append((sequence.stream, event, None))
            return
        if sequence.lease is not None and sequence.position % self._segment == 0:
            lane = sequence.lane
            state = self._slab.state if lane is not None else sequence.state
            assert state is not None
            sequence.snapshot = capture(self.checkpoint.model, state, lane or 0)
        ids, sequence.unwritten = [*sequence.unwritten, token], []
        self._journal(sequence, ids, event, (token,))

    def _journal(
        self, sequence: Sequence, ids: list[int], event: Event | None, generated: tuple[int, ...] = (),
        error: BaseException | None = None,
    ) -> None:  # fmt: skip
        """Leave ids (and what else the sequence has for the store) to the journal."""
        status: Status = "running"
        if event is not None and event.finish is not None:
            status = "done" if event.finish in ("length", "stop") else "interrupted"
        elif error is not None:
            status = "interrupted"
        self._entries.append(
            Entry(
                sequence, sequence.journalled, ids, sequence.snapshot, bool(ids) and sequence.turn,
                len(sequence.request.continued) + sequence.produced - len(generated), list(generated),
                status, event, error, sequence.produced == 1, status != "running",
            )
        )  # fmt: skip
        sequence.journalled += len(ids)
        sequence.snapshot = None
        sequence.turn = sequence.turn and not ids

    # --- ends --------------------------------------------------------------------------------------------------

    def _end(self, sequence: Sequence, why: FinishReason | BaseException) -> None:
        """End a sequence from outside, wherever it is (the lock is held)."""
        if sequence.finish is not None or sequence.stream not in self._live:
            return
        if sequence.opening and isinstance(why, str):  # the helper that opens it will come back
            sequence.finish = why
            return
        self._queue.remove(sequence.request.tenant, sequence)
        if sequence in self._reading:
            self._reading.remove(sequence)
        self._conclude(sequence, why)

    def _conclude(self, sequence: Sequence, why: FinishReason | BaseException) -> None:
        """The last a caller hears of a sequence that ends other than with a token."""
        error = why if isinstance(why, BaseException) else None
        sequence.finish = why if isinstance(why, str) else "cancelled"
        text = sequence.text.close() if sequence.text is not None and error is None else ""
        event = None if error is not None else Event(sequence.position + (sequence.produced > 0), (), text, (), sequence.finish)
        if sequence.held:
            ids: list[int] = []
            if error is None and sequence.request.tokens == 0 and sequence.finish == "length":
                ids = sequence.unwritten
            self._journal(sequence, ids, event, (), error)
        else:
            self._events.append((sequence.stream, event, error))
        if sequence.lane is not None:
            self._leave(sequence)
        else:
            self._forget(sequence)

    def _leave(self, sequence: Sequence) -> None:
        """Free the sequence's lane."""
        lane = sequence.lane
        assert lane is not None
        moved = self._slab.retire(lane)
        self._decoding[lane] = self._decoding[moved]
        self._decoding[lane].lane = lane
        self._decoding.pop()
        sequence.lane = None
        self._forget(sequence)

    def _forget(self, sequence: Sequence) -> None:
        self._live.pop(sequence.stream, None)

    def _flush(self) -> None:
        """Hand out what the turn has produced."""
        if self._events:
            deliver(self._events)
            self._events = []
        if self._entries and self.journal is not None:
            self.journal.write(self._entries)
            self._entries = []

    def _fail_step(self, error: Exception) -> None:
        """The model failed with all lanes in one call: none of their states can be trusted any more."""
        self.counters.failures += 1
        self._failed_in_a_row += 1
        lost, self._decoding = self._decoding, []
        for sequence in lost:
            sequence.lane = None
            self._conclude(sequence, StepError(f"the model failed: {error}; what was received so far is kept"))
        self._slab.clear()
        if self._failed_in_a_row >= FAILURES:
            raise error

    def _die(self, error: BaseException) -> None:
        """The loop or the journal has ended: everyone who waits hears of it at once."""
        with contextlib.suppress(Exception):
            self._helpers.shutdown(wait=False, cancel_futures=True)
        with self._changed:
            self._error = self._error or error
            self._stopping = True
            waiting, self._live = list(self._live), {}
            self._changed.notify()
        if self.journal is not None:
            waiting += self.journal.abandon()
        deliver((stream, None, self._stopped()) for stream in waiting)
