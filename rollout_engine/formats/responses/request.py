"""A request to /responses <-> the engine's own form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollout_engine.formats.base import Asked, Overrides, changed
from rollout_engine.formats.check import Malformed, field_text, maybe, maybe_number, objects_of, text_of
from rollout_engine.formats.choice import ToolChoice, choice_of, choice_value
from rollout_engine.formats.parts import plain_text
from rollout_engine.formats.responses.items import INPUT, Gatherer, input_items
from rollout_engine.types import Message, Sampling, ToolSpec

_TRANSLATED = frozenset({"tool_choice", "parallel_tool_calls", "response_format", "reasoning_effort", "messages"})
_FREE_TEXT = {"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT]}


def parse(body: Mapping[str, Any]) -> Asked:
    """The request. Raises Malformed."""
    if body.get("previous_response_id") is not None or body.get("conversation") is not None:
        where = "previous_response_id" if body.get("previous_response_id") is not None else "conversation"
        raise Malformed(where, "nothing is stored here: send the whole input")
    tools = [(tool, at) for tool, at in objects_of(body.get("tools"), "tools")]
    ours = [(tool, at) for tool, at in tools if tool.get("type", "function") in ("function", "custom")]
    return Asked(
        model=field_text(body, "model", "", ""),
        messages=_messages(body),
        sampling=_sampling(body),
        tools=tuple(_tool(tool, at) for tool, at in ours),
        stream=bool(maybe(body, "stream", bool)),
        free_text=frozenset(tool["name"] for tool, _ in ours if tool.get("type") == "custom"),
    )


def _messages(body: Mapping[str, Any]) -> list[Message]:
    gathered = Gatherer()
    instructions = body.get("instructions")
    if instructions:
        gathered.messages.append({"role": "system", "content": text_of(instructions, "instructions")})
    said = body.get("input")
    if isinstance(said, str):
        gathered.messages.append({"role": "user", "content": said})
    else:
        for item, where in objects_of(said, "input"):
            gathered.add(item, where)
        gathered.end()
    if not gathered.messages:
        raise Malformed("input", "there is no item")
    return gathered.messages


def _tool(tool: Mapping[str, Any], where: str) -> ToolSpec:
    name, about = field_text(tool, "name", where), field_text(tool, "description", where, "")
    if tool.get("type") == "custom":
        return ToolSpec(name, about, _FREE_TEXT)
    return ToolSpec(name, about, maybe(tool, "parameters", dict, where) or {})


def _sampling(body: Mapping[str, Any]) -> Sampling:
    return Sampling(
        temperature=maybe_number(body, "temperature"),
        top_p=maybe_number(body, "top_p"),
        max_tokens=maybe(body, "max_output_tokens", int),
        extra=_extra(body),
    )


def _extra(body: Mapping[str, Any]) -> dict[str, Any]:
    extra: dict[str, Any] = {}
    choice = body.get("tool_choice")
    if choice in ("auto", "none", "required"):
        extra["tool_choice"] = choice
    elif isinstance(choice, dict) and isinstance(choice.get("name"), str):
        extra["tool_choice"] = choice_value(ToolChoice("function", choice["name"]))
    if maybe(body, "parallel_tool_calls", bool) is not None:
        extra["parallel_tool_calls"] = body["parallel_tool_calls"]
    effort = (maybe(body, "reasoning", dict) or {}).get("effort")
    if isinstance(effort, str):
        extra["reasoning_effort"] = effort
    form = (maybe(body, "text", dict) or {}).get("format")
    if isinstance(form, dict) and form.get("type") == "json_schema":
        held = {name: value for name, value in form.items() if name != "type"}
        extra["response_format"] = {"type": "json_schema", "json_schema": held}
    elif isinstance(form, dict) and form.get("type") == "json_object":
        extra["response_format"] = {"type": "json_object"}
    return extra


def overridden(body: dict[str, Any], fixed: Overrides) -> dict[str, Any]:
    """The body with what the run fixes; the same object where that changes nothing."""
    changes = _sampling_fields(fixed.sampling, body)
    if fixed.model is not None:
        changes["model"] = fixed.model
    if fixed.system is not None:
        changes["instructions"] = fixed.system
    if fixed.tools is not None:
        changes["tools"] = [tool_json(tool) for tool in fixed.tools]
    return changed(body, changes)


def _sampling_fields(sampling: Sampling, body: Mapping[str, Any]) -> dict[str, Any]:
    extra = sampling.extra
    fields: dict[str, Any] = {name: value for name, value in extra.items() if name not in _TRANSLATED}
    for name, field in (("temperature", "temperature"), ("top_p", "top_p"), ("max_tokens", "max_output_tokens")):
        if getattr(sampling, name) is not None:
            fields[field] = getattr(sampling, name)
    choice = choice_of(extra.get("tool_choice"))
    if choice is not None:
        fields["tool_choice"] = choice.mode
        if choice.mode == "function":
            fields["tool_choice"] = {"type": "function", "name": choice.name}
    if extra.get("parallel_tool_calls") is not None:
        fields["parallel_tool_calls"] = extra["parallel_tool_calls"]
    if extra.get("reasoning_effort") is not None:
        fields["reasoning"] = {**(body.get("reasoning") or {}), "effort": extra["reasoning_effort"]}
    form = extra.get("response_format")
    if isinstance(form, dict):
        held = form.get("json_schema")
        flat = {"type": form.get("type"), **(held if isinstance(held, dict) else {})}
        fields["text"] = {**(body.get("text") or {}), "format": flat}
    return fields


def tool_json(tool: ToolSpec) -> dict[str, Any]:
    """A tool as the request names it."""
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": dict(tool.parameters),
        "strict": False,
    }


def request_of(
    model: str, messages: Sequence[Message], sampling: Sampling, tools: Sequence[ToolSpec], stream: bool
) -> dict[str, Any]:
    """The body of a request to a server. Nothing is stored there: thoughts come back to us encrypted."""
    lead = 0
    while lead < len(messages) and messages[lead].get("role") == "system":
        lead += 1
    body: dict[str, Any] = {"model": model, "store": False, "include": ["reasoning.encrypted_content"]}
    body |= _sampling_fields(sampling, {})
    system = "\n\n".join(plain_text(message.get("content")) for message in messages[:lead])
    if system:
        body["instructions"] = system
    if tools:
        body["tools"] = [tool_json(tool) for tool in tools]
    if stream:
        body["stream"] = True
    return {**body, "input": input_items(messages[lead:])}
