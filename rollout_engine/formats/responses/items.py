"""Items of the responses format <-> messages of the engine's own form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollout_engine.formats.check import Malformed, field_text, objects_of, wrong
from rollout_engine.formats.parts import (
    REASONING,
    Block,
    Part,
    arguments_object,
    blocks_of,
    call_fields,
    calls_of,
    content_of,
    image_part,
    image_url_of,
    parts_of,
    put_blocks,
    text_part,
    tool_call,
)
from rollout_engine.models.wire import encode
from rollout_engine.types import Message

_TEXTS = frozenset({"input_text", "output_text", "text", "summary_text", "reasoning_text"})
_ROLES = frozenset({"user", "assistant", "system", "developer"})
_CALLS = frozenset({"function_call", "custom_tool_call"})
_OUTPUTS = frozenset({"function_call_output", "custom_tool_call_output"})
INPUT = "input"
"""The one argument of a tool whose input is a text."""


class Gatherer:
    """Puts items together to messages: what a model says at once is one message."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._thoughts: list[Block] = []
        self._calls: list[dict[str, Any]] = []
        self._content: str | list[Part] | None = None

    def add(self, item: Mapping[str, Any], where: str) -> None:
        """One item; one of a kind that no other format knows is left out. Raises Malformed."""
        kind = item.get("type") or ("message" if "role" in item else None)
        if not isinstance(kind, str):
            raise Malformed(f"{where}.type", "an item needs a type")
        if kind == "message":
            self._message(item, where)
        elif kind == "reasoning":
            self._thoughts.append(_thought(item, where))
        elif kind in _CALLS:
            self._calls.append(_call(item, where))
        elif kind in _OUTPUTS:
            self.end()
            output = content_of(parts_at(item.get("output"), f"{where}.output"))
            call_id = field_text(item, "call_id", where)
            self.messages.append({"role": "tool", "tool_call_id": call_id, "content": "" if output is None else output})

    def _message(self, item: Mapping[str, Any], where: str) -> None:
        role = field_text(item, "role", where)
        if role not in _ROLES:
            raise Malformed(f"{where}.role", f"found {role!r:.80}, where one of {sorted(_ROLES)} is wanted")
        content = content_of(parts_at(item.get("content"), f"{where}.content"))
        if role != "assistant":
            self.end()
            self.messages.append({"role": role, "content": "" if content is None else content})
            return
        if self._content is not None:
            self.end()
        self._content = "" if content is None else content

    def end(self) -> None:
        """What was gathered of an answer is one message."""
        if self._content is None and not self._calls and not self._thoughts:
            return
        message: Message = {"role": "assistant", "content": self._content}
        put_blocks(message, self._thoughts)
        if self._calls:
            message["tool_calls"] = self._calls
        self.messages.append(message)
        self._thoughts, self._calls, self._content = [], [], None


def parts_at(content: Any, where: str) -> list[Part]:
    """A content as parts. Raises Malformed."""
    if content is None or content == "":
        return []
    if isinstance(content, str):
        return [text_part(content)]
    if not isinstance(content, list):
        raise wrong(content, "a text or a list of parts", where)
    return [_part(part, at) for part, at in objects_of(content, where)]


def _part(part: Mapping[str, Any], where: str) -> Part:
    kind = field_text(part, "type", where)
    if kind in _TEXTS:
        return text_part(field_text(part, "text", where))
    if kind == "refusal":
        return text_part(field_text(part, "refusal", where))
    if kind == "input_image" and part.get("image_url") is not None:
        detail = part.get("detail")
        return image_part(field_text(part, "image_url", where), detail if isinstance(detail, str) else None)
    return dict(part)


def _thought(item: Mapping[str, Any], where: str) -> Block:
    texts = [field_text(part, "text", at) for part, at in objects_of(item.get("content"), f"{where}.content")]
    summary = [field_text(part, "text", at) for part, at in objects_of(item.get("summary"), f"{where}.summary")]
    block: Block = {"type": REASONING, "text": "".join(texts) or "\n\n".join(summary)}
    if summary:
        block["summary"] = summary
    if isinstance(item.get("encrypted_content"), str):
        block |= {"encrypted": item["encrypted_content"], "id": str(item.get("id") or "")}
    return block


def _call(item: Mapping[str, Any], where: str) -> dict[str, Any]:
    call_id, name = field_text(item, "call_id", where), field_text(item, "name", where)
    if item.get("type") == "custom_tool_call":
        return tool_call(call_id, name, encode({INPUT: field_text(item, "input", where, "")}))
    return tool_call(call_id, name, field_text(item, "arguments", where, ""))


def input_items(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as the items of a request. Thoughts that the server did not encrypt are left out: it knows them not."""
    items: list[dict[str, Any]] = []
    for message in messages:
        role, content = str(message.get("role")), message.get("content")
        if role == "tool":
            call_id = str(message.get("tool_call_id") or "")
            items.append({"type": "function_call_output", "call_id": call_id, "output": _output(content)})
        elif role == "assistant":
            items += [_thought_item(block) for block in blocks_of(message) if block.get("encrypted")]
            if content:
                items.append({"type": "message", "role": role, "content": _content(content, "output_text")})
            items += [call_item(call) for call in calls_of(message)]
        else:
            items.append({"type": "message", "role": role, "content": _content(content, "input_text")})
    return items


def _output(content: Any) -> Any:
    return content if isinstance(content, str) else _content(content, "input_text")


def _content(content: Any, kind: str) -> Any:
    if isinstance(content, str):
        return content
    return [_part_json(part, kind) for part in parts_of(content)]


def _part_json(part: Mapping[str, Any], kind: str) -> dict[str, Any]:
    url = image_url_of(part)
    if url is not None:
        image = part.get("image_url")
        detail = image.get("detail") if isinstance(image, dict) else None
        return {"type": "input_image", "image_url": url, **({"detail": detail} if detail else {})}
    return {"type": kind, "text": part.get("text", "")} if part.get("type") == "text" else dict(part)


def _thought_item(block: Block) -> dict[str, Any]:
    item = {"type": "reasoning", "summary": _summary(block), "encrypted_content": block["encrypted"]}
    return {**item, "id": block["id"]} if block.get("id") else item


def _summary(block: Block) -> list[dict[str, str]]:
    return [{"type": "summary_text", "text": str(text)} for text in block.get("summary") or ()]


def output_thought(block: Block, item_id: str) -> dict[str, Any]:
    """A thought as an item of an answer."""
    item: dict[str, Any] = {"type": "reasoning", "id": block.get("id") or item_id, "summary": _summary(block)}
    text = str(block.get("text") or "")
    if text and text != "\n\n".join(block.get("summary") or ()):
        item["content"] = [{"type": "reasoning_text", "text": text}]
    if block.get("encrypted"):
        item["encrypted_content"] = block["encrypted"]
    return item


def call_item(call: Mapping[str, Any], free_text: frozenset[str] = frozenset()) -> dict[str, Any]:
    """A tool call as an item."""
    call_id, name, arguments = call_fields(call)
    if name in free_text:
        text = arguments_object(arguments).get(INPUT)
        return {"type": "custom_tool_call", "call_id": call_id, "name": name, "input": text if text else ""}
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": arguments}
