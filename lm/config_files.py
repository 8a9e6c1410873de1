"""Configuration files of any schema: the base of all schemas, YAML read as plain values, `key.path=value` laid over them.

    config = validate(SomeSchema, override(read_mapping(path), ["key.path=value"]), str(path))

Mistakes are reported all at once, each with its place, its value and what is allowed (lm/errors.py).
"""

import copy
import functools
import json
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ModelWrapValidatorHandler, ValidationError, model_validator
from pydantic_core import InitErrorDetails

from lm.errors import UserError, from_validation, short

MOST_LEVELS = 32
"""Deepest nesting of a configuration's values."""


class Schema(BaseModel):
    """Base of all configuration parts: unknown keys are errors, numbers finite; values do not change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    # of the whole part, not of each field: a field that tells parts of a union apart may not have a validator of its own
    @model_validator(mode="wrap")
    @classmethod
    def _no_bool_for_a_number(cls, values: Any, handler: ModelWrapValidatorHandler["Schema"]) -> "Schema":
        wrong = []
        for name, field in cls.model_fields.items() if isinstance(values, dict) else ():
            annotation: Any = field.annotation
            value, kinds = values.get(name), _kinds(annotation)
            given = value if isinstance(value, list) else [value]
            if any(isinstance(x, bool) for x in given) and kinds & {int, float} and bool not in kinds:
                said = "must be a number; write it in digits (true and yes are none)"
                wrong.append(InitErrorDetails(type="value_error", loc=(name,), input=value, ctx={"error": said}))
        if not wrong:
            return handler(values)
        try:
            handler(values)
        except ValidationError as error:
            named = {item["loc"] for item in wrong if "loc" in item}
            wrong += [details(dict(item)) for item in error.errors(include_url=False) if item["loc"] not in named]
        raise ValidationError.from_exception_data(cls.__name__, wrong)


@functools.cache
def _kinds(annotation: Any) -> frozenset[Any]:
    """All types that an annotation is made of."""
    return frozenset([annotation]).union(*(_kinds(part) for part in get_args(annotation) if not isinstance(part, str)))


def details(item: dict[str, Any]) -> InitErrorDetails:
    """An error of pydantic's, to be raised again."""
    return InitErrorDetails(type=item["type"], loc=item["loc"], input=item["input"], ctx=item.get("ctx", {}))


AnySchema = TypeVar("AnySchema", bound=Schema)


def configs_folder() -> Path:
    """The shipped configuration files: inside the package, or beside it in a checkout."""
    packaged = Path(str(resources.files("lm"))) / "configs"
    return packaged if packaged.is_dir() else Path(__file__).parent.parent / "configs"


def load_config(schema: type[AnySchema], name: str) -> AnySchema:
    """A shipped configuration file by its name in configs/, without the suffix."""
    return validate(schema, read_mapping(configs_folder() / f"{name}.yaml"), name)


# beside its own errors PyYAML lets through what its constructors stumble over: `!!int x`, `!!bool maybe`, `!!timestamp x`
_UNREADABLE = (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, RecursionError)


def read_mapping(path: Path) -> dict[str, Any]:
    """The mapping in a YAML or JSON file: text, numbers, true, false, null, lists and mappings of these."""
    try:
        text = path.read_text("utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as a configuration: {error}; give a YAML or JSON file") from error
    try:
        value = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except RecursionError as error:
        raise UserError(f"{path}: nested too deeply; a configuration has at most {MOST_LEVELS} levels") from error
    except _UNREADABLE as error:
        raise UserError(f"{path}: cannot be read as a configuration: {error}; correct it, or quote what is text") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: holds {type(value).__name__}, but a configuration is a mapping of keys to values")
    if problems := list(_not_plain(value, str(path))):
        raise UserError(problems)
    return value


def _not_plain(value: Any, place: str, above: tuple[int, ...] = (), seen: set[int] | None = None) -> Iterator[str]:
    """What in `value` no configuration can hold, each with its place."""
    seen = set() if seen is None else seen  # a list that aliases repeat is looked at once
    if value is None or isinstance(value, str | bool | int | float):
        return
    if not isinstance(value, dict | list):
        kind = type(value).__name__
        yield (
            f"{place}: {short(value)} is of the kind {kind}; allowed are text, numbers, true, false, null, lists and mappings: "
            "put it in quotes if it is text, or write a list as [a, b]"
        )
        return
    if id(value) in above:
        yield f"{place}: holds itself (a recursive anchor); write the value out"
        return
    if len(above) >= MOST_LEVELS:
        yield f"{place[:80]}...: nested too deeply; a configuration has at most {MOST_LEVELS} levels"
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    for key, part in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(value, dict) and not isinstance(key, str):
            yield f"{place}: key {short(key)} is of the kind {type(key).__name__}; keys are text: put it in quotes"
        else:
            yield from _not_plain(part, f"{place}: {key}", (*above, id(value)), seen)


def override(values: dict[str, Any], overrides: Sequence[str], problems: list[str] | None = None) -> dict[str, Any]:
    """`values` with each `key.path=value` applied; values are read as YAML.

    What cannot be applied is added to `problems` where they are given, and is a UserError otherwise.
    """
    result, found = copy.deepcopy(values), [] if problems is None else problems
    for item in overrides:
        key, equals, text = item.partition("=")
        shown = f"--set {short(item)}"
        if not equals or not key:
            found.append(f"{shown}: must look like key.path=value, for example memory.top_k=null")
            continue
        try:
            value = yaml.safe_load(text)
        except RecursionError:
            found.append(f"{shown}: nested too deeply; a value has at most {MOST_LEVELS} levels")
            continue
        except _UNREADABLE:
            found.append(f"{shown}: {short(text)} is not a YAML value; quote it, or write lists as [1, 2]")
            continue
        *parents, last = key.split(".")
        if len(parents) > MOST_LEVELS:
            found.append(f"{shown}: nested too deeply; a key has at most {MOST_LEVELS} levels")
            continue
        if odd := list(_not_plain(value, f"--set {key}")):
            found.extend(odd)
            continue
        place = result
        for part in parents:
            if not isinstance(place.get(part), dict):
                place[part] = {}
            place = place[part]
        place[last] = value
    if problems is None and found:
        raise UserError(found)
    return result


def validate(schema: type[AnySchema], values: dict[str, Any], source: str) -> AnySchema:
    """`values` as `schema`; UserError with every problem otherwise."""
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        raise from_validation(error, source) from error
