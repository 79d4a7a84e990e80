"""Anthropic's messages: content in blocks, tool results in the user's turn, thoughts with signatures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollout_engine.formats.anthropic.request import overridden as overridden_body
from rollout_engine.formats.anthropic.request import parse, request_of
from rollout_engine.formats.anthropic.response import completion_of, error_body, response_of
from rollout_engine.formats.anthropic.stream import AnthropicAssembler, AnthropicWriter
from rollout_engine.formats.base import Asked, Overrides
from rollout_engine.types import Completion, Message, Sampling, ToolSpec


class Anthropic:
    """The format of /v1/messages; see `Format`."""

    name = "anthropic"

    def parse(self, body: Mapping[str, Any], model: str = "", stream: bool = False) -> Asked:
        return parse(body)

    def overridden(self, body: dict[str, Any], fixed: Overrides) -> dict[str, Any]:
        return overridden_body(body, fixed)

    def response(self, completion: Completion, asked: Asked, number: int, created: int) -> dict[str, Any]:
        return response_of(completion, asked.model, number)

    def writer(self, asked: Asked, number: int, created: int) -> AnthropicWriter:
        return AnthropicWriter(asked.model, number)

    def error(self, status: int, message: str, code: str) -> dict[str, Any]:
        return error_body(status, message, code)

    def models(self, names: Sequence[str]) -> dict[str, Any]:
        born = "1970-01-01T00:00:00Z"
        data = [{"type": "model", "id": name, "display_name": name, "created_at": born} for name in names]
        first, last = (names[0], names[-1]) if names else (None, None)
        return {"data": data, "has_more": False, "first_id": first, "last_id": last}

    def count(self, tokens: int) -> dict[str, Any]:
        return {"input_tokens": tokens}

    def request(
        self, model: str, messages: Sequence[Message], sampling: Sampling, tools: Sequence[ToolSpec], stream: bool
    ) -> dict[str, Any]:
        return request_of(model, messages, sampling, tools, stream)

    def completion(self, data: Any, model_s: float = 0.0, weight_version: str | None = None) -> Completion:
        return completion_of(data, model_s, weight_version)

    def assembler(self) -> AnthropicAssembler:
        return AnthropicAssembler()
