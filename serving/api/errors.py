"""Every error as an OpenAI error object with a status: one table from what the parts raise to what a client sees."""

import math
from typing import Any

from lm.errors import UserError
from serving.engine.errors import EngineStoppedError, QueueFullError, StepError
from serving.sessions.errors import (
    BusyError,
    ConflictError,
    DamagedError,
    ExistsError,
    FullError,
    InvalidError,
    KeyReusedError,
    NotFoundError,
    NotRetainedError,
    StaleError,
    UnavailableError,
)  # fmt: skip

TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    405: "invalid_request_error", 408: "timeout_error", 409: "conflict_error", 413: "invalid_request_error",
    415: "invalid_request_error", 422: "invalid_request_error", 429: "rate_limit_error", 499: "cancelled",
    500: "server_error", 503: "overloaded_error",
}  # fmt: skip
TABLE: list[tuple[type[BaseException], int, str]] = [
    (BusyError, 409, "session_busy"),
    (StaleError, 409, "session_lost"),
    (KeyReusedError, 409, "idempotency_key_reused"),
    (ConflictError, 409, "version_conflict"),
    (ExistsError, 409, "session_exists"),
    (NotRetainedError, 409, "position_not_retained"),
    (NotFoundError, 404, "not_found"),
    (DamagedError, 500, "session_damaged"),
    (FullError, 503, "store_full"),
    (UnavailableError, 503, "store_unavailable"),
    (InvalidError, 400, "invalid_value"),
    (QueueFullError, 429, "overloaded"),
    (StepError, 500, "model_failed"),
    (EngineStoppedError, 503, "engine_stopped"),
    (UserError, 400, "invalid_value"),
]
"""The first line that fits."""
RETRY = {"overloaded": 1.0, "engine_stopped": 2.0, "store_unavailable": 2.0, "engine_lost": 1.0, "service_overloaded": 1.0}
"""Seconds after which trying again makes sense."""


class ApiError(Exception):
    """An answer that is an error."""

    def __init__(
        self, status: int, code: str, message: str, param: str | None = None, retry: float | None = None, **more: Any
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.message, self.param, self.more = status, code, message, param, more
        self.retry = RETRY.get(code) if retry is None else retry
        self.final = False
        """OpenAI's clients are told not to try again by themselves."""

    def body(self) -> dict[str, Any]:
        """The OpenAI error object."""
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        param = None if self.param is None else _printable(self.param)
        return {"error": {"message": _printable(self.message), "type": kind, "param": param, "code": self.code, **self.more}}

    def headers(self) -> dict[str, str]:
        """What stands beside it."""
        found = {} if self.retry is None else {"Retry-After": str(max(1, math.ceil(self.retry)))}
        found |= {"x-should-retry": "false"} if self.final else {}
        return found | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})


def as_api_error(error: BaseException) -> ApiError:
    """What a client is told of an exception. Of one that nobody expected, nothing but that it happened."""
    if isinstance(error, ApiError):
        return error
    for kind, status, code in TABLE:
        if isinstance(error, kind):
            message = "; ".join(error.problems) if isinstance(error, UserError) else str(error)
            retry = max(0.2, error.seconds) if isinstance(error, BusyError) else None
            more: dict[str, Any] = {"version": error.found} if isinstance(error, ConflictError) and error.found else {}
            return ApiError(status, code, message, retry=retry, **more)
    return ApiError(500, "internal_error", "the service failed; its log has the reason under this answer's X-Request-Id")


def _printable(text: str) -> str:
    """Text that can be sent, whatever a client has put into it."""
    return text.encode("utf-8", "replace").decode()
