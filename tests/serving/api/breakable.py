"""The service with engines whose loop ends when they are told to: serve run tests.serving.api.breakable:build checkpoint=DIR."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from serving import app, deployments
from serving.api.engines import Chunk
from serving.engine import Request

BREAK = "break the loop"


class Breakable(deployments.EngineReplica):
    """An engine replica that a prompt can break."""

    async def generate(self, request: Request, fingerprint: str, progress: bool) -> AsyncGenerator[Chunk | Exception]:
        def fail() -> bool:
            raise RuntimeError("broken by a test")

        if bytes(request.prompt) == BREAK.encode():
            self.engine._turn = fail
        async with aclosing(super().generate(request, fingerprint, progress)) as chunks:
            async for chunk in chunks:
                yield chunk


def build(args: dict[str, Any]) -> Any:
    deployments.EngineReplica = Breakable  # type: ignore[misc]
    return app.build(args)
