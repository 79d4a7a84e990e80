"""Options of a call in chat's form: which tool must be called, and what form the answer has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class ToolChoice(NamedTuple):
    """auto, none, required (any of them), or one function."""

    mode: str
    name: str = ""


def choice_of(value: Any) -> ToolChoice | None:
    """Chat's `tool_choice`; None where it says nothing."""
    if value in ("auto", "none", "required"):
        return ToolChoice(value)
    function = value.get("function") if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return ToolChoice("function", name) if isinstance(name, str) else None


def choice_value(choice: ToolChoice) -> Any:
    """The inverse of `choice_of`."""
    if choice.mode == "function":
        return {"type": "function", "function": {"name": choice.name}}
    return choice.mode


def schema_of(response_format: Any) -> Mapping[str, Any] | None:
    """The JSON schema that chat's `response_format` asks for."""
    held = response_format.get("json_schema") if isinstance(response_format, dict) else None
    schema = held.get("schema") if isinstance(held, dict) else None
    return schema if isinstance(schema, dict) else None


def schema_format(schema: Mapping[str, Any], name: str = "answer") -> dict[str, Any]:
    """The inverse of `schema_of`."""
    return {"type": "json_schema", "json_schema": {"name": name, "schema": dict(schema)}}
