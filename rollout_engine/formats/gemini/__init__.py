"""Gemini's generateContent: contents in parts, no roles but user and model, calls that often have no id."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollout_engine.formats.base import Asked, Overrides
from rollout_engine.formats.gemini.request import overridden as overridden_body
from rollout_engine.formats.gemini.request import parse, request_of
from rollout_engine.formats.gemini.response import completion_of, error_body, response_of
from rollout_engine.formats.gemini.stream import GeminiAssembler, GeminiWriter
from rollout_engine.types import Completion, Message, Sampling, ToolSpec


class Gemini:
    """The format of models/M:generateContent and :streamGenerateContent?alt=sse; see `Format`."""

    name = "gemini"

    def parse(self, body: Mapping[str, Any], model: str = "", stream: bool = False) -> Asked:
        return parse(body, model, stream)

    def overridden(self, body: dict[str, Any], fixed: Overrides) -> dict[str, Any]:
        return overridden_body(body, fixed)

    def response(self, completion: Completion, asked: Asked, number: int, created: int) -> dict[str, Any]:
        return response_of(completion, asked.model, number)

    def writer(self, asked: Asked, number: int, created: int) -> GeminiWriter:
        return GeminiWriter(asked.model, number)

    def error(self, status: int, message: str, code: str) -> dict[str, Any]:
        return error_body(status, message, code)

    def models(self, names: Sequence[str]) -> dict[str, Any]:
        methods = ["generateContent", "countTokens"]
        found = [
            {"name": f"models/{name}", "displayName": name, "supportedGenerationMethods": methods} for name in names
        ]
        return {"models": found}

    def count(self, tokens: int) -> dict[str, Any]:
        return {"totalTokens": tokens}

    def request(
        self, model: str, messages: Sequence[Message], sampling: Sampling, tools: Sequence[ToolSpec], stream: bool
    ) -> dict[str, Any]:
        return request_of(messages, sampling, tools)

    def completion(self, data: Any, model_s: float = 0.0, weight_version: str | None = None) -> Completion:
        return completion_of(data, model_s, weight_version)

    def assembler(self) -> GeminiAssembler:
        return GeminiAssembler()
