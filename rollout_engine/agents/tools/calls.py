"""The tool calls in a model's message: read as they come, however malformed."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from rollout_engine.models.wire import clean
from rollout_engine.types import Message

_MAX_QUOTED = 200


class Call(NamedTuple):
    """One call. `fault` says what is wrong with its form; the arguments are then empty."""

    id: str
    name: str
    arguments: dict[str, Any]
    fault: str | None = None


def calls_of(message: Message, turn: int) -> list[Call]:
    """The calls of a message, in their order; one without an id gets one."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return []
    return [_call(each, f"call-{turn}-{index}") for index, each in enumerate(calls)]


def sendable(message: Message, calls: list[Call]) -> Message:
    """The message as servers take it back: some refuse a conversation that holds a malformed call.

    The model learns what it did from the answer, which quotes it.
    """
    sent = [
        given if call.fault is None and _is_whole(given) else _repaired(call)
        for given, call in zip(message["tool_calls"], calls, strict=True)
    ]
    return {**message, "tool_calls": sent}


def answer_to(call: Call, text: str) -> Message:
    return {"role": "tool", "tool_call_id": call.id, "content": text}


def _is_whole(given: dict[str, Any]) -> bool:
    arguments = given["function"].get("arguments")
    return bool(given.get("id") and given.get("type") == "function" and arguments and isinstance(arguments, str))


def _repaired(call: Call) -> dict[str, Any]:
    function = {"name": call.name or "invalid", "arguments": json.dumps(call.arguments)}
    return {"id": call.id, "type": "function", "function": function}


def _call(given: Any, fallback_id: str) -> Call:
    if not isinstance(given, dict):
        return Call(fallback_id, "", {}, f"the call is no object: {_quoted(given)}")
    call_id = given.get("id")
    call_id = clean(call_id) if isinstance(call_id, str) and call_id else fallback_id
    function = given.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
        return Call(call_id, "", {}, f"the call names no function: {_quoted(given)}")
    name, given_arguments = clean(function["name"]), function.get("arguments")
    # Nothing at all is how some models call a function that takes nothing.
    arguments = {} if given_arguments in (None, "") else given_arguments
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments, parse_constant=_no_number)
        except (ValueError, RecursionError) as error:
            why = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
            return Call(call_id, name, {}, f"the arguments are no JSON ({why}): {_quoted(given_arguments)}")
    if not isinstance(arguments, dict):
        return Call(call_id, name, {}, f"the arguments are no JSON object: {_quoted(given_arguments)}")
    return Call(call_id, name, arguments)


def _no_number(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON number")


def _quoted(value: Any) -> str:
    text = clean(value) if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _MAX_QUOTED else text[:_MAX_QUOTED] + "…"
