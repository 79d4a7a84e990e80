"""A request to generateContent <-> the engine's own form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollout_engine.formats.base import Asked, Overrides, changed
from rollout_engine.formats.check import Malformed, field_text, maybe, maybe_number, maybe_texts, object_of, objects_of
from rollout_engine.formats.choice import ToolChoice, choice_of, choice_value, schema_format, schema_of
from rollout_engine.formats.gemini.contents import Reader, contents_of
from rollout_engine.formats.gemini.names import camel
from rollout_engine.formats.parts import content_of, plain_text, text_part
from rollout_engine.types import Message, Sampling, ToolSpec

_TRANSLATED = frozenset(
    {"tool_choice", "parallel_tool_calls", "response_format", "reasoning_effort", "top_k", "messages"}
)
_MODES = {"AUTO": "auto", "ANY": "required", "NONE": "none", "VALIDATED": "auto"}
_NAMES = {"auto": "AUTO", "required": "ANY", "none": "NONE"}


def parse(body: Mapping[str, Any], model: str, stream: bool) -> Asked:
    """The request. Raises Malformed."""
    body = camel(body)
    messages = _system(body.get("systemInstruction"))
    reader = Reader()
    for content, where in objects_of(body.get("contents"), "contents"):
        messages += reader.messages(content, where)
    if not messages:
        raise Malformed("contents", "there is no content")
    return Asked(model=model, messages=messages, sampling=_sampling(body), tools=tuple(_tools(body)), stream=stream)


def _system(instruction: Any) -> list[Message]:
    if instruction is None:
        return []
    if isinstance(instruction, str):
        return [{"role": "system", "content": instruction}]
    held = object_of(instruction, "systemInstruction")
    parts = objects_of(held.get("parts"), "systemInstruction.parts")
    content = content_of([text_part(field_text(part, "text", where)) for part, where in parts])
    return [{"role": "system", "content": content}] if content else []


def _tools(body: Mapping[str, Any]) -> list[ToolSpec]:
    found = []
    for tool, where in objects_of(body.get("tools"), "tools"):
        declared = camel(tool).get("functionDeclarations")
        for each, at in objects_of(declared, f"{where}.functionDeclarations"):
            function = camel(each)
            schema = maybe(function, "parametersJsonSchema", dict, at)
            if schema is None:
                schema = _json_schema(maybe(function, "parameters", dict, at) or {})
            found.append(
                ToolSpec(field_text(function, "name", at), field_text(function, "description", at, ""), schema)
            )
    return found


def _json_schema(schema: Any) -> Any:
    """Gemini's own schemas write types in capitals."""
    if isinstance(schema, list):
        return [_json_schema(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: value.lower() if name == "type" and isinstance(value, str) else _json_schema(value)
        for name, value in schema.items()
    }


def _sampling(body: Mapping[str, Any]) -> Sampling:
    given = body.get("generationConfig")
    config = camel({} if given is None else object_of(given, "generationConfig"))
    where = "generationConfig"
    return Sampling(
        temperature=maybe_number(config, "temperature", where),
        top_p=maybe_number(config, "topP", where),
        max_tokens=maybe(config, "maxOutputTokens", int, where),
        seed=maybe(config, "seed", int, where),
        stop=maybe_texts(config, "stopSequences", where),
        extra=_extra(body, config),
    )


def _extra(body: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    extra: dict[str, Any] = {}
    calling = (maybe(body, "toolConfig", dict) or {}).get("functionCallingConfig")
    if isinstance(calling, dict) and isinstance(calling.get("mode"), str):
        names = calling.get("allowedFunctionNames")
        if isinstance(names, list) and len(names) == 1:
            extra["tool_choice"] = choice_value(ToolChoice("function", str(names[0])))
        else:
            extra["tool_choice"] = _MODES.get(calling["mode"], "auto")
    schema = config.get("responseJsonSchema") or _json_schema(config.get("responseSchema"))
    if isinstance(schema, dict):
        extra["response_format"] = schema_format(schema)
    top_k = maybe_number(config, "topK", "generationConfig")
    return extra if top_k is None else {**extra, "top_k": int(top_k)}


def overridden(body: dict[str, Any], fixed: Overrides) -> dict[str, Any]:
    """The body with what the run fixes; the same object where that changes nothing. The model is in the address."""
    changes = _sampling_fields(fixed.sampling)
    # An agent may spell a field otherwise: both together would be refused.
    body = body if not any("_" in name for name in body) else dict(camel(body))
    own = changes.pop("generationConfig", {})
    config = camel(body.get("generationConfig") or {})
    if any(config.get(name) != value for name, value in own.items()):
        changes["generationConfig"] = {**config, **own}
    if fixed.system is not None:
        changes["systemInstruction"] = {"parts": [{"text": fixed.system}]}
    if fixed.tools is not None:
        changes["tools"] = _tools_json(fixed.tools)
    return changed(body, changes)


def _sampling_fields(sampling: Sampling) -> dict[str, Any]:
    extra = sampling.extra
    given = {
        "temperature": sampling.temperature,
        "topP": sampling.top_p,
        "maxOutputTokens": sampling.max_tokens,
        "seed": sampling.seed,
        "stopSequences": list(sampling.stop) or None,
        "topK": extra.get("top_k"),
    }
    config = {name: value for name, value in given.items() if value is not None}
    schema = schema_of(extra.get("response_format"))
    if schema is not None:
        config |= {"responseMimeType": "application/json", "responseJsonSchema": schema}
    fields = {name: value for name, value in extra.items() if name not in _TRANSLATED}
    choice = choice_of(extra.get("tool_choice"))
    if choice is not None:
        calling: dict[str, Any] = {"mode": _NAMES.get(choice.mode, "ANY")}
        if choice.mode == "function":
            calling["allowedFunctionNames"] = [choice.name]
        fields["toolConfig"] = {"functionCallingConfig": calling}
    if config:
        fields["generationConfig"] = {**(fields.get("generationConfig") or {}), **config}
    return fields


def _tools_json(tools: Sequence[ToolSpec]) -> list[dict[str, Any]]:
    declared = [
        {"name": tool.name, "description": tool.description, "parametersJsonSchema": dict(tool.parameters)}
        for tool in tools
    ]
    return [{"functionDeclarations": declared}] if declared else []


def request_of(messages: Sequence[Message], sampling: Sampling, tools: Sequence[ToolSpec]) -> dict[str, Any]:
    """The body of a request to a server."""
    lead = 0
    while lead < len(messages) and messages[lead].get("role") in ("system", "developer"):
        lead += 1
    body: dict[str, Any] = _sampling_fields(sampling)
    texts = [plain_text(message.get("content")) for message in messages[:lead]]
    if any(texts):
        body["systemInstruction"] = {"parts": [{"text": "\n\n".join(texts)}]}
    if tools:
        body["tools"] = _tools_json(tools)
    return {**body, "contents": contents_of(messages[lead:])}
