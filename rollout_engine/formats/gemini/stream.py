"""Gemini's streamed answers: chunks that look like whole ones; a call comes in one piece."""

from __future__ import annotations

import secrets
from typing import Any

from rollout_engine.errors import ModelBadResponse
from rollout_engine.formats.base import data_event
from rollout_engine.formats.gemini.contents import SIGNATURE, call_part, extra_of, signature_of
from rollout_engine.formats.gemini.response import chunk_of, completion_of, error_body
from rollout_engine.formats.parts import Said, arguments_text, calls_of
from rollout_engine.models.sse import NOTHING
from rollout_engine.models.wire import encode
from rollout_engine.types import Completion, Delta, ToolPiece


class GeminiWriter:
    """Chunks of text and thoughts as they come; calls with the last one, for they can not be cut."""

    ping = b""
    """Google's own clients take a comment for a part of the next event."""

    def __init__(self, model: str, number: int) -> None:
        self._model, self._number = model, number
        self._said = Said()
        self._thought = ""

    def begin(self) -> bytes:
        return b""

    def write(self, delta: Delta) -> bytes:
        self._said.note(delta)
        parts: list[dict[str, Any]] = []
        if delta.reasoning:
            self._thought += delta.reasoning
            parts.append({"text": delta.reasoning, "thought": True})
        if delta.block is not None:
            missing = (delta.block.get("text") or "").removeprefix(self._thought)
            signature = delta.block.get("thought_signature")
            signed = {SIGNATURE: signature} if signature else {}
            if missing or signed:
                parts.append({"text": missing, "thought": True, **signed})
            self._thought = ""
        if delta.content:
            parts.append({"text": delta.content})
        return self._event(parts) if parts else b""

    def end(self, completion: Completion) -> bytes:
        rest = b"".join([self.write(delta) for delta in self._said.rest(completion)])
        parts = [call_part(call) for call in calls_of(completion.message)]
        signed = signature_of(completion.message)
        if signed:
            parts.insert(0, {"text": "", **signed})
        return rest + self._event(parts, completion)

    def error(self, status: int, message: str, code: str) -> bytes:
        return data_event(encode(error_body(status, message, code)))

    def _event(self, parts: list[dict[str, Any]], completion: Completion | None = None) -> bytes:
        return data_event(encode(chunk_of(parts, self._model, self._number, completion)))


class GeminiAssembler:
    """Puts the chunks of one answer together."""

    ended = False
    """Only the end of the response says that nothing more comes."""

    def __init__(self) -> None:
        self._whole: dict[str, Any] = {}
        self._candidate: dict[str, Any] = {}
        self._parts: list[dict[str, Any]] = []
        self._calls = 0
        self._made = secrets.token_hex(6)

    @property
    def finished(self) -> bool:
        """The server said why it stopped."""
        return bool(self._candidate.get("finishReason") or self._whole.get("promptFeedback"))

    def add(self, event: Any) -> Delta:
        """Takes one chunk in; what is new. Raises ModelBadResponse."""
        if not isinstance(event, dict):
            raise ModelBadResponse(f"a streamed chunk is a JSON {type(event).__name__}, not an object")
        self._whole |= {name: value for name, value in event.items() if name != "candidates" and value is not None}
        candidates = event.get("candidates")
        if not isinstance(candidates, list) or not candidates or not isinstance(candidates[0], dict):
            return NOTHING
        self._candidate |= {name: value for name, value in candidates[0].items() if name != "content"}
        content = candidates[0].get("content")
        parts = content.get("parts") if isinstance(content, dict) else None
        return self._add([part for part in parts if isinstance(part, dict)] if isinstance(parts, list) else [])

    def _add(self, parts: list[dict[str, Any]]) -> Delta:
        text, thought, calls = "", "", []
        for part in parts:
            self._parts.append(part)
            said = part.get("text")
            if isinstance(part.get("functionCall"), dict):
                calls.append(self._piece(part))
            elif isinstance(said, str) and part.get("thought"):
                thought += said
            elif isinstance(said, str):
                text += said
        return Delta(text, None, thought, tuple(calls)) if text or thought or calls else NOTHING

    def _piece(self, part: dict[str, Any]) -> ToolPiece:
        call, index = part["functionCall"], self._calls
        self._calls += 1
        made = self._whole.get("responseId")
        if not isinstance(call.get("id"), str):
            # The same that the whole answer would get.
            call["id"] = f"call-{made if isinstance(made, str) else self._made}-{index}"
        signature = part.get(SIGNATURE)
        extra = extra_of(signature) if isinstance(signature, str) else None
        return ToolPiece(index, arguments_text(call.get("args")), call["id"], str(call.get("name") or ""), extra)

    def completion(self, model_s: float = 0.0, weight_version: str | None = None) -> Completion:
        """The whole answer. Raises what `completion_of` raises."""
        candidate = {**self._candidate, "content": {"role": "model", "parts": self._parts}}
        return completion_of({**self._whole, "candidates": [candidate]}, model_s, weight_version)
