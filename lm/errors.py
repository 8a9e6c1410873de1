"""What goes wrong in a way the user can mend: one exception, and where it becomes a message instead of a traceback."""

import reprlib
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
    """All problems of a pydantic validation, one line each: where, what is allowed, the next step, the value."""
    merged: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for number, item in enumerate(error.errors(include_url=False)):
        place = tuple(str(part) for part in item["loc"] if not str(part).startswith("function-"))
        kinds = ("list[", "literal[", "tuple[", "dict[")  # of a union's branches
        branch = next((i for i, part in enumerate(place) if part.startswith(kinds)), None)
        key = (*place, f"#{number}") if branch is None else place[:branch]
        merged.setdefault(key, []).append({**item, "place": place if branch is None else place[:branch], "path": place})
    return UserError(line for items in merged.values() for line in _lines(items, source))


_PLAIN = {
    "int": "must be a whole number; write it in digits, such as 8",
    "float": "must be a number; write it such as 0.1 or 3e-4",
    "finite": "must be a finite number; write it such as 0.1 or 3e-4",
    "bool": "must be true or false; write one of these",
    "string_type": "must be text; put it in quotes",
    "list": "must be a list; write it such as [1, 2]",
    "tuple": "must be a list; write it such as [1, 2]",
    "model": "must be a mapping of keys to values; set its keys one by one: {where}.KEY=VALUE",
    "dict": "must be a mapping of keys to values; set its keys one by one: {where}.KEY=VALUE",
    "literal": "must be {expected}; choose one of these",
    "greater_than": "must be more than {gt}; raise it",
    "greater_than_equal": "must be {ge} or more; raise it",
    "less_than": "must be less than {lt}; lower it",
    "less_than_equal": "must be {le} or less; lower it",
    "missing": "is needed, but is not there; add it",
    "extra_forbidden": "unknown key; take it out, or see the comments in configs/ for the keys there are",
}
"""Plain words for pydantic's kinds of errors, by the whole kind or by its first word."""
_BRANCHES = {"list[int]": "a list of whole numbers such as [0, 2]"}
MOST_SHOWN = 200
"""Characters of a value in a message."""
_reprs = reprlib.Repr()
_reprs.maxlevel, _reprs.maxdict, _reprs.maxlist, _reprs.maxstring, _reprs.maxother = 3, 8, 12, 120, 120


def short(value: object) -> str:
    """`value` as Python writes it, cut where it is long or deep."""
    text = _reprs.repr(value)
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


def _lines(items: list[dict[str, Any]], source: str) -> list[str]:
    """What is said of one place: `items` are several where none of a union's branches fitted."""
    item = items[0]
    where, kind = ".".join(item["place"]), str(item["type"])
    words = _PLAIN.get(kind) or _PLAIN.get(kind.split("_")[0])
    message = str(item["msg"]).removeprefix("Value error, ")
    if item["path"] != item["place"]:
        branches = dict.fromkeys(x["path"][len(x["place"])] for x in items)
        allowed = " or ".join(_BRANCHES.get(x, x.removeprefix("literal[").removesuffix("]")) for x in branches)
        message = f"must be {allowed}; choose one of these"
    elif words:
        message = words.format(where=where, **item.get("ctx", {}))
    value = item.get("input")
    # of a whole mapping only its keys were wrong, and they are named
    whole = kind == "missing" or (kind == "value_error" and isinstance(value, dict))
    shown = "" if whole else f" (got {short(value)})"
    return [f"{source}: {where + ': ' if where else ''}{line}{shown}" for line in message.splitlines()]
