"""From figures and a load to machines: replicas, store, network, memory; and what a KV cache would need instead."""

import math
import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from lm.errors import UserError
from serving.engine.journal import PACE
from serving.planning.figures import Figures
from serving.planning.simulate import Cluster, Load, Prediction, simulate

ROW = 1_500
"""Bytes of a token's event on its way to a client at one token per event; less where they are coalesced."""
REQUESTS = 2_000
"""Turns that are simulated, unless they are so long that fewer must do."""
FEWEST = 50
WORK = 2_000_000
"""Pieces read and tokens generated in a simulation, about, at most."""
PATIENCE = 20
"""When so many times the replicas that arithmetic asks for do not keep the target, more will not."""
SAMPLE = 8
"""Replicas that are simulated, at most: sessions are spread by hash, so a part of them behaves like the whole."""


@dataclass(frozen=True)
class Wish:
    """What is to be served, and how well."""

    sessions: int
    load: Load
    lanes: int = 32
    utilisation: float = 0.7
    """Share of its capacity that a replica is loaded with."""
    first_token: float = 2.0
    """Seconds within which 95 % of requests are to have their first token."""
    spare: int = 1
    """Replicas that may be down while the load is still carried."""
    overhead: float = 0.01
    history: int = 20_000
    """Tokens behind a session on average: nothing here depends on it, a KV cache does."""
    kv_bytes: int = 2
    """Bytes per number in that KV cache."""


@dataclass(frozen=True)
class Latency:
    """Seconds, from a simulation."""

    first_p50: float
    first_p95: float
    first_p99: float
    gap_p50: float
    gap_p95: float
    gap_p99: float
    refused: float
    """Share of requests."""
    occupancy: float
    """Share of the lanes in use."""

    @classmethod
    def of(cls, found: Prediction, requests: int) -> "Latency":
        """The percentiles of a prediction."""
        first, gap = found.first_token_at, found.gap_at
        refused = found.refused / max(1, requests)
        return cls(first(0.5), first(0.95), first(0.99), gap(0.5), gap(0.95), gap(0.99), refused, found.occupancy)


@dataclass(frozen=True)
class KvCache:
    """What a service of the same model with a key-value cache of the whole history would need."""

    session_bytes: int
    store_bytes: int
    read_bytes: float
    """Per second: every turn brings the session's cache back."""
    resume_seconds: float
    """To compute it anew instead, at what a token of a short prompt costs here (a lower bound: attention grows with it)."""
    ratio: float
    """Its bytes per session over ours."""


@dataclass(frozen=True)
class Plan:
    """What is needed."""

    replicas: int
    per_replica: float
    """Turns per second that one replica can carry at most."""
    replica_bytes: int
    memory_bytes: int
    store_bytes: int
    store_reads: float
    """Bytes per second from the store: snapshots of sessions that are resumed."""
    store_writes: float
    """Bytes per second to the store: snapshots at boundaries, and ids."""
    store_commits: float
    """Transactions per second: a replica's journal writes once per step or pace, and at once where someone waits."""
    client_bytes: float
    """Per second, to clients."""
    concurrent: float
    """Streams at a time."""
    simulated: int
    """Turns behind the percentiles of `steady`."""
    steady: Latency
    degraded: Latency
    """With one replica killed a third into the run, its sessions' leases running out, and a new one after a while."""
    kv: KvCache

    def row(self) -> dict[str, Any]:
        """As a JSON object."""
        return asdict(self)


def capacity(figures: Figures, load: Load, lanes: int) -> float:
    """Turns per second that one replica carries when all its lanes are busy."""
    t = figures.segment
    tokens = load.prompt + (1 - 1 / load.turns) * (t + 1) / 2
    # pieces are cut at boundaries: whole segments, and a part of one, half of one on average
    part = max(1, round(min(tokens, t / 2)))
    reading = max(0.0, tokens / t - 0.5) * figures.read_seconds(t) + figures.read_seconds(part)
    return lanes / (load.output * figures.step_seconds(lanes) + lanes * (reading + figures.stall_seconds(lanes)))


def make_plan(figures: Figures, wish: Wish, seed: int = 0, say: Callable[[str], None] = lambda line: None) -> Plan:
    """The fewest replicas that carry the load and keep the target, each case simulated."""
    most = capacity(figures, wish.load, wish.lanes)
    talking = wish.load.rate * wish.load.output * figures.step_seconds(1)
    if talking > wish.sessions:
        raise UserError(
            f"--sessions {wish.sessions:,}: {wish.load.rate:g} turns per second keep at least {talking:,.0f} sessions busy at a "
            "time, and a session takes one turn at a time; give more --sessions, or a lower --rate"
        )
    turns = max(FEWEST, min(REQUESTS, int(WORK / (wish.load.output + wish.load.prompt / figures.segment))))
    alone = _simulated(figures, replace(wish, load=replace(wish.load, rate=0.01 * most)), 1, seed, max(FEWEST, turns // 10))
    if alone.first_p95 > wish.first_token:
        raise UserError(
            f"--first-token {wish.first_token:g}: even on an idle machine 95 % of requests take up to {alone.first_p95:.3g} s; "
            "choose a smaller --prompt, a smaller preset, more --threads, or a later target"
        )
    fewest = replicas = math.ceil(wish.load.rate / (most * wish.utilisation)) + wish.spare
    while True:
        say(f"simulating {replicas:,} replicas")
        steady = _simulated(figures, wish, replicas, seed, turns)
        if steady.first_p95 <= wish.first_token and steady.refused == 0:
            break
        if replicas > PATIENCE * fewest:
            raise UserError(
                f"--first-token {wish.first_token:g}: {replicas:,} replicas do not keep it ({steady.first_p95:.3g} s for 95 %, "
                f"{steady.refused:.1%} refused), and the load itself needs {fewest:,}; choose a later target, or more --sessions"
            )
        replicas = max(replicas + 1, math.ceil(replicas * 1.2))
    say("simulating a failure")
    degraded = _simulated(figures, wish, replicas, seed, turns, fail=True)
    memory = figures.resident_bytes + wish.lanes * 2 * figures.lane_bytes
    rate, load, t = wish.load.rate, wish.load, figures.segment
    resumed = rate * (1 - 1 / load.turns)
    tokens = load.prompt + load.output
    per_stream = load.output * figures.step_seconds(max(1, round(wish.lanes * wish.utilisation)))
    kv_session = 2 * figures.layers * figures.width * wish.history * wish.kv_bytes
    steps = replicas / figures.step_seconds(max(1, round(rate * per_stream / replicas)))
    commits = min(steps, replicas / PACE) + 2 * rate  # and one for a turn's first token and its end each
    return Plan(
        replicas, most, memory, memory * replicas, wish.sessions * figures.session_bytes,
        resumed * figures.snapshot_bytes, rate * (tokens / t * figures.snapshot_bytes + 4 * tokens),
        commits, rate * load.output * ROW, rate * per_stream, turns, steady, degraded,
        KvCache(
            kv_session, wish.sessions * kv_session, resumed * kv_session,
            wish.history / t * figures.read_seconds(t), kv_session / max(1, figures.session_bytes),
        ),
    )  # fmt: skip


def _simulated(figures: Figures, wish: Wish, replicas: int, seed: int, requests: int, fail: bool = False) -> Latency:
    """A part of the replicas with its share of the load."""
    part = min(replicas, SAMPLE)
    load = replace(wish.load, rate=wish.load.rate * part / replicas)
    seconds = max(requests / load.rate, 90.0 if fail else 30.0)
    arrivals = load.arrivals(seconds, figures.segment, random.Random(seed), wish.sessions)
    cluster = Cluster(part, wish.lanes, overhead=wish.overhead)
    return Latency.of(simulate(figures, cluster, arrivals, [(seconds / 3, 0)] if fail else []), len(arrivals))
