"""What a session store refuses or cannot do. All are messages for the user; the service turns each into a status."""

from lm.errors import UserError


class StoreError(UserError):
    """Base of what a store refuses or cannot do."""


class InvalidError(StoreError):
    """A request that makes no sense whatever the store holds."""


class NotFoundError(StoreError):
    """No such session, snapshot or response (or it has expired)."""


class ExistsError(StoreError):
    """The id is taken."""


class BusyError(StoreError):
    """Someone else holds the lease; `seconds` is how long it lasts unless prolonged."""

    def __init__(self, message: str, seconds: float = 0.0) -> None:
        super().__init__(message)
        self.seconds = seconds


class StaleError(StoreError):
    """The lease was lost: another writer has taken over, or the session was changed or deleted. Stop writing."""


class ConflictError(StoreError):
    """The version (or position) is not the expected one; `found` is the present one. Nothing was changed."""

    def __init__(self, message: str, found: int = 0) -> None:
        super().__init__(message)
        self.found = found


class KeyReusedError(ConflictError):
    """An idempotency key that another request has had."""


class NotRetainedError(StoreError):
    """A position that cannot be gone back to."""


class DamagedError(StoreError):
    """Stored bytes are not what was written."""


class FullError(StoreError):
    """No room: the disk, or Redis' memory. Nothing was changed."""


class UnavailableError(StoreError):
    """The store does not answer. A change may or may not have been made; committing it again is safe."""
