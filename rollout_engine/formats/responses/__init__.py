"""OpenAI responses: a conversation as a list of items, one item for each thought, text, call and result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollout_engine.formats.base import Asked, Overrides
from rollout_engine.formats.chat import error_body, model_list
from rollout_engine.formats.responses.request import overridden as overridden_body
from rollout_engine.formats.responses.request import parse, request_of
from rollout_engine.formats.responses.response import completion_of, response_of
from rollout_engine.formats.responses.stream import ResponsesAssembler, ResponsesWriter
from rollout_engine.types import Completion, Message, Sampling, ToolSpec


class Responses:
    """The format of /responses; see `Format`."""

    name = "responses"

    def parse(self, body: Mapping[str, Any], model: str = "", stream: bool = False) -> Asked:
        return parse(body)

    def overridden(self, body: dict[str, Any], fixed: Overrides) -> dict[str, Any]:
        return overridden_body(body, fixed)

    def response(self, completion: Completion, asked: Asked, number: int, created: int) -> dict[str, Any]:
        return response_of(completion, asked, number, created)

    def writer(self, asked: Asked, number: int, created: int) -> ResponsesWriter:
        return ResponsesWriter(asked, number, created)

    def error(self, status: int, message: str, code: str) -> dict[str, Any]:
        return error_body(status, message, code)

    def models(self, names: Sequence[str]) -> dict[str, Any]:
        return model_list(names)

    def count(self, tokens: int) -> dict[str, Any]:
        return {"object": "response.input_tokens", "input_tokens": tokens}

    def request(
        self, model: str, messages: Sequence[Message], sampling: Sampling, tools: Sequence[ToolSpec], stream: bool
    ) -> dict[str, Any]:
        return request_of(model, messages, sampling, tools, stream)

    def completion(self, data: Any, model_s: float = 0.0, weight_version: str | None = None) -> Completion:
        return completion_of(data, model_s, weight_version)

    def assembler(self) -> ResponsesAssembler:
        return ResponsesAssembler()
