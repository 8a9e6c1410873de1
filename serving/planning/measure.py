"""A short calibration: a real engine with sessions in a real store, random weights, on this machine.

The parts of a turn are timed where they run, beside lanes that decode: threads, interpreter, journal and store cost what they
cost in the service.
"""

import asyncio
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lm import machine
from lm.config import ModelConfig
from lm.data.tokenizer import ByteTokenizer
from lm.model import PMI
from lm.model.pretrained import Checkpoint, fingerprint
from lm.model.proofs import draw_zeros
from lm.model.state import tensors
from serving.engine import Engine, EngineConfig, Request
from serving.engine.opening import open_session
from serving.engine.sequence import Sequence as Opened
from serving.engine.stream import Stream
from serving.planning.figures import Figures, on_a_line, pieces
from serving.planning.simulate import Arrival, Cluster, simulate
from serving.sessions.opening import open_store
from serving.sessions.store import LEASE_SECONDS, LOCAL, Change, Lease, Outcome, SessionStore, Settings

BASES = 8
"""Sessions with tails spread over a segment, that all others are forked from."""
ROUNDS = 9
"""Times that reading is measured: the median counts."""
TURNS = 24
"""Turns that are opened and answered beside each number of lanes, if the time allows."""
KEPT = 40
"""Commits of one size that are kept, the last ones."""
WARM = 3
"""The first turns do not count."""
WINDOW = 0.7, 3.0
"""Seconds that steps are counted for, before and after the turns beside them: at least, and at most if a segment takes longer."""


def lane_counts(most: int) -> list[int]:
    """1, 4, 16, ... and the most: what lies between is on a line."""
    counts = [1]
    while counts[-1] * 4 < most:
        counts.append(counts[-1] * 4)
    return sorted({*counts, most})


def measure(
    preset: str, config: ModelConfig, lanes: int, threads: int, store_url: str | None = None,
    device: torch.device | str = "cpu",
    say: Callable[[str], None] = lambda line: None,
) -> Figures:  # fmt: skip
    """Figures of an engine with up to `lanes` lanes. `store_url`: where sessions go (default: a SQLite file that is removed)."""
    machine.keep_pages()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory(prefix="pmi-plan-") as folder:
        store = open_store(store_url or f"sqlite:///{folder}/sessions.db")
        try:
            return _measure(preset, config, lanes, threads, store, device, say)
        finally:
            store.close()
            torch.set_num_threads(before)


def _measure(
    preset: str,
    config: ModelConfig,
    lanes: int,
    threads: int,
    store: SessionStore,
    device: torch.device | str,
    say: Callable[[str], None],
) -> Figures:
    torch.manual_seed(0)
    model = draw_zeros(PMI(config)).eval().to(device)
    checkpoint = Checkpoint(model, ByteTokenizer(), fingerprint(model))
    t = config.segment
    resident = _resident()
    say("reading")
    with Engine(checkpoint, EngineConfig(lanes=1, threads=threads)) as engine:
        read = {count: asyncio.run(_reading(engine, count)) for count in sorted({1, min(4, t), max(1, t // 2), t})}
    sessions = _Sessions(checkpoint, store)
    try:
        say("sessions")
        with Engine(checkpoint, EngineConfig(lanes=1, threads=threads), store) as engine:
            first = sessions.create()
            for prompt in (2 * t + 1, t, t):  # three turns that cross boundaries: it then retains what sessions retain
                engine.submit(_request(prompt, 1, first)).result()
            for base in range(1, BASES):
                engine.submit(_request(base * t // BASES, 1, sessions.fork(first))).result()
        beside = {}
        for count in (0, *lane_counts(lanes)):
            say(f"decoding, {count} lanes")
            with Engine(checkpoint, EngineConfig(lanes=count + 1, threads=threads), sessions.watched) as engine:
                beside[count] = asyncio.run(_turns_beside(engine, sessions, count, read))
        present = store.get(LOCAL, sessions.names[0])
        snapshot = len(store.snapshot(present) or b"")
    finally:
        for name in sessions.names:
            store.delete(LOCAL, name)
    parts = Figures(
        preset=preset,
        machine=f"{_processor(torch.device(device))}, torch {torch.__version__}, {threads} thread{'s' * (threads > 1)}",
        segment=t, layers=config.layers, width=config.width,
        step={count: x.step for count, x in beside.items() if count}, read=read,
        open={count: x.open for count, x in beside.items()}, stall={count: x.stall for count, x in beside.items() if count},
        commit=_by_size(sessions.watched.commits, lane_counts(lanes)),
        snapshot_bytes=snapshot, session_bytes=present.bytes,
        lane_bytes=sum(x.numel() * x.element_size() for x in tensors(model.initial_state(1))),
        weight_bytes=sum(p.numel() * p.element_size() for p in model.parameters()),
        resident_bytes=resident,
    )  # fmt: skip
    return parts.model_copy(update={"open": {count: _whole(parts, count, x) for count, x in beside.items()}})


def _whole(parts: Figures, lanes: int, seen: "_Beside") -> list[float]:
    """Times to open a session, with what passes from thread to thread until its first token is with its caller.

    That is what the same turns take longer for real than simulated from their parts.
    """
    apart, step = 0.5, parts.step_seconds(max(1, lanes))
    streams = [Arrival(0.0, 0, 1, round((apart * len(seen.tails) + 4) / step), 1) for _ in range(lanes)]
    turns = [Arrival(2.0 + apart * number + step * number / 7, 1, 1, 2, tail) for number, tail in enumerate(seen.tails)]
    simulated = simulate(parts, Cluster(1, lanes + 1, overhead=0.0), [*streams, *turns]).first_token[lanes:]
    handed = max(0.0, statistics.median(seen.first) - statistics.median(simulated))
    return [seconds + handed for seconds in seen.open]


class _Watched:
    """A store that notes how long the journal takes for each commit, and for giving back the leases of those that have ended."""

    def __init__(self, store: SessionStore) -> None:
        self._store = store
        self.commits: list[tuple[int, float]] = []
        """Changes and seconds of each."""

    def commit(self, changes: Sequence[Change]) -> Sequence[Outcome]:
        began = time.perf_counter()
        try:
            return self._store.commit(changes)
        finally:
            self.commits.append((len(changes), time.perf_counter() - began))

    def release(self, leases: Sequence[Lease]) -> None:
        began = time.perf_counter()
        self._store.release(leases)
        if self.commits:
            changes, seconds = self.commits.pop()
            self.commits.append((changes, seconds + time.perf_counter() - began))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


class _Sessions:
    """Sessions to be measured with."""

    def __init__(self, checkpoint: Checkpoint, store: SessionStore) -> None:
        self.checkpoint, self.store, self.watched = checkpoint, store, _Watched(store)
        self.names: list[str] = []

    def create(self) -> str:
        own = self.checkpoint.identity
        self.store.create(LOCAL, name := self._name(), Settings(own.model, own.tokenizer, self.checkpoint.model.config.segment))
        return name

    def fork(self, base: str | None = None) -> str:
        base = base or self.names[len(self.names) % BASES]
        self.store.fork(LOCAL, base, name := self._name())
        return name

    def tail(self, name: str) -> int:
        return len(self.store.get(LOCAL, name).tail)

    def _name(self) -> str:
        self.names.append(f"plan-{len(self.names)}")
        return self.names[-1]

    def open(self, name: str) -> float:
        """Seconds that a helper of the engine takes to open it."""
        opened = Opened(_request(1, 1, name), Stream(lambda stream: None))
        began = time.perf_counter()
        open_session(self.checkpoint, self.store, "plan", LEASE_SECONDS, opened)
        seconds = time.perf_counter() - began
        assert opened.lease is not None
        self.store.release([opened.lease])
        return seconds


@dataclass(frozen=True)
class _Beside:
    """What was seen beside so many lanes."""

    step: float
    open: list[float]
    stall: float
    first: list[float]
    """Seconds to the first tokens of turns that came one by one ..."""
    tails: list[int]
    """... and what they had to read again."""


async def _turns_beside(engine: Engine, sessions: _Sessions, lanes: int, read: dict[int, float]) -> _Beside:
    """Steps of `lanes` lanes, alone and beside turns of others."""
    t, rng = sessions.checkpoint.model.config.segment, random.Random(lanes)
    to_open, to_ask = [[sessions.fork() for _ in range(TURNS)] for _ in range(2)]
    tails = [sessions.tail(name) for name in to_ask]
    reading = [sum(on_a_line(read, piece) for piece in pieces(tail + 1, t)) for tail in tails]
    begun = [asyncio.Event() for _ in range(lanes)]
    streams = [engine.submit(_request(1, 1_000_000, sessions.fork())) for _ in begun]  # they decode until the engine is closed
    tasks = [asyncio.create_task(_follow(stream, event)) for stream, event in zip(streams, begun, strict=True)]
    for event in begun:
        await event.wait()
    before = await _step(engine, t) if lanes else 0.0
    loop, opens, first = asyncio.get_running_loop(), [], []
    with ThreadPoolExecutor(1) as helper:
        for name in to_open:
            await asyncio.sleep(rng.random() * (before or 0.01))  # anywhere in a turn
            opens.append(await loop.run_in_executor(helper, sessions.open, name))
    for number, name in enumerate(to_ask):
        if number == WARM:
            steps, began = engine.counters.steps, time.perf_counter()
        if number > 2 * WARM and time.perf_counter() - began > WINDOW[1]:
            break
        await asyncio.sleep(rng.random() * (before or 0.01))
        sent = time.perf_counter()
        first.append(await _follow(engine.submit(_request(1, 2, name))) - sent)
    asked = len(first) - WARM
    taken, stepped = time.perf_counter() - began, engine.counters.steps - steps
    step = (before + await _step(engine, t)) / 2 if lanes else 0.0
    lost = taken - stepped * step - sum(reading[WARM : WARM + asked])
    for stream in streams:
        stream.cancel()
    await asyncio.gather(*tasks)
    return _Beside(step, opens[WARM:], max(0.0, lost / asked), first[WARM:], tails[WARM : WARM + asked])


async def _step(engine: Engine, segment: int) -> float:
    """Seconds of a step, of all lanes that decode."""
    await asyncio.sleep(0.1)
    steps, began = engine.counters.steps, time.perf_counter()
    while (passed := time.perf_counter() - began) < WINDOW[0] or (engine.counters.steps < steps + segment and passed < WINDOW[1]):
        await asyncio.sleep(0.01)
    return passed / (engine.counters.steps - steps)


async def _follow(stream: Stream, begun: asyncio.Event | None = None) -> float:
    """To its end; returns when the first token came."""
    first = 0.0
    async for _ in stream:
        first = first or time.perf_counter()
        if begun is not None:
            begun.set()
    return first


async def _reading(engine: Engine, tokens: int) -> float:
    """Seconds from a request of so many tokens, BOS included, to its first token."""
    times = []
    for _ in range(WARM + ROUNDS):
        began = time.perf_counter()
        await _follow(engine.submit(_request(tokens - 1, 1, None)))
        times.append(time.perf_counter() - began)
    return statistics.median(times[WARM:])


def _by_size(commits: list[tuple[int, float]], sizes: list[int]) -> dict[int, list[float]]:
    """Seconds of commits by the number of changes in them, for a few numbers."""
    found = {size: [seconds for changes, seconds in commits if changes == size] for size in sizes}
    return {size: seconds[-KEPT:] for size, seconds in found.items() if seconds}


def _request(prompt: int, tokens: int, session: str | None) -> Request:
    return Request(prompt=[number % 97 for number in range(prompt)], tokens=tokens, session=session, text=False)


def _resident() -> int:
    """Bytes of this process in memory (Linux; 0 elsewhere)."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.is_file() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS:")), 0)


def _processor(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
