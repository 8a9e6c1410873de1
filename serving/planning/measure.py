"""A short calibration: a real engine with sessions in a real store, random weights, on this machine.

Whole streams are timed, not the model alone: threads, journal and store cost what they cost in the service.
"""

import asyncio
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from lm import machine
from lm.config import ModelConfig
from lm.data.tokenizer import ByteTokenizer
from lm.model import PMI
from lm.model.pretrained import Checkpoint, fingerprint
from lm.model.proofs import draw_zeros
from lm.model.state import tensors
from serving.engine import Engine, EngineConfig, Request
from serving.engine.opening import identity
from serving.planning.figures import Figures
from serving.sessions.opening import open_store
from serving.sessions.store import LOCAL, SessionStore, Settings

TOKENS = 48
"""Tokens of each timed stream."""
ROUNDS = 5
"""Times that reading is measured: the median counts."""
OPENS = 20
"""Times that resuming a session is measured, idle and busy: all count but the first two, which warm up."""


def lane_counts(most: int) -> list[int]:
    """1, 4, 16, ... and the most: what lies between is on a line."""
    counts = [1]
    while counts[-1] * 4 < most:
        counts.append(counts[-1] * 4)
    return sorted({*counts, most})


def measure(
    preset: str, config: ModelConfig, lanes: int, threads: int, store_url: str | None = None,
    say: Callable[[str], None] = lambda line: None, device: torch.device | None = None,
) -> Figures:  # fmt: skip
    """Figures of an engine with up to `lanes` lanes. `store_url`: where sessions go (default: a SQLite file that is removed)."""
    machine.keep_pages()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory(prefix="pmi-plan-") as folder:
        store = open_store(store_url or f"sqlite:///{folder}/sessions.db")
        try:
            return _measure(preset, config, lanes, threads, store, say, device or torch.device("cpu"))
        finally:
            store.close()
            torch.set_num_threads(before)


def _measure(
    preset: str, config: ModelConfig, lanes: int, threads: int, store: SessionStore, say: Callable[[str], None],
    device: torch.device,
) -> Figures:  # fmt: skip
    torch.manual_seed(0)
    model = draw_zeros(PMI(config)).eval().to(device)
    checkpoint = Checkpoint(model, ByteTokenizer(), fingerprint(model))
    t = config.segment
    resident = _resident()
    say("reading")
    calls = min(t, 4)
    with Engine(checkpoint, EngineConfig(lanes=1, threads=threads)) as engine:  # prompts: BOS is put before each
        short = _latency(lambda n: _run(engine, [_request(calls - 1, 1, None)])[0].first, ROUNDS + 2)
        long = _latency(lambda n: _run(engine, [_request(t - 1, 1, None)])[0].first, ROUNDS)
    per_token = max(0.0, (long - short) / (t - calls)) if t > calls else 0.0
    read_call = max(0.0, short - per_token * calls)
    say("sessions")
    own = identity(checkpoint)
    names = [f"plan-{number}" for number in range(lanes + 2 * (OPENS + 2))]
    settings = Settings(own.model, own.tokenizer, t)
    created = [store.create(LOCAL, names[0], settings)]
    try:
        with Engine(checkpoint, EngineConfig(lanes=1, threads=threads), store) as engine:
            for prompt in (2 * t + 1, t, t):  # three turns that cross boundaries: it then retains what sessions retain
                _run(engine, [_request(prompt, 1, names[0])])
            for name in names[1:]:
                created.append(store.fork(LOCAL, names[0], name))
        present = store.get(LOCAL, names[0])
        snapshot = len(store.snapshot(present) or b"")
        steps = {}
        for count in lane_counts(lanes):
            say(f"decoding, {count} lanes")
            with Engine(checkpoint, EngineConfig(lanes=count, threads=threads), store) as engine:
                timed = _run(engine, [_request(1, TOKENS, name) for name in names[:count]])
            steps[count] = statistics.median(x.gap for x in timed)
        say("resuming")
        # a resumed session's tail has 5 ids (BOS, a prompt's odd one, three answers), and one more is read
        reading = read_call + 6 * per_token
        half = max(1, lanes // 2)
        with Engine(checkpoint, EngineConfig(lanes=half + 1, threads=threads), store) as engine:
            idle, busy = names[lanes : lanes + OPENS + 2], names[lanes + OPENS + 2 :]
            alone = [_run(engine, [_request(1, 1, name)])[0].first - reading for name in idle]
            for name in names[:half]:  # these decode until the engine is closed
                engine.submit(_request(1, 1_000_000, name))
            while engine.load[0] < half:
                time.sleep(0.01)
            turn = _between(steps, half)
            # it comes in the middle of a turn; the next one brings its token
            beside = [_run(engine, [_request(1, 1, name)])[0].first - reading - 1.5 * turn for name in busy]
    finally:
        for session in created:
            store.delete(LOCAL, session.id)
    return Figures(
        preset=preset,
        machine=f"{_processor(device)}, torch {torch.__version__}, {threads} thread{'s' * (threads > 1)}",
        segment=t, layers=config.layers, width=config.width, step=steps,
        read_call=read_call, read_token=per_token,
        open={0: [max(0.0, x) for x in alone[2:]], half: [max(0.0, x) for x in beside[2:]]},
        snapshot_bytes=snapshot, session_bytes=present.bytes,
        lane_bytes=sum(x.numel() * x.element_size() for x in tensors(model.initial_state(1))),
        weight_bytes=sum(p.numel() * p.element_size() for p in model.parameters()),
        resident_bytes=resident,
    )  # fmt: skip


def _between(steps: dict[int, float], lanes: int) -> float:
    """Seconds of a step with so many lanes, on a line between those measured."""
    low = max(count for count in steps if count <= lanes)
    high = min(count for count in steps if count >= lanes)
    return steps[low] if low == high else steps[low] + (steps[high] - steps[low]) * (lanes - low) / (high - low)


def _request(prompt: int, tokens: int, session: str | None) -> Request:
    return Request(prompt=[number % 97 for number in range(prompt)], tokens=tokens, session=session, text=False)


@dataclass
class _Timed:
    began: float
    times: list[float] = field(default_factory=list)
    """When each token was there."""

    @property
    def first(self) -> float:
        return self.times[0] - self.began

    @property
    def gap(self) -> float:
        # over all of them: the journal hands out several at once where steps are quick
        return (self.times[-1] - self.times[0]) / (len(self.times) - 1)


def _run(engine: Engine, requests: Sequence[Request]) -> list[_Timed]:
    """All requests at once."""

    async def follow(request: Request) -> _Timed:
        timed = _Timed(time.perf_counter())
        async for event in engine.submit(request):
            timed.times += [time.perf_counter()] * len(event.ids)
        return timed

    async def all_() -> list[_Timed]:
        return await asyncio.gather(*(follow(request) for request in requests))

    return asyncio.run(all_())


def _latency(once: Callable[[int], float], rounds: int) -> float:
    return statistics.median(once(number) for number in range(rounds))


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
