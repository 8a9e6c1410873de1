"""Names that may stand in a store, a URL and a file name."""

import re

from serving.sessions.errors import InvalidError

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:@-]{0,127}")


def check_name(what: str, name: str) -> None:
    """InvalidError unless `name` can name a tenant, a session, a response or an owner."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise InvalidError(
            f"{what} {str(name)[:140]!r}: must be 1 to 128 letters, digits or _ . : @ - and begin with a letter or digit"
        )
