"""A request to /v1/messages <-> the engine's own form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollout_engine.formats.anthropic.blocks import assistant_message, parts_at, turns_of, user_messages
from rollout_engine.formats.base import Asked, Overrides, changed
from rollout_engine.formats.check import (
    Malformed,
    field_text,
    maybe,
    maybe_number,
    maybe_texts,
    objects_of,
)
from rollout_engine.formats.choice import ToolChoice, choice_of, choice_value, schema_format, schema_of
from rollout_engine.formats.parts import content_of, plain_text
from rollout_engine.types import Message, Sampling, ToolSpec

DEFAULT_MAX_TOKENS = 8192
"""The format demands a limit of completion tokens; this one where the run sets none."""
_TRANSLATED = frozenset({"tool_choice", "parallel_tool_calls", "response_format", "reasoning_effort", "messages"})
_MODES = {"auto": "auto", "any": "required", "none": "none"}


def parse(body: Mapping[str, Any]) -> Asked:
    """The request. Raises Malformed."""
    messages = _system(body.get("system"))
    for message, where in objects_of(body.get("messages"), "messages"):
        role, content = field_text(message, "role", where), message.get("content")
        if role == "assistant":
            messages.append(assistant_message(content, f"{where}.content"))
        elif role == "user":
            messages += user_messages(content, f"{where}.content")
        elif role == "system":  # agents send these among the others, too
            messages.append({"role": "system", "content": content_of(parts_at(content, f"{where}.content")) or ""})
        else:
            raise Malformed(f"{where}.role", f"found {role!r:.80}, where 'user' or 'assistant' is wanted")
    if not messages:
        raise Malformed("messages", "there is no message")
    tools = [_tool(tool, at) for tool, at in objects_of(body.get("tools"), "tools") if _is_ours(tool)]
    return Asked(
        model=field_text(body, "model", ""),
        messages=messages,
        sampling=_sampling(body),
        tools=tuple(tools),
        stream=bool(maybe(body, "stream", bool)),
    )


def _system(system: Any) -> list[Message]:
    content = content_of(parts_at(system, "system"))
    return [{"role": "system", "content": content}] if content else []


def _is_ours(tool: Mapping[str, Any]) -> bool:
    """Whether the agent runs the tool itself; the provider's own tools exist only there."""
    return tool.get("type") in (None, "custom")


def _tool(tool: Mapping[str, Any], where: str) -> ToolSpec:
    schema = maybe(tool, "input_schema", dict, where)
    return ToolSpec(field_text(tool, "name", where), field_text(tool, "description", where, ""), schema or {})


def _sampling(body: Mapping[str, Any]) -> Sampling:
    return Sampling(
        temperature=maybe_number(body, "temperature"),
        top_p=maybe_number(body, "top_p"),
        max_tokens=maybe(body, "max_tokens", int),
        stop=maybe_texts(body, "stop_sequences"),
        extra=_extra(body),
    )


def _extra(body: Mapping[str, Any]) -> dict[str, Any]:
    extra: dict[str, Any] = {}
    choice = maybe(body, "tool_choice", dict)
    if choice is not None:
        mode = field_text(choice, "type", "tool_choice")
        if mode == "tool":
            extra["tool_choice"] = choice_value(ToolChoice("function", field_text(choice, "name", "tool_choice")))
        else:
            extra["tool_choice"] = _MODES.get(mode, "auto")
        if choice.get("disable_parallel_tool_use"):
            extra["parallel_tool_calls"] = False
    output = maybe(body, "output_config", dict) or {}
    form = output.get("format")
    if isinstance(form, dict) and isinstance(form.get("schema"), dict):
        extra["response_format"] = schema_format(form["schema"])
    if isinstance(output.get("effort"), str):
        extra["reasoning_effort"] = output["effort"]
    if (top_k := maybe(body, "top_k", int)) is not None:
        extra["top_k"] = top_k
    return extra


def overridden(body: dict[str, Any], fixed: Overrides) -> dict[str, Any]:
    """The body with what the run fixes; the same object where that changes nothing."""
    changes = _sampling_fields(fixed.sampling)
    if fixed.model is not None:
        changes["model"] = fixed.model
    if fixed.system is not None:
        changes["system"] = fixed.system
    if fixed.tools is not None:
        changes["tools"] = [tool_json(tool) for tool in fixed.tools]
    return changed(body, changes)


def _sampling_fields(sampling: Sampling) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name in ("temperature", "top_p", "max_tokens"):
        if getattr(sampling, name) is not None:
            fields[name] = getattr(sampling, name)
    if sampling.stop:
        fields["stop_sequences"] = list(sampling.stop)
    return fields | _extra_fields(sampling.extra)


def _extra_fields(extra: Mapping[str, Any]) -> dict[str, Any]:
    fields = {name: value for name, value in extra.items() if name not in _TRANSLATED}
    choice = choice_of(extra.get("tool_choice"))
    if choice is not None or extra.get("parallel_tool_calls") is False:
        fields["tool_choice"] = _choice_json(choice or ToolChoice("auto"), extra.get("parallel_tool_calls"))
    output = dict(fields.get("output_config") or {})
    schema = schema_of(extra.get("response_format"))
    if schema is not None:
        output["format"] = {"type": "json_schema", "schema": schema}
    if extra.get("reasoning_effort") is not None:
        output["effort"] = extra["reasoning_effort"]
    return {**fields, "output_config": output} if output else fields


def _choice_json(choice: ToolChoice, parallel: Any) -> dict[str, Any]:
    if choice.mode == "function":
        found: dict[str, Any] = {"type": "tool", "name": choice.name}
    else:
        found = {"type": {"required": "any"}.get(choice.mode, choice.mode)}
    if parallel is False and choice.mode != "none":
        found["disable_parallel_tool_use"] = True
    return found


def tool_json(tool: ToolSpec) -> dict[str, Any]:
    """A tool as the request names it; the schema must be an object's."""
    schema = {"type": "object", **tool.parameters}
    return {"name": tool.name, "description": tool.description, "input_schema": schema}


def request_of(
    model: str, messages: Sequence[Message], sampling: Sampling, tools: Sequence[ToolSpec], stream: bool
) -> dict[str, Any]:
    """The body of a request to a server."""
    lead = 0
    while lead < len(messages) and messages[lead].get("role") in ("system", "developer"):
        lead += 1
    body: dict[str, Any] = {"model": model, "max_tokens": DEFAULT_MAX_TOKENS, **_sampling_fields(sampling)}
    system = "\n\n".join(plain_text(message.get("content")) for message in messages[:lead])
    if system:
        body["system"] = system
    if tools:
        body["tools"] = [tool_json(tool) for tool in tools]
    if stream:
        body["stream"] = True
    return {**body, "messages": list(turns_of(messages[lead:]))}
