"""Anthropic's content blocks <-> text, images, reasoning and tool calls of the engine's own form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rollout_engine.formats.check import Malformed, field_text, object_of, objects_of, wrong
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
from rollout_engine.types import Message


def blocks_at(content: Any, where: str) -> list[tuple[dict[str, Any], str]]:
    """A content as blocks with their places: a text is one block. Raises Malformed."""
    if isinstance(content, str):
        return [({"type": "text", "text": content}, where)]
    if not isinstance(content, list):
        raise wrong(content, "a text or a list of blocks", where)
    return list(objects_of(content, where))


def part_of(block: Mapping[str, Any], where: str) -> Part:
    """A text or an image as a part; what no other format knows is kept as it is. Raises Malformed."""
    kind = field_text(block, "type", where)
    if kind == "text":
        return text_part(field_text(block, "text", where))
    if kind == "image":
        return image_part(_address(object_of(block.get("source"), f"{where}.source"), f"{where}.source"))
    return dict(block)


def _address(source: Mapping[str, Any], where: str) -> str:
    kind = source.get("type")
    if kind == "base64":
        return data_url(field_text(source, "media_type", where), field_text(source, "data", where))
    if kind == "url":
        return field_text(source, "url", where)
    raise Malformed(f"{where}.type", f"found {kind!r:.80}, where 'base64' or 'url' is wanted")


def parts_at(content: Any, where: str) -> list[Part]:
    """All blocks of a content as parts. Raises Malformed."""
    return [part_of(block, at) for block, at in blocks_at(content, where)] if content is not None else []


def user_messages(content: Any, where: str) -> list[Message]:
    """A user's turn: the results of tools as messages of their own, and what is between them. Raises Malformed."""
    found: list[Message] = []
    parts: list[Part] = []
    for block, at in blocks_at(content, where):
        if block.get("type") != "tool_result":
            parts.append(part_of(block, at))
            continue
        if parts:
            found.append({"role": "user", "content": content_of(parts)})
            parts = []
        found.append(_result(block, at))
    if parts or not found:
        found.append({"role": "user", "content": content_of(parts) or ""})
    return found


def _result(block: Mapping[str, Any], where: str) -> Message:
    content = content_of(parts_at(block.get("content"), f"{where}.content"))
    answer: Message = {
        "role": "tool",
        "tool_call_id": field_text(block, "tool_use_id", where),
        "content": "" if content is None else content,
    }
    return {**answer, "is_error": True} if block.get("is_error") else answer


def assistant_message(content: Any, where: str) -> Message:
    """An answer's blocks as one message. Raises Malformed."""
    parts: list[Part] = []
    thoughts: list[Block] = []
    calls: list[dict[str, Any]] = []
    for block, at in blocks_at(content, where):
        kind = block.get("type")
        if kind == "thinking":
            signature = field_text(block, "signature", at, "")
            signed = {"signature": signature} if signature else {}
            thoughts.append({"type": REASONING, "text": field_text(block, "thinking", at), **signed})
        elif kind == "redacted_thinking":
            thoughts.append({"type": REASONING, "text": "", "encrypted": field_text(block, "data", at)})
        elif kind == "tool_use":
            arguments = arguments_text(object_of(block.get("input", {}), f"{at}.input"))
            calls.append(tool_call(field_text(block, "id", at), field_text(block, "name", at), arguments))
        else:
            parts.append(part_of(block, at))
    message: Message = {"role": "assistant", "content": content_of(parts)}
    put_blocks(message, thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def content_blocks(content: Any) -> list[dict[str, Any]]:
    """Parts as blocks."""
    return [_block(part) for part in parts_of(content)]


def _block(part: Mapping[str, Any]) -> dict[str, Any]:
    url = image_url_of(part)
    if url is None:
        return dict(part)
    split = split_data_url(url)
    if split is None:
        return {"type": "image", "source": {"type": "url", "url": url}}
    return {"type": "image", "source": {"type": "base64", "media_type": split[0], "data": split[1]}}


def answer_blocks(message: Mapping[str, Any], *, sent_back: bool) -> list[dict[str, Any]]:
    """An assistant message as blocks. `sent_back`: to a server, which refuses thoughts that it has not signed."""
    thoughts = [thought_block(block) for block in blocks_of(message)]
    if sent_back:
        thoughts = [block for block in thoughts if block.get("signature") or block.get("data")]
    return [
        *thoughts,
        *content_blocks(message.get("content")),
        *(call_block(*call_fields(call)) for call in calls_of(message)),
    ]


def thought_block(block: Block) -> dict[str, Any]:
    """A thought as a block."""
    if block.get("encrypted") and not block.get("id"):
        return {"type": "redacted_thinking", "data": block["encrypted"]}
    return {"type": "thinking", "thinking": block.get("text") or "", "signature": block.get("signature") or ""}


def call_block(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """A tool call as a block."""
    return {"type": "tool_use", "id": call_id, "name": name, "input": arguments_object(arguments)}


def result_block(message: Mapping[str, Any]) -> dict[str, Any]:
    """A tool's answer as a block of the user's turn."""
    content = message.get("content")
    block: dict[str, Any] = {
        "type": "tool_result",
        "tool_use_id": str(message.get("tool_call_id") or ""),
        "content": content if isinstance(content, str) else content_blocks(content),
    }
    return {**block, "is_error": True} if message.get("is_error") else block


def turns_of(messages: Sequence[Message]) -> Iterable[dict[str, Any]]:
    """Messages as turns of user and assistant in alternation, as servers want them."""
    role = ""
    blocks: list[dict[str, Any]] = []
    for message in messages:
        now = "assistant" if message.get("role") == "assistant" else "user"
        if now != role and blocks:
            yield {"role": role, "content": _compact(blocks)}
            blocks = []
        role = now
        if now == "assistant":
            blocks += answer_blocks(message, sent_back=True)
        elif message.get("role") == "tool":
            blocks.append(result_block(message))
        else:
            blocks += content_blocks(message.get("content"))
    if blocks:
        yield {"role": role, "content": _compact(blocks)}


def _compact(blocks: list[dict[str, Any]]) -> Any:
    only_text = len(blocks) == 1 and blocks[0].keys() == {"type", "text"}
    return blocks[0]["text"] if only_text else blocks
