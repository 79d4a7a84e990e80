"""Turns what is wrong with an input into plain sentences that name the field, what was found, and what to do."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from rollout_engine.errors import InputError
from rollout_engine.plugins import did_you_mean

M = TypeVar("M", bound=BaseModel)
Path = tuple[str | int, ...]

MAX_PROBLEMS = 20
"""A check stops after this many problems, and lists them in one error."""
MAX_FOUND_CHARS = 60
"""How much of a wrong value a message repeats."""
MAX_NAMED_FIELDS = 40

_KINDS: dict[str, str] = {
    "string_type": "text",
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "dict_type": "an object",
    "mapping_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "list_type": "a list",
    "tuple_type": "a list",
    "none_required": "null",
    "literal_error": "one of {expected}",
    "string_pattern_mismatch": "text that matches {pattern}",
    "string_too_short": "text of at least {min_length} characters",
    "string_too_long": "text of at most {max_length} characters",
    "too_short": "a list of at least {min_length}",
    "greater_than": "greater than {gt:g}",
    "greater_than_equal": "at least {ge:g}",
    "less_than": "less than {lt:g}",
    "less_than_equal": "at most {le:.12g}",
}


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with one field; an empty path means the whole."""

    path: Path
    message: str
    fix: str = ""

    @property
    def field(self) -> str:
        return dotted(self.path)


def dotted(path: Iterable[str | int]) -> str:
    """`models."gpt-4.1".temperature`: names that hold a dot are quoted."""
    return ".".join(f'"{part}"' if isinstance(part, str) and "." in part else str(part) for part in path)


def checked(model: type[M], data: Any, root: str = "") -> M:
    """`data` as a `model`. Raises InputError about the first problem; `root` is where the data comes from."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        first = problems_of(error, model, data)[0]
        raise InputError(first.message, dotted((root, *first.path) if root else first.path), first.fix) from error


def all_of(problems: Sequence[InputError], limit: int = MAX_PROBLEMS) -> InputError:
    """One error that lists several; `limit` is where whoever collected them would have stopped."""
    first, *others = problems[:limit]
    if not others:
        return first
    fix = f"\n  {first.fix}" if first.fix else ""
    rest = "".join(f"\n{problem}" for problem in others)
    many = f"{len(others) + 1} problems" + (", and there may be more" if len(problems) >= limit else "")
    return InputError(f"{first.message}{fix}{rest}", first.where, f"({many})")


def problems_of(error: ValidationError, model: type[BaseModel], data: Any) -> list[Problem]:
    """The findings of pydantic about `data`, one for each field, in the order of the fields."""
    groups: dict[Path, list[ErrorDetails]] = {}
    tagged: set[Path] = set()
    for detail in error.errors(include_url=False):
        path, branch = _path_in(data, detail)
        groups.setdefault(path, []).append(detail)
        if branch:
            tagged.add(path)
    # Where a union's branch fits so well that its errors lie deeper, the other branches are no news.
    shallow = {
        path for path in tagged if any(len(other) > len(path) and other[: len(path)] == path for other in groups)
    }
    return [_problem(path, details, model) for path, details in groups.items() if path not in shallow]


def found(value: Any) -> str:
    """A wrong value as its author knows it: `'abc'`, `17`, `null`, `a list`."""
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return "a list"
    text = repr(value) if not isinstance(value, bool | None) else json.dumps(value)
    return text if len(text) <= MAX_FOUND_CHARS else text[:MAX_FOUND_CHARS] + "…"


def fields_at(model: type[BaseModel], path: Path) -> list[str]:
    """The names of the fields that may stand at `path` of a model."""
    for part in path:
        if isinstance(part, int):
            continue
        field = model.model_fields.get(part)
        inner = None if field is None else _model_in(field.annotation)
        if inner is not None:
            model = inner
    return list(model.model_fields)


def _path_in(data: Any, detail: ErrorDetails) -> tuple[Path, bool]:
    """Where in the data the error is, and whether pydantic named a branch of a union on the way there."""
    path: list[str | int] = []
    branch = False
    for position, part in enumerate(detail["loc"]):
        last = position == len(detail["loc"]) - 1
        if isinstance(data, Mapping) and (part in data or (last and detail["type"] == "missing")):
            path.append(part)
            data = data.get(part)
        elif isinstance(data, list | tuple) and isinstance(part, int) and part < len(data):
            path.append(part)
            data = data[part]
        else:
            branch = True
    return tuple(path), branch


def _problem(path: Path, details: list[ErrorDetails], model: type[BaseModel]) -> Problem:
    detail = details[0]
    if detail["type"] == "missing":
        return Problem(path, "a required field is missing")
    if detail["type"] == "extra_forbidden":
        names = fields_at(model, path[:-1])
        near = did_you_mean(str(path[-1]), names).strip()
        return Problem(path, "unknown field", near or f"known fields: {', '.join(names[:MAX_NAMED_FIELDS])}")
    if detail["type"] == "value_error":
        return Problem(path, detail["msg"].removeprefix("Value error, "))
    kinds = [_KINDS[each["type"]].format(**each.get("ctx", {})) for each in details if each["type"] in _KINDS]
    if not kinds:
        return Problem(path, f"{detail['msg'][:1].lower()}{detail['msg'][1:]}, found {found(detail['input'])}")
    return Problem(path, f"must be {' or '.join(dict.fromkeys(kinds))}, found {found(detail['input'])}")


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((inner for part in get_args(annotation) if (inner := _model_in(part)) is not None), None)
