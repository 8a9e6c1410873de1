"""Limits per tenant: requests and tokens per minute as buckets that fill steadily. One `Buckets` serves all ingress replicas."""

import time
from collections.abc import Callable
from typing import Protocol

from serving.config import Limits


class Limiter(Protocol):
    """Who counts."""

    async def take(self, tenant: str, limits: Limits, tokens: int) -> tuple[str, float] | None:
        """Take one request and so many tokens; or which limit is in the way, and for how many seconds."""

    async def give_back(self, tenant: str, limits: Limits, tokens: int) -> None:
        """Tokens that were taken but not used."""


class Buckets:
    """A bucket per tenant and limit, holding a minute's worth at most."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self._levels: dict[tuple[str, str], tuple[float, float]] = {}
        """What is left, and when that was so."""

    async def take(self, tenant: str, limits: Limits, tokens: int) -> tuple[str, float] | None:
        """See Limiter. More tokens than a minute's worth are let through when the bucket is full, and owed."""
        wanted = {"requests_per_minute": 1.0, "tokens_per_minute": float(tokens)}
        levels = {}
        for name, amount in wanted.items():
            limit = getattr(limits, name)
            if limit is None:
                continue
            level = self._level(tenant, name, limit)
            missing = min(amount, limit) - level
            if missing > 1e-9:
                return name, missing * 60 / limit
            levels[name] = level - amount
        for name, level in levels.items():
            self._levels[tenant, name] = (level, self.clock())
        return None

    async def give_back(self, tenant: str, limits: Limits, tokens: int) -> None:
        """See Limiter."""
        limit = limits.tokens_per_minute
        if limit is not None:
            level = self._level(tenant, "tokens_per_minute", limit)
            self._levels[tenant, "tokens_per_minute"] = (min(float(limit), level + tokens), self.clock())

    def _level(self, tenant: str, name: str, limit: int) -> float:
        now = self.clock()
        level, then = self._levels.get((tenant, name), (float(limit), now))
        return min(float(limit), level + (now - then) * limit / 60)
