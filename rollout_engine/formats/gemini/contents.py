"""Gemini's contents and parts <-> messages of the engine's own form."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rollout_engine.formats.check import field_text, maybe, object_of, objects_of
from rollout_engine.formats.gemini.names import camel
from rollout_engine.formats.parts import (
    REASONING,
    Block,
    Part,
    arguments_object,
    arguments_text,
    blocks_of,
    call_fields,
    calls_of,
    content_of,
    data_url,
    image_part,
    image_url_of,
    parts_of,
    put_blocks,
    split_data_url,
    text_part,
    tool_call,
)
from rollout_engine.models.wire import encode
from rollout_engine.types import Message

SIGNATURE = "thoughtSignature"
NO_IMAGE_TYPE = "image/*"


class Reader:
    """Reads the contents of one conversation. Calls without ids get some, in order; their results find them by name."""

    def __init__(self, prefix: str = "call-") -> None:
        self._prefix, self._calls = prefix, 0
        self._open: dict[str, deque[str]] = {}

    def messages(self, content: Mapping[str, Any], where: str) -> list[Message]:
        """One content. Raises Malformed."""
        parts = [(camel(part), at) for part, at in objects_of(content.get("parts"), f"{where}.parts")]
        if content.get("role") == "model":
            return [self.answer(parts)]
        found: list[Message] = []
        own: list[Part] = []
        for part, at in parts:
            if "functionResponse" not in part:
                own.append(_part(part, at))
                continue
            if own:
                found.append({"role": "user", "content": content_of(own)})
                own = []
            found.append(self._result(camel(object_of(part["functionResponse"], f"{at}.functionResponse")), at))
        if own or not found:
            found.append({"role": "user", "content": content_of(own) or ""})
        return found

    def answer(self, parts: Iterable[tuple[Mapping[str, Any], str]]) -> Message:
        """An answer's parts as one message; texts that follow each other are one. Raises Malformed."""
        own: list[Part] = []
        thoughts: list[Block] = []
        calls: list[dict[str, Any]] = []
        signed: dict[str, Any] = {}
        for part, at in parts:
            signature = part.get(SIGNATURE)
            if "functionCall" in part:
                calls.append(self._call(object_of(part["functionCall"], f"{at}.functionCall"), at, signature))
            elif part.get("thought"):
                _add_thought(thoughts, field_text(part, "text", at, ""), signature)
            else:
                if isinstance(signature, str):
                    signed = extra_of(signature)
                own.append(_part(part, at))
        message: Message = {"role": "assistant", "content": content_of(_joined(own))}
        put_blocks(message, thoughts)
        if calls:
            message["tool_calls"] = calls
        return {**message, **signed}

    def _call(self, call: Mapping[str, Any], where: str, signature: Any) -> dict[str, Any]:
        name = field_text(call, "name", f"{where}.functionCall")
        call_id = maybe(call, "id", str, f"{where}.functionCall") or f"{self._prefix}{self._calls}"
        self._calls += 1
        self._open.setdefault(name, deque()).append(call_id)
        extra = extra_of(signature) if isinstance(signature, str) else None
        return tool_call(call_id, name, arguments_text(call.get("args")), extra)

    def _result(self, result: Mapping[str, Any], where: str) -> Message:
        name = field_text(result, "name", f"{where}.functionResponse")
        waiting = self._open.get(name)
        given = maybe(result, "id", str, f"{where}.functionResponse")
        if given is None:
            given = waiting.popleft() if waiting else f"{self._prefix}{name}"
        elif waiting and given in waiting:
            waiting.remove(given)
        response = result.get("response")
        plain = isinstance(response, dict) and response.keys() == {"output"} and isinstance(response["output"], str)
        content = response["output"] if plain and isinstance(response, dict) else encode(response)
        return {"role": "tool", "tool_call_id": given, "name": name, "content": content}


def extra_of(signature: str) -> dict[str, Any]:
    """Where Google's own chat endpoint puts it, too."""
    return {"extra_content": {"google": {"thought_signature": signature}}}


def signature_of(holder: Mapping[str, Any]) -> dict[str, str]:
    """The signature of a call or a message, as fields of its part."""
    extra = holder.get("extra_content")
    google = extra.get("google") if isinstance(extra, dict) else None
    signature = google.get("thought_signature") if isinstance(google, dict) else None
    return {SIGNATURE: signature} if isinstance(signature, str) else {}


def _add_thought(thoughts: list[Block], text: str, signature: Any) -> None:
    if thoughts and "thought_signature" not in thoughts[-1]:
        thoughts[-1]["text"] += text
    else:
        thoughts.append({"type": REASONING, "text": text})
    if isinstance(signature, str):
        thoughts[-1]["thought_signature"] = signature


def _joined(parts: list[Part]) -> list[Part]:
    joined: list[Part] = []
    for part in parts:
        if joined and part.get("type") == "text" and joined[-1].get("type") == "text":
            joined[-1] = text_part(joined[-1]["text"] + part["text"])
        else:
            joined.append(part)
    return joined


def _part(part: Mapping[str, Any], where: str) -> Part:
    """A text or an image as a part; what no other format knows is kept as it is. Raises Malformed."""
    if "text" in part:
        return text_part(field_text(part, "text", where))
    if "inlineData" in part:
        data = camel(object_of(part["inlineData"], f"{where}.inlineData"))
        kind = field_text(data, "mimeType", f"{where}.inlineData")
        held = field_text(data, "data", f"{where}.inlineData")
        # Google's clients write the bytes as for an address; nobody else reads that.
        return image_part(data_url(kind, held.replace("-", "+").replace("_", "/")))
    if "fileData" in part:
        file = camel(object_of(part["fileData"], f"{where}.fileData"))
        return image_part(field_text(file, "fileUri", f"{where}.fileData"))
    return {"type": "gemini", **part}


def parts_json(content: Any) -> list[dict[str, Any]]:
    """Parts as Gemini's."""
    return [_part_json(part) for part in parts_of(content)]


def _part_json(part: Mapping[str, Any]) -> dict[str, Any]:
    url = image_url_of(part)
    if url is not None:
        split = split_data_url(url)
        if split is None:
            return {"fileData": {"fileUri": url, "mimeType": NO_IMAGE_TYPE}}
        return {"inlineData": {"mimeType": split[0], "data": split[1]}}
    if part.get("type") == "text":
        return {"text": part.get("text", "")}
    return {name: value for name, value in part.items() if name != "type"}


def answer_parts(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """An assistant message as parts."""
    parts: list[dict[str, Any]] = []
    for block in blocks_of(message):
        signed = {SIGNATURE: block["thought_signature"]} if block.get("thought_signature") else {}
        if block.get("text") or signed:
            parts.append({"text": block.get("text") or "", "thought": True, **signed})
    own = parts_json(message.get("content"))
    if own:
        own[-1] |= signature_of(message)
    return parts + own + [call_part(call) for call in calls_of(message)]


def call_part(call: Mapping[str, Any]) -> dict[str, Any]:
    """A tool call as a part."""
    call_id, name, arguments = call_fields(call)
    return {"functionCall": {"id": call_id, "name": name, "args": arguments_object(arguments)}, **signature_of(call)}


def contents_of(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as contents; user and model alternate."""
    contents: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    for message in messages:
        role = "model" if message.get("role") == "assistant" else "user"
        if role == "model":
            names.update((call_fields(call)[0], call_fields(call)[1]) for call in calls_of(message))
            parts = answer_parts(message)
        elif message.get("role") == "tool":
            parts = [_result_part(message, names)]
        else:
            parts = parts_json(message.get("content"))
        if contents and contents[-1]["role"] == role:
            contents[-1]["parts"] += parts
        elif parts:
            contents.append({"role": role, "parts": parts})
    return contents


def _result_part(message: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    call_id, content = str(message.get("tool_call_id") or ""), message.get("content")
    name = names.get(call_id) or str(message.get("name") or "unknown")
    return {"functionResponse": {"id": call_id, "name": name, "response": _response(content)}}


def _response(content: Any) -> Any:
    """A result that was an object of its own goes back as it came."""
    if not isinstance(content, str):
        return {"output": encode(content)}
    if content.startswith("{"):
        try:
            found = json.loads(content)
        except (ValueError, RecursionError):
            found = None
        if isinstance(found, dict) and encode(found) == content and not _plain(found):
            return found
    return {"output": content}


def _plain(found: Mapping[str, Any]) -> bool:
    return found.keys() == {"output"} and isinstance(found["output"], str)
