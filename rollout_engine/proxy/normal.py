"""The one form in which a message is stored, whoever wrote it: so that a turn equals what the agent sends back next."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rollout_engine.formats.parts import calls_of, content_of, parts_of
from rollout_engine.models.wire import encode
from rollout_engine.types import Message

_EMPTY: tuple[Any, ...] = (None, [], {}, "")
_NOT_SENT_BACK = frozenset(
    {"reasoning_content", "reasoning", "reasoning_blocks", "refusal", "annotations", "name", "provider_specific_fields"}
)
"""Many agents leave these out of their next request, or add them (litellm); the conversation is the same without."""


def normal(message: Message) -> Message:
    """Compact tool arguments, text without blanks at its end, no empty fields. Idempotent."""
    calls = calls_of(message)
    content = message.get("content")
    kept: Message = {"role": message.get("role"), "content": _content(content) if content else None}
    if kept["content"] is None and not calls:
        kept["content"] = ""
    for name, value in message.items():
        if name not in ("role", "content", "tool_calls") and value not in _EMPTY:
            kept[name] = value
    if calls:
        kept["tool_calls"] = [_call(call) for call in calls]
    return kept


def same(one: Message, other: Message) -> bool:
    """Whether two messages in normal form say the same: ids, thoughts and what else is not sent back do not count."""
    return one is other or _said(one) == _said(other)


def _said(message: Message) -> dict[str, Any]:
    said = {name: value for name, value in message.items() if name not in _NOT_SENT_BACK and name != "tool_call_id"}
    if "tool_calls" in said:
        said["tool_calls"] = [call.get("function") for call in said["tool_calls"]]
    content = said.get("content")
    # Anthropic's and Gemini's agents send a text in as many parts as they like.
    if isinstance(content, list) and all(part.get("type") == "text" for part in content):
        content = "".join(part["text"] for part in content)
    said["content"] = content or ""
    return said


def _content(content: Any) -> Any:
    if isinstance(content, str):
        return content.rstrip() or None
    return content_of(parts_of(content))


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in call.items() if name != "index"}
    function = kept.get("function")
    if isinstance(function, dict) and isinstance(function.get("arguments"), str):
        kept["function"] = {**function, "arguments": compact(function["arguments"])}
    return kept


def compact(arguments: str) -> str:
    """JSON without blanks; what is no JSON object stays as it is."""
    try:
        data = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        return arguments
    return encode(data) if isinstance(data, dict) else arguments
