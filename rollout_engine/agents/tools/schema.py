"""Checks a tool's JSON schema, and a call's arguments against it.

With `jsonschema`, which knows the whole draft; Ray depends on it anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import regex
from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, ValidationError, best_match
from jsonschema.validators import extend
from referencing import Registry
from referencing.exceptions import Unresolvable

from rollout_engine.errors import InputError

PATTERN_S = 0.5
"""A pattern that takes longer than this on an argument does not match: models write the arguments."""
MAX_CHARS = 400
Fault: TypeAlias = Callable[[Mapping[str, Any]], str | None]
"""What is wrong with the arguments; None: nothing."""


def check_schema(schema: Mapping[str, Any], where: str) -> None:
    """Raises InputError where the schema is none for the arguments of a function."""
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        raise InputError(f"no JSON schema: {_said(error)}", where, "see json-schema.org, draft 2020-12") from error
    if schema.get("type") != "object":
        raise InputError("the schema of a tool is of type object", where, '{"type": "object", "properties": {...}}')


def fault_finder(schema: Mapping[str, Any]) -> Fault:
    """Checks arguments against a schema that `check_schema` has passed."""
    # An empty registry: without one, a $ref to a URL would be fetched by the host.
    validator = _Validator(schema, registry=Registry())

    def fault(arguments: Mapping[str, Any]) -> str | None:
        try:
            error = best_match(validator.iter_errors(arguments))
        except (Unresolvable, RecursionError) as unusable:
            return f"the tool's own schema cannot be used: {str(unusable)[:MAX_CHARS]}"
        return None if error is None else _said(error)

    return fault


def _said(error: ValidationError | SchemaError) -> str:
    text = error.message if len(error.message) <= MAX_CHARS else error.message[:MAX_CHARS] + "…"
    return text if error.json_path == "$" else f"{error.json_path.removeprefix('$.')}: {text}"


def _pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[ValidationError]:
    if isinstance(instance, str):
        try:
            if not regex.search(pattern, instance, timeout=PATTERN_S):
                yield ValidationError(f"{instance!r} does not match {pattern!r}")
        except (TimeoutError, regex.error):
            yield ValidationError(f"the text cannot be matched with {pattern!r}")


_Validator = extend(Draft202012Validator, {"pattern": _pattern})
