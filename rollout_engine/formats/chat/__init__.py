"""OpenAI chat completions: the engine's own message form, so little is left to translate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rollout_engine.formats.base import Asked, Overrides
from rollout_engine.formats.chat.request import overridden as overridden_body
from rollout_engine.formats.chat.request import parse, request_of, sendable
from rollout_engine.formats.chat.stream import ChatWriter
from rollout_engine.models.sse import Assembler
from rollout_engine.models.wire import completion_of, response_of
from rollout_engine.types import Completion, Message, Sampling, ToolSpec


class Chat:
    """The format of /chat/completions; see `Format`."""

    name = "chat"

    def parse(self, body: Mapping[str, Any], model: str = "", stream: bool = False) -> Asked:
        return parse(body)

    def overridden(self, body: dict[str, Any], fixed: Overrides) -> dict[str, Any]:
        return overridden_body(body, fixed)

    def response(self, completion: Completion, asked: Asked, number: int, created: int) -> dict[str, Any]:
        message = completion.message
        if "reasoning_blocks" in message:
            completion = replace(completion, message={**message, **sendable(message)})
        return response_of(completion, asked.model, number, created)

    def writer(self, asked: Asked, number: int, created: int) -> ChatWriter:
        return ChatWriter(asked.model, number, created, asked.include_usage)

    def error(self, status: int, message: str, code: str) -> dict[str, Any]:
        return error_body(status, message, code)

    def models(self, names: Sequence[str]) -> dict[str, Any]:
        return model_list(names)

    def count(self, tokens: int) -> dict[str, Any]:
        return {"input_tokens": tokens}

    def request(
        self, model: str, messages: Sequence[Message], sampling: Sampling, tools: Sequence[ToolSpec], stream: bool
    ) -> dict[str, Any]:
        return request_of(model, messages, sampling, tools, stream)

    def completion(self, data: Any, model_s: float = 0.0, weight_version: str | None = None) -> Completion:
        return completion_of(data, model_s, weight_version)

    def assembler(self) -> Assembler:
        return Assembler()


def model_list(names: Sequence[str]) -> dict[str, Any]:
    """OpenAI's form of GET /models."""
    data = [{"id": name, "object": "model", "created": 0, "owned_by": "rollout-engine"} for name in names]
    return {"object": "list", "data": data}


def error_body(status: int, message: str, code: str) -> dict[str, Any]:
    """OpenAI's form of an error."""
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}
