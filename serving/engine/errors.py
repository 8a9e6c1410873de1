"""What the engine answers instead of tokens."""

from lm.errors import UserError


class EngineError(UserError):
    """Base of the engine's own errors."""


class QueueFullError(EngineError):
    """Too many requests wait already: come back later."""


class StepError(EngineError):
    """The model failed in a step that this sequence was part of. Its session is as the last token received left it."""


class EngineStoppedError(EngineError):
    """The engine's loop has ended; nothing will be generated here any more."""
