"""A request to /chat/completions <-> the engine's own form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollout_engine.formats.base import Asked, Overrides, changed, with_system
from rollout_engine.formats.check import (
    Malformed,
    field_text,
    maybe,
    maybe_number,
    maybe_texts,
    object_of,
    objects_of,
    text_of,
    wrong,
)
from rollout_engine.formats.parts import blocks_of
from rollout_engine.models.wire import request_fields, tool_json
from rollout_engine.types import Message, Sampling, ToolSpec

COMMON = ("tool_choice", "parallel_tool_calls", "response_format", "reasoning_effort", "top_k")
"""Fields that other formats have as well, under names of their own."""


def parse(body: Mapping[str, Any]) -> Asked:
    """The request. Raises Malformed."""
    messages = [_message(message, where) for message, where in objects_of(body.get("messages"), "messages")]
    if not messages:
        raise Malformed("messages", "there is no message")
    stream_options = maybe(body, "stream_options", dict) or {}
    return Asked(
        model=field_text(body, "model", ""),
        messages=messages,
        sampling=_sampling(body),
        tools=tuple(_tool(tool, where) for tool, where in objects_of(body.get("tools"), "tools")),
        stream=bool(maybe(body, "stream", bool)),
        include_usage=bool(stream_options.get("include_usage")),
    )


def _message(message: Message, where: str) -> Message:
    field_text(message, "role", where)
    content = message.get("content")
    if isinstance(content, list):
        for part, at in objects_of(content, f"{where}.content"):
            field_text(part, "type", at)
    elif content is not None and not isinstance(content, str):
        raise wrong(content, "a text or a list of parts", f"{where}.content")
    for call, at in objects_of(message.get("tool_calls"), f"{where}.tool_calls"):
        function = object_of(call.get("function"), f"{at}.function")
        field_text(function, "name", f"{at}.function")
        field_text(function, "arguments", f"{at}.function", "")
    maybe(message, "tool_call_id", str, where)
    if "reasoning_blocks" in message and "reasoning_content" in message:
        return {name: value for name, value in message.items() if name != "reasoning_content"}
    return message


def _sampling(body: Mapping[str, Any]) -> Sampling:
    limit = maybe(body, "max_completion_tokens", int)
    return Sampling(
        temperature=maybe_number(body, "temperature"),
        top_p=maybe_number(body, "top_p"),
        max_tokens=maybe(body, "max_tokens", int) if limit is None else limit,
        seed=maybe(body, "seed", int),
        stop=maybe_texts(body, "stop"),
        logprobs=bool(body.get("logprobs") or body.get("return_token_ids")),
        extra={name: body[name] for name in COMMON if body.get(name) is not None},
    )


def _tool(tool: Mapping[str, Any], where: str) -> ToolSpec:
    if tool.get("type", "function") != "function":
        raise wrong(tool.get("type"), "'function'", f"{where}.type")
    function = object_of(tool.get("function"), f"{where}.function")
    name = text_of(function.get("name"), f"{where}.function.name")
    parameters = maybe(function, "parameters", dict, f"{where}.function")
    return ToolSpec(name, field_text(function, "description", f"{where}.function", ""), parameters or {})


def overridden(body: dict[str, Any], fixed: Overrides) -> dict[str, Any]:
    """The body with what the run fixes; the same object where that changes nothing."""
    changes = _changes(body, fixed)
    return changed(body, changes)


def _changes(body: Mapping[str, Any], fixed: Overrides) -> dict[str, Any]:
    sampling = fixed.sampling
    changes: dict[str, Any] = dict(sampling.extra)
    for name in ("temperature", "top_p", "seed"):
        if getattr(sampling, name) is not None:
            changes[name] = getattr(sampling, name)
    if sampling.max_tokens is not None:
        field = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
        changes[field] = sampling.max_tokens
    if sampling.stop:
        changes["stop"] = list(sampling.stop)
    if sampling.logprobs:
        changes |= {"logprobs": True, "return_token_ids": True}
    if fixed.model is not None:
        changes["model"] = fixed.model
    if fixed.tools is not None:
        changes["tools"] = [tool_json(tool) for tool in fixed.tools]
    if fixed.system is not None:
        changes["messages"] = with_system(body["messages"], fixed.system)
    if body.get("stream"):
        # Without it a streamed answer has no usage, and nothing could be counted.
        changes["stream_options"] = {**(body.get("stream_options") or {}), "include_usage": True}
    return changes


def request_of(
    model: str, messages: Sequence[Message], sampling: Sampling, tools: Sequence[ToolSpec], stream: bool
) -> dict[str, Any]:
    """The body of a request to a server."""
    fields = request_fields(model, sampling, tools, stream)
    return {**fields, "messages": [sendable(message) for message in messages]}


def sendable(message: Message) -> Message:
    """A message as chat servers take it: thoughts as text, and nothing that only other formats know."""
    if "reasoning_blocks" not in message:
        return message
    kept = {name: value for name, value in message.items() if name != "reasoning_blocks"}
    text = "".join(str(block.get("text") or "") for block in blocks_of(message))
    return {**kept, "reasoning_content": text} if text else kept
