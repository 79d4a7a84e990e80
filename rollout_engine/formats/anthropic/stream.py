"""Anthropic's streamed answers: blocks that are opened, filled and closed, within one message."""

from __future__ import annotations

import json
from typing import Any

from rollout_engine.errors import ModelBadResponse
from rollout_engine.formats.anthropic.response import (
    completion_of,
    error_body,
    merged_usage,
    message_head,
    stop_json,
    usage_json,
)
from rollout_engine.formats.base import named_event
from rollout_engine.formats.parts import Block, Said, arguments_object
from rollout_engine.models.sse import NOTHING
from rollout_engine.models.wire import encode
from rollout_engine.types import Completion, Delta, ToolPiece, Usage

_TEXT, _THOUGHT = "text", "thinking"


class AnthropicWriter:
    """message_start, the blocks one after the other, message_delta, message_stop."""

    ping = named_event("ping", '{"type":"ping"}')

    def __init__(self, model: str, number: int) -> None:
        self._head = message_head(model, number)
        self._said = Said()
        self._open: str | None = None
        """text, thinking, or `tool N`."""
        self._blocks = 0
        self._of_call: dict[int, int] = {}
        self._thought = ""

    def begin(self) -> bytes:
        usage = usage_json(Usage())
        message = {**self._head, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return _event("message_start", message=message)

    def write(self, delta: Delta) -> bytes:
        self._said.note(delta)
        out = []
        if delta.reasoning:
            out.append(self._opened(_THOUGHT, {"type": _THOUGHT, "thinking": "", "signature": ""}))
            out.append(self._filled(self._blocks - 1, type="thinking_delta", thinking=delta.reasoning))
            self._thought += delta.reasoning
        if delta.block is not None:
            out.append(self._thought_ends(dict(delta.block)))
        if delta.content:
            out.append(self._opened(_TEXT, {"type": _TEXT, "text": ""}))
            out.append(self._filled(self._blocks - 1, type="text_delta", text=delta.content))
        out += [self._call(piece) for piece in delta.tools]
        return b"".join(out)

    def end(self, completion: Completion) -> bytes:
        rest = b"".join([self.write(delta) for delta in self._said.rest(completion)])
        delta = _event("message_delta", delta=stop_json(completion), usage=usage_json(completion.usage))
        return rest + self._closed() + delta + _event("message_stop")

    def error(self, status: int, message: str, code: str) -> bytes:
        return named_event("error", encode(error_body(status, message, code)))

    def _thought_ends(self, block: Block) -> bytes:
        """The signature of the open thought, or a thought that was not streamed."""
        if block.get("encrypted") and not block.get("id"):
            data = {"type": "redacted_thinking", "data": block["encrypted"]}
            return self._opened("redacted", data) + self._closed()
        out = b""
        if self._open != _THOUGHT:
            out = self._opened(_THOUGHT, {"type": _THOUGHT, "thinking": "", "signature": ""})
        missing = (block.get("text") or "").removeprefix(self._thought)
        if missing:
            out += self._filled(self._blocks - 1, type="thinking_delta", thinking=missing)
        if block.get("signature"):
            out += self._filled(self._blocks - 1, type="signature_delta", signature=block["signature"])
        return out + self._closed()

    def _call(self, piece: ToolPiece) -> bytes:
        out = b""
        if piece.index not in self._of_call:
            call = {"type": "tool_use", "id": piece.id or f"call-{piece.index}", "name": piece.name, "input": {}}
            out = self._opened(f"tool {piece.index}", call)
            self._of_call[piece.index] = self._blocks - 1
        if piece.arguments:
            # By index, so that also a piece that comes after the next call's beginning finds its place.
            at = self._of_call[piece.index]
            out += self._filled(at, type="input_json_delta", partial_json=piece.arguments)
        return out

    def _opened(self, kind: str, block: dict[str, Any]) -> bytes:
        if self._open == kind:
            return b""
        closed = self._closed()
        self._open, self._blocks = kind, self._blocks + 1
        return closed + _event("content_block_start", index=self._blocks - 1, content_block=block)

    def _filled(self, index: int, **delta: Any) -> bytes:
        return _event("content_block_delta", index=index, delta=delta)

    def _closed(self) -> bytes:
        if self._open is None:
            return b""
        self._open, self._thought = None, ""
        return _event("content_block_stop", index=self._blocks - 1)


def _event(kind: str, **fields: Any) -> bytes:
    return named_event(kind, encode({"type": kind, **fields}))


class AnthropicAssembler:
    """Puts the events of one answer together."""

    def __init__(self) -> None:
        self._message: dict[str, Any] = {}
        self._blocks: dict[int, dict[str, Any]] = {}
        self._texts: dict[int, list[str]] = {}
        self._calls: dict[int, int] = {}
        self.ended = False

    @property
    def finished(self) -> bool:
        """The server said why it stopped."""
        return self._message.get("stop_reason") is not None

    def add(self, event: Any) -> Delta:
        """Takes one event in; what is new. Raises ModelBadResponse."""
        if not isinstance(event, dict):
            raise ModelBadResponse(f"a streamed event is a JSON {type(event).__name__}, not an object")
        kind, index = event.get("type"), event.get("index")
        if kind == "message_start" and isinstance(event.get("message"), dict):
            self._message = {**event["message"]}
        elif kind == "message_delta":
            delta, usage = event.get("delta"), self._message.get("usage")
            self._message |= delta if isinstance(delta, dict) else {}
            self._message["usage"] = merged_usage(usage if isinstance(usage, dict) else {}, event.get("usage"))
        elif kind == "message_stop":
            self.ended = True
        elif isinstance(index, int):
            return self._block_event(str(kind), index, event)
        return NOTHING

    def _block_event(self, kind: str, index: int, event: dict[str, Any]) -> Delta:
        if kind == "content_block_start" and isinstance(event.get("content_block"), dict):
            return self._starts(index, dict(event["content_block"]))
        block, delta = self._blocks.get(index), event.get("delta")
        if block is None:
            raise ModelBadResponse(f"block {index} was never started")
        if kind == "content_block_delta" and isinstance(delta, dict):
            return self._fills(index, block, delta)
        return self._stops(index, block) if kind == "content_block_stop" else NOTHING

    def _starts(self, index: int, block: dict[str, Any]) -> Delta:
        self._blocks[index], self._texts[index] = block, []
        if block.get("type") == "tool_use":
            self._calls[index] = len(self._calls)
            piece = ToolPiece(self._calls[index], "", str(block.get("id") or ""), str(block.get("name") or ""))
            return Delta(tools=(piece,))
        text = block.get("text")
        return self._fills(index, block, {"text": text}) if isinstance(text, str) and text else NOTHING

    def _fills(self, index: int, block: dict[str, Any], delta: dict[str, Any]) -> Delta:
        if isinstance(delta.get("text"), str):
            self._texts[index].append(delta["text"])
            return Delta(delta["text"])
        if isinstance(delta.get("thinking"), str):
            self._texts[index].append(delta["thinking"])
            return Delta(reasoning=delta["thinking"])
        if isinstance(delta.get("partial_json"), str):
            self._texts[index].append(delta["partial_json"])
            return Delta(tools=(ToolPiece(self._calls.get(index, 0), delta["partial_json"]),))
        if isinstance(delta.get("signature"), str):
            block["signature"] = delta["signature"]
        return NOTHING

    def _stops(self, index: int, block: dict[str, Any]) -> Delta:
        if block.get("type") == "thinking":
            signed = {"signature": block["signature"]} if block.get("signature") else {}
            return Delta(block={"type": "reasoning", "text": "".join(self._texts[index]), **signed})
        if block.get("type") == "redacted_thinking":
            return Delta(block={"type": "reasoning", "text": "", "encrypted": str(block.get("data") or "")})
        return NOTHING

    def completion(self, model_s: float = 0.0, weight_version: str | None = None) -> Completion:
        """The whole answer. Raises what `completion_of` raises."""
        content = [self._whole(index) for index in sorted(self._blocks)]
        return completion_of({**self._message, "content": content}, model_s, weight_version)

    def _whole(self, index: int) -> dict[str, Any]:
        block, text = self._blocks[index], "".join(self._texts[index])
        kind = block.get("type")
        if kind == "text":
            return {**block, "text": text}
        if kind == "thinking":
            return {**block, "thinking": text}
        if kind == "tool_use":
            return {**block, "input": _input(text) if text else block.get("input") or {}}
        return block


def _input(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else arguments_object(text)
