"""The pieces of a message in the engine's own form: text, images, reasoning, tool calls. All formats meet here.

A reasoning block is {"type": "reasoning", "text": TEXT} and, where its server gave them, `signature` (Anthropic's,
Gemini's: they prove that the text is the model's own), `encrypted` (a thought that only its server can read), and
`id` and `summary` (the responses format: its item, and that the text is a summary). A message whose reasoning is plain
text holds it in `reasoning_content` alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from rollout_engine.models.wire import encode
from rollout_engine.types import Completion, Delta, Message, ToolPiece

Part: TypeAlias = dict[str, Any]
Block: TypeAlias = dict[str, Any]

REASONING = "reasoning"


def text_part(text: str) -> Part:
    return {"type": "text", "text": text}


def image_part(url: str, detail: str | None = None) -> Part:
    """An image by its address: http, https or data."""
    image = {"url": url} if detail is None else {"url": url, "detail": detail}
    return {"type": "image_url", "image_url": image}


def data_url(media_type: str, data: str) -> str:
    return f"data:{media_type};base64,{data}"


def split_data_url(url: str) -> tuple[str, str] | None:
    """(media type, base64 text) of a data URL, None of any other."""
    head, comma, data = url.partition(",")
    if not (comma and head.startswith("data:") and head.endswith(";base64")):
        return None
    return head[5:-7], data


def image_url_of(part: Mapping[str, Any]) -> str | None:
    """The address in an image part, None of another part."""
    image = part.get("image_url")
    url = image.get("url") if isinstance(image, dict) else image
    return url if part.get("type") == "image_url" and isinstance(url, str) else None


def content_of(parts: Sequence[Part]) -> str | list[Part] | None:
    """Parts as the content of a message: one text is a plain text."""
    if not parts:
        return None
    if len(parts) == 1 and parts[0].keys() == {"type", "text"}:
        return str(parts[0]["text"])
    return list(parts)


def parts_of(content: Any) -> list[Part]:
    """The content of a message as parts; an empty text is none."""
    if isinstance(content, str):
        return [text_part(content)] if content else []
    return [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []


def plain_text(content: Any) -> str:
    """All text of a content."""
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text", "")) for part in parts_of(content) if part.get("type") == "text")


def blocks_of(message: Mapping[str, Any]) -> list[Block]:
    """What the model thought, in order."""
    blocks = message.get("reasoning_blocks")
    if isinstance(blocks, list):
        return [block for block in blocks if isinstance(block, dict)]
    for name in ("reasoning_content", "reasoning"):  # vLLM renamed the one to the other
        text = message.get(name)
        if isinstance(text, str) and text:
            return [{"type": REASONING, "text": text}]
    return []


def put_blocks(message: Message, blocks: Iterable[Block]) -> None:
    """Sets what the model thought: as plain text where that is all of it."""
    blocks = [block for block in blocks if len(block) > 2 or block.get("text")]
    if len(blocks) == 1 and blocks[0].keys() == {"type", "text"}:
        message["reasoning_content"] = blocks[0]["text"]
    elif blocks:
        message["reasoning_blocks"] = blocks


def tool_call(call_id: str, name: str, arguments: str, extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A tool call of an assistant message; `arguments` is JSON."""
    call: dict[str, Any] = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
    return {**call, **extra} if extra else call


def calls_of(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The tool calls of a message; what is none is left out."""
    calls = message.get("tool_calls")
    return [call for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []


def call_fields(call: Mapping[str, Any]) -> tuple[str, str, str]:
    """(id, name, arguments) of a tool call."""
    function = call.get("function")
    function = function if isinstance(function, dict) else {}
    return str(call.get("id") or ""), str(function.get("name") or ""), str(function.get("arguments") or "")


def arguments_object(arguments: str) -> dict[str, Any]:
    """Arguments as the object that Anthropic and Gemini want. What is no object is kept, under a name of its own."""
    try:
        found = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {"_arguments": arguments}


def arguments_text(value: Any) -> str:
    """The inverse of `arguments_object`."""
    if isinstance(value, dict) and value.keys() == {"_arguments"} and isinstance(value["_arguments"], str):
        return value["_arguments"]
    return encode(value if value is not None else {})


def answer_message(text: str | None, blocks: Iterable[Block] = (), calls: Sequence[Mapping[str, Any]] = ()) -> Message:
    """An assistant message from what an answer holds."""
    message: Message = {"role": "assistant", "content": text}
    put_blocks(message, blocks)
    if calls:
        message["tool_calls"] = list(calls)
    return message


class Said:
    """What of an answer has been streamed: the rest is sent at its end, whatever the upstream left out."""

    def __init__(self) -> None:
        self._text = self._thought = False
        self._calls: set[int] = set()

    def note(self, delta: Delta) -> None:
        self._text = self._text or bool(delta.content)
        self._thought = self._thought or bool(delta.reasoning) or delta.block is not None
        if delta.tools:
            self._calls.update(piece.index for piece in delta.tools)

    def rest(self, completion: Completion) -> list[Delta]:
        """The pieces that were not sent."""
        message = completion.message
        rest = [] if self._thought else list(_thoughts(message))
        text = "" if self._text else plain_text(message.get("content"))
        if text:
            rest.append(Delta(text))
        calls = enumerate(calls_of(message))
        rest += [Delta(tools=(piece_of(call, index),)) for index, call in calls if index not in self._calls]
        return rest


def _thoughts(message: Message) -> Iterable[Delta]:
    for block in blocks_of(message):
        if block.get("text"):
            yield Delta(reasoning=block["text"])
        yield Delta(block=block)


def piece_of(call: Mapping[str, Any], index: int) -> ToolPiece:
    """A whole tool call as one piece."""
    call_id, name, arguments = call_fields(call)
    extra = {name: value for name, value in call.items() if name not in ("id", "type", "function", "index")}
    return ToolPiece(index, arguments, call_id, name, extra or None)
