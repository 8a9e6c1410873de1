"""A discrete-event simulation of replicas: arrivals, engine loops turn by turn, failures. Predicts latency.

Each replica does what serving/engine does: sessions are opened by two helpers; one turn of the loop is a step of all decoding
lanes, then at most a segment of prompt by those that read; the journal writes what turns leave to it and only then hands it out:
first and last tokens at once, the others at its pace. Seconds come from measured `Figures`.
"""

import functools
import heapq
import math
import random
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from serving.engine.engine import SHARE
from serving.engine.journal import PACE
from serving.planning.figures import Figures
from serving.sessions.store import LEASE_SECONDS

HELPERS = 2
"""Threads of an engine that open sessions."""
NOTICED = 0.1
"""Seconds until a stream is taken up elsewhere after its replica was killed (measured with Ray: 0.03 to 0.13)."""
RESTART = 30.0
"""Seconds until a killed replica is replaced: process, torch and weights."""


@dataclass(frozen=True)
class Arrival:
    """One turn of a session: so many tokens to read, so many to generate."""

    at: float
    session: int
    prompt: int
    output: int
    tail: int
    """Tokens behind the session's snapshot, read again to resume; 0: a new session."""


@dataclass(frozen=True)
class Load:
    """What comes in."""

    rate: float
    """Turns per second."""
    prompt: float
    """Tokens of a prompt, on average."""
    output: float
    """Tokens of an answer, on average."""
    turns: float = 10.0
    """Turns of a session, on average."""
    fixed: bool = False
    """All prompts and answers have the average length, instead of exponentially distributed ones."""

    def arrivals(self, seconds: float, segment: int, rng: random.Random, sessions: int = 1_000_000) -> list[Arrival]:
        """Poisson arrivals for so many seconds."""
        found, now = [], 0.0
        while (now := now + rng.expovariate(self.rate)) < seconds:
            new = rng.random() < 1 / self.turns
            found.append(
                Arrival(
                    now, rng.randrange(sessions), self._length(self.prompt, rng), self._length(self.output, rng),
                    0 if new else rng.randint(1, segment),
                )
            )  # fmt: skip
        return found

    def _length(self, mean: float, rng: random.Random) -> int:
        return max(1, round(mean if self.fixed else rng.expovariate(1 / mean)))


@dataclass(frozen=True)
class Cluster:
    """What serves it."""

    replicas: int
    lanes: int = 32
    queue: int = 64
    """Requests that may wait at one replica; more are refused."""
    overhead: float = 0.01
    """Seconds between client and engine and back: HTTP, Ray."""
    lease: float = LEASE_SECONDS
    """Seconds that a killed replica's sessions stay locked."""


@dataclass
class Prediction:
    """What clients would see."""

    first_token: list[float] = field(default_factory=list)
    gaps: list[tuple[float, int]] = field(default_factory=list)
    """Seconds between tokens, and how many tokens waited so long: each of an event its share of the time since the last one."""
    refused: int = 0
    taken_up: int = 0
    """Streams that went on at another replica after theirs was lost."""
    completed: int = 0
    tokens: int = 0
    occupancy: float = 0.0
    """Share of the lanes that were decoding, over time."""
    seconds: float = 0.0

    def first_token_at(self, share: float) -> float:
        """The time within which this share of requests has its first token."""
        return quantile([(x, 1) for x in self.first_token], share)

    def gap_at(self, share: float) -> float:
        """The time that this share of the pauses between tokens does not exceed."""
        return quantile(self.gaps, share)


def quantile(weighted: Iterable[tuple[float, int]], share: float) -> float:
    """The value below which `share` of the weight lies; nan of nothing."""
    ordered = sorted(weighted)
    left = share * sum(weight for _, weight in ordered)
    for value, weight in ordered:
        left -= weight
        if left <= 0:
            return value
    return ordered[-1][0] if ordered else math.nan


@dataclass(eq=False)
class _Job:
    arrival: Arrival
    unread: int
    position: int = 0
    """Within its segment."""
    joined: int = 0
    """Its replica's steps when it began to decode."""
    made: int = 0
    """Tokens that it had then; when it has ended, all of them."""
    ended: bool = False
    delivered: int = 0
    """Tokens that its caller has."""
    last: float = 0.0
    """When the newest of these came."""


@dataclass(eq=False)
class _Aside:
    """Work of a thread beside the loop: several share the interpreter, and each takes the longer the more there are."""

    left: float
    """Seconds that it still takes, if nothing else is beside the loop."""
    since: float
    kind: str
    details: tuple[Any, ...]
    version: int = 0
    """Raised when its end moves."""


@dataclass(eq=False)
class _Replica:
    number: int
    alive: bool = True
    life: int = 0
    """Raised by a failure: what a dead one had planned does not happen."""
    running: bool = False
    queue: deque[_Job] = field(default_factory=deque)
    to_open: deque[_Job] = field(default_factory=deque)
    opening: list[_Job] = field(default_factory=list)
    reading: deque[_Job] = field(default_factory=deque)
    decoding: list[tuple[int, int, _Job]] = field(default_factory=list)
    """A heap by the step in which each has its last token: between joining and leaving nobody looks at them one by one."""
    aside: dict[int, "_Aside"] = field(default_factory=dict)
    """What helpers and the journal are at."""
    steps: int = 0
    stalled: float = 0.0
    """Seconds that the loop has yet to lose to what other threads of its process do."""
    # the journal
    held: dict[_Job, None] = field(default_factory=dict)
    """Those with tokens that their callers do not have yet, or will get."""
    urgent: list[_Job] = field(default_factory=list)
    """Those of them whose first or last token waits."""
    committing: bool = False
    paced: float = -math.inf
    """When the journal last wrote what all had."""
    timer: float = -math.inf
    """When it will look again by itself."""

    @property
    def active(self) -> int:
        return len(self.to_open) + len(self.opening) + len(self.reading) + len(self.decoding)

    def made(self, job: _Job) -> int:
        """Tokens that a job has so far."""
        return job.made if job.ended else job.made + self.steps - job.joined


class Simulation:
    """One run."""

    def __init__(self, figures: Figures, cluster: Cluster) -> None:
        self.figures, self.cluster = figures, cluster
        self._step, self._read = functools.cache(figures.step_seconds), functools.cache(figures.read_seconds)
        self._loop = figures.loop_share()
        self.replicas = [_Replica(number) for number in range(cluster.replicas)]
        self.found = Prediction()
        self._events: list[tuple[float, int, str, tuple[Any, ...]]] = []
        self._count = 0
        self._rng = random.Random(0)

    def run(self, arrivals: Sequence[Arrival], failures: Sequence[tuple[float, int]] = ()) -> Prediction:
        """What `arrivals` see; `failures`: when which replica is killed."""
        for arrival in arrivals:
            self._at(arrival.at, "arrive", _Job(arrival, arrival.tail + arrival.prompt))
        for when, number in failures:
            self._at(when, "fail", self.replicas[number % len(self.replicas)])
        now = 0.0
        while self._events:
            now, _, kind, details = heapq.heappop(self._events)
            getattr(self, f"_on_{kind}")(now, *details)
        self.found.seconds = now
        self.found.occupancy /= max(now, 1e-9) * len(self.replicas) * self.cluster.lanes
        return self.found

    def _at(self, when: float, kind: str, *details: Any) -> None:
        self._count += 1
        heapq.heappush(self._events, (when, self._count, kind, details))

    # --- what happens ------------------------------------------------------------------------------------------

    def _on_arrive(self, now: float, job: _Job) -> None:
        alive = [replica for replica in self.replicas if replica.alive]
        if not alive:
            self._at(now + 1.0, "arrive", job)
            return
        replica = alive[job.arrival.session % len(alive)]
        if len(replica.queue) >= self.cluster.queue and replica.active >= self.cluster.lanes:
            self.found.refused += 1
            return
        replica.queue.append(job)
        self._admit(now, replica)

    def _admit(self, now: float, replica: _Replica) -> None:
        """The loop looks at what has come, as it does between two turns, and begins the next one."""
        if replica.running:
            return
        while replica.queue and replica.active < self.cluster.lanes:
            replica.to_open.append(replica.queue.popleft())
        self._help(now, replica)
        if replica.reading or replica.decoding:
            self._turn(now, replica)

    def _help(self, now: float, replica: _Replica) -> None:
        """Helpers that are free open sessions."""
        while replica.to_open and len(replica.opening) < HELPERS:
            job = replica.to_open.popleft()
            replica.opening.append(job)
            seconds = self.figures.open_seconds(len(replica.decoding), self._rng.random())
            if replica.running or replica.reading or replica.decoding:
                replica.stalled += self.figures.stall_seconds(len(replica.decoding))
            self._beside(now, replica, seconds, "opened", job)

    def _beside(self, now: float, replica: _Replica, seconds: float, kind: str, *details: Any) -> None:
        """A thread begins something that would take so many seconds if it were the only one beside the loop."""
        self._pass(now, replica)
        self._count += 1
        replica.aside[self._count] = _Aside(seconds, now, kind, details)
        self._schedule(now, replica)

    def _slower(self, replica: _Replica) -> float:
        """How many times longer each takes than it would alone: the loop takes its part of the interpreter too."""
        loop = self._loop if replica.running or replica.reading or replica.decoding else 0.0
        return (loop + len(replica.aside)) / (loop + 1)

    def _pass(self, now: float, replica: _Replica) -> None:
        slower = self._slower(replica) if replica.aside else 1.0
        for work in replica.aside.values():
            work.left, work.since = max(0.0, work.left - (now - work.since) / slower), now

    def _schedule(self, now: float, replica: _Replica) -> None:
        slower = self._slower(replica) if replica.aside else 1.0
        for key, work in replica.aside.items():
            work.version += 1
            self._at(now + work.left * slower, "aside", replica, replica.life, key, work.version)

    def _on_aside(self, now: float, replica: _Replica, life: int, key: int, version: int) -> None:
        if life != replica.life or key not in replica.aside or replica.aside[key].version != version:
            return
        self._pass(now, replica)
        work = replica.aside.pop(key)
        self._schedule(now, replica)
        getattr(self, f"_on_{work.kind}")(now, replica, replica.life, *work.details)

    def _on_opened(self, now: float, replica: _Replica, life: int, job: _Job) -> None:
        if life == replica.life:
            replica.opening.remove(job)
            replica.reading.append(job)
            self._help(now, replica)
            self._admit(now, replica)

    def _turn(self, now: float, replica: _Replica) -> None:
        """One turn of the loop begins: how long it takes and who has a token at its end."""
        t = self.figures.segment
        stepped = len(replica.decoding)
        seconds = replica.stalled + (self._step(stepped) if stepped else 0.0)
        replica.stalled = 0.0
        budget, first = t, []
        while replica.reading:
            job = replica.reading[0]
            portion = min(t - job.position % t, job.unread)
            cost = max(portion, t // SHARE, 1)
            if cost > budget:
                break
            budget -= cost
            replica.reading.popleft()
            seconds += self._read(portion)
            job.position += portion
            job.unread -= portion
            if job.unread:
                replica.reading.append(job)
            else:
                first.append(job)
        replica.running = True
        self._at(now + seconds, "turned", replica, replica.life, now, stepped, first)

    def _on_turned(self, now: float, replica: _Replica, life: int, began: float, stepped: int, first: list[_Job]) -> None:
        self.found.occupancy += (now - began) * stepped
        if life != replica.life:
            return
        replica.running = False
        if stepped:  # every lane has its next token
            replica.steps += 1
            while replica.decoding and replica.decoding[0][0] <= replica.steps:
                self._end(replica, heapq.heappop(replica.decoding)[2])
        for job in first:
            replica.held[job] = None
            job.made, job.joined = job.delivered + 1, replica.steps
            if job.made == job.arrival.output:
                self._end(replica, job)
            else:
                replica.urgent.append(job)
                self._count += 1
                heapq.heappush(replica.decoding, (replica.steps + job.arrival.output - job.made, self._count, job))
        self._journal(now, replica)
        self._admit(now, replica)

    def _end(self, replica: _Replica, job: _Job) -> None:
        job.made, job.ended = job.arrival.output, True
        replica.urgent.append(job)

    def _journal(self, now: float, replica: _Replica) -> None:
        """The journal looks at what there is, unless it is busy: then it will when it is done."""
        if replica.committing:
            return
        whole = now >= replica.paced + PACE
        if whole:
            replica.paced = now
        due = [(job, replica.made(job)) for job in (replica.held if whole else dict.fromkeys(replica.urgent))]
        due = [(job, made) for job, made in due if made > job.delivered]
        if due:
            replica.urgent.clear()
            replica.committing = True
            seconds = self.figures.commit_seconds(len(due), self._rng.random())
            self._beside(now, replica, seconds, "committed", due)
        elif replica.held and not whole and replica.timer <= now:
            replica.timer = replica.paced + PACE
            self._at(replica.timer, "pace", replica, replica.life)

    def _on_pace(self, now: float, replica: _Replica, life: int) -> None:
        if life == replica.life:
            self._journal(now, replica)

    def _on_committed(self, now: float, replica: _Replica, life: int, due: list[tuple[_Job, int]]) -> None:
        if life != replica.life:
            return
        replica.committing = False
        for job, made in due:
            count = made - job.delivered
            if job.delivered == 0:
                self.found.first_token.append(now - job.arrival.at + self.cluster.overhead)
            else:
                self.found.gaps.append(((now - job.last) / count, count))
            job.delivered, job.last = made, now
            self.found.tokens += count
            if made == job.arrival.output:
                del replica.held[job]
                self.found.completed += 1
        self._journal(now, replica)

    def _on_fail(self, now: float, replica: _Replica) -> None:
        if not replica.alive:
            return
        waiting = {*replica.queue, *replica.to_open}
        lost = [*replica.queue, *replica.to_open, *replica.opening, *replica.reading, *replica.held]
        for _, _, kind, details in self._events:
            if kind == "turned" and details[0] is replica and details[1] == replica.life:
                lost += details[4]  # those whose first token the turn would have brought
        again = _Replica(replica.number, alive=False, life=replica.life + 1)
        vars(replica).update(vars(again))
        self._at(now + RESTART, "restore", replica)
        for job in lost:
            # what was under a lease waits for its end; the session is then read from its snapshot on
            wait = NOTICED + (0.0 if job in waiting else self.cluster.lease)
            fresh = job.delivered == 0
            job.unread = max(1, job.arrival.tail) + job.arrival.prompt if fresh else self.figures.segment // 2
            job.position, job.ended = 0, False
            self.found.taken_up += 1
            self._at(now + wait, "arrive", job)

    def _on_restore(self, now: float, replica: _Replica) -> None:
        replica.alive = True
        self._admit(now, replica)


def simulate(
    figures: Figures, cluster: Cluster, arrivals: Sequence[Arrival], failures: Sequence[tuple[float, int]] = ()
) -> Prediction:
    """What clients of `cluster` would see."""
    return Simulation(figures, cluster).run(arrivals, failures)
