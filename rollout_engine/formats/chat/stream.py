"""A streamed answer as the chunks of /chat/completions."""

from __future__ import annotations

from typing import Any

from rollout_engine.formats.base import data_event
from rollout_engine.formats.parts import Said
from rollout_engine.models.sse import DONE
from rollout_engine.models.wire import encode, usage_json
from rollout_engine.types import Completion, Delta, ToolPiece

_END = b"data: " + DONE + b"\n\n"


class ChatWriter:
    """Chunks in order: the role, the pieces, the finish reason, the usage; then [DONE]."""

    ping = b": keep-alive\n\n"

    def __init__(self, model: str, number: int, created: int, include_usage: bool) -> None:
        self._head = {"id": f"chatcmpl-{number}", "object": "chat.completion.chunk", "created": created, "model": model}
        self._include_usage = include_usage
        self._said = Said()

    def begin(self) -> bytes:
        return self._chunk({"role": "assistant", "content": None})

    def write(self, delta: Delta) -> bytes:
        self._said.note(delta)
        pieces: dict[str, Any] = {}
        if delta.reasoning:
            pieces["reasoning_content"] = delta.reasoning
        if delta.content:
            pieces["content"] = delta.content
        if delta.tools:
            pieces["tool_calls"] = [_call(piece) for piece in delta.tools]
        return self._chunk(pieces) if pieces else b""

    def end(self, completion: Completion) -> bytes:
        rest = b"".join([self.write(delta) for delta in self._said.rest(completion)])
        blocks = completion.message.get("reasoning_blocks")
        if blocks:
            rest += self._chunk({"reasoning_blocks": blocks})
        finish: dict[str, Any] = {"finish_reason": completion.finish_reason}
        if completion.stop_sequence is not None:
            finish["stop_reason"] = completion.stop_sequence
        usage = usage_json(completion.usage)
        if not self._include_usage:
            return rest + self._chunk({}, finish, usage=usage) + _END
        return rest + self._chunk({}, finish) + data_event(encode({**self._head, "choices": [], "usage": usage})) + _END

    def error(self, status: int, message: str, code: str) -> bytes:
        kind = "server_error" if status >= 500 else "invalid_request_error"
        error = {"message": message, "type": kind, "param": None, "code": code}
        return data_event(encode({"error": error})) + _END

    def _chunk(self, delta: dict[str, Any], finish: dict[str, Any] | None = None, **more: Any) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": None, **(finish or {})}
        return data_event(encode({**self._head, "choices": [choice], **more}))


def _call(piece: ToolPiece) -> dict[str, Any]:
    call: dict[str, Any] = {"index": piece.index, "function": {"arguments": piece.arguments}}
    if piece.id:
        call |= {"id": piece.id, "type": "function"}
    if piece.name:
        call["function"] = {"name": piece.name, "arguments": piece.arguments}
    return {**call, **(piece.extra or {})}
