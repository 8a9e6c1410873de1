"""How an engine runs, and what it counts."""

from dataclasses import dataclass
from typing import Literal

from serving.sessions.store import LEASE_SECONDS


@dataclass(frozen=True)
class EngineConfig:
    """How an engine runs."""

    lanes: int = 32
    """Sequences that are active together."""
    queue: int = 256
    """Requests that may wait besides."""
    snapshot_segments: int = 32
    """While a long prompt is read into a session, a snapshot is stored every so many segments."""
    lease: float = LEASE_SECONDS
    """Seconds after which the sessions of an engine that has crashed are free again."""
    threads: int | None = None
    """Threads of torch (None: as they are)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What the decoder computes in (the memory stays float32). bfloat16 turns the checkpoint's weights, for good."""


@dataclass
class Counters:
    """What the engine has done since it started."""

    steps: int = 0
    generated: int = 0
    prompt: int = 0
    """Ids of prompts that were read."""
    replayed: int = 0
    """Ids of tails that were read again to resume sessions: at most a segment for each."""
    opened: int = 0
    """Sessions taken from the store."""
    failures: int = 0
    """Steps in which the model failed."""
