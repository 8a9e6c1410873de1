"""What goes wrong in a way the user can mend: one exception, and where it becomes a message instead of a traceback."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from pydantic import ValidationError


class UserError(Exception):
    """One or more problems, each naming the value, what was allowed and what to do next. The CLI prints them, exit code 2."""

    def __init__(self, problems: str | Iterable[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


@contextmanager
def collecting() -> Iterator[list[str]]:
    """Collect every problem found in the block and raise them together at its end."""
    problems: list[str] = []
    yield problems
    if problems:
        raise UserError(problems)


@contextmanager
def noting(problems: list[str]) -> Iterator[None]:
    """Note a UserError of the block among `problems` and go on."""
    try:
        yield
    except UserError as error:
        problems.extend(error.problems)


def from_validation(error: ValidationError, source: str) -> UserError:
    """All problems of a pydantic validation, one line each: where, the value, what was allowed."""
    return UserError(line for item in error.errors(include_url=False) for line in _lines(dict(item), source))


def _lines(item: dict[str, Any], source: str) -> list[str]:
    where = ".".join(str(part) for part in item["loc"] if not str(part).startswith("function-"))
    message = str(item["msg"]).removeprefix("Value error, ")
    if item["type"] == "extra_forbidden":
        message = "unknown key; see the comments in configs/ for the keys there are"
    value = item.get("input")
    shown = "" if isinstance(value, dict) else f" (got {value!r})"
    return [f"{source}: {where + ': ' if where else ''}{line}{shown}" for line in message.splitlines()]
