"""The generation engine: one loop per process that steps all active sequences together, durable where they have a session."""

from serving.engine.config import EngineConfig
from serving.engine.engine import Engine
from serving.engine.errors import EngineError, EngineStoppedError, QueueFullError, StepError
from serving.engine.request import Event, Request, Usage
from serving.engine.stream import Stream

__all__ = [
    "Engine", "EngineConfig", "EngineError", "EngineStoppedError", "Event", "QueueFullError", "Request", "StepError", "Stream",
    "Usage",
]  # fmt: skip
