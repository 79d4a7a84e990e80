"""Gemini's answers and errors <-> Completion."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from rollout_engine.errors import ModelBadResponse, ModelRefused
from rollout_engine.formats.check import Malformed, objects_of
from rollout_engine.formats.gemini.contents import Reader, answer_parts
from rollout_engine.models.wire import clean, count, encode, finish_reason
from rollout_engine.types import Completion, Usage

_REFUSALS = frozenset({"SAFETY", "RECITATION", "LANGUAGE", "BLOCKLIST", "PROHIBITED_CONTENT", "SPII", "IMAGE_SAFETY"})
_STATUSES = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    429: "RESOURCE_EXHAUSTED",
    503: "UNAVAILABLE",
}
_ENDS = {"stop": "STOP", "tool_calls": "STOP", "length": "MAX_TOKENS", "content_filter": "SAFETY"}


def completion_of(data: Any, model_s: float = 0.0, weight_version: str | None = None) -> Completion:
    """The completion in a parsed 200 body. Raises ModelBadResponse and ModelRefused."""
    if not isinstance(data, dict):
        raise ModelBadResponse(f"the answer is a JSON {type(data).__name__}, not an object")
    candidates, feedback = data.get("candidates"), data.get("promptFeedback")
    if isinstance(feedback, dict) and feedback.get("blockReason"):
        raise ModelRefused(f"the provider refused the prompt ({str(feedback['blockReason'])[:100]})")
    if not isinstance(candidates, list) or not candidates or not isinstance(candidates[0], dict):
        raise ModelBadResponse(f"the answer has no candidates: {encode(data)[:200]}")
    candidate = candidates[0]
    content, made = candidate.get("content"), data.get("responseId")
    parts = content.get("parts") if isinstance(content, dict) else None
    # Ids that no other answer of the conversation has, where the server gives none.
    reader = Reader(f"call-{made if isinstance(made, str) else secrets.token_hex(6)}-")
    try:
        message = reader.answer(objects_of(parts, "parts"))
    except Malformed as error:
        finding = str(error)
    else:
        if isinstance(message["content"], str):
            message["content"] = clean(message["content"])
        reason = _reason(candidate.get("finishReason"), "tool_calls" in message)
        usage = usage_of(data.get("usageMetadata"))
        return Completion(message, reason, usage, weight_version=weight_version, model_s=model_s)
    raise ModelBadResponse(f"the answer is no content: {finding}")


def _reason(value: Any, calls: bool) -> str:
    if isinstance(value, str) and value in _REFUSALS:
        return finish_reason("content_filter")
    if value in ("STOP", None):
        return "tool_calls" if calls else "stop" if value else "unknown"
    return "length" if value == "MAX_TOKENS" else finish_reason(value)


def response_of(completion: Completion, model: str, number: int) -> dict[str, Any]:
    """A whole answer's body, and the only chunk of a stream that is sent at once."""
    return chunk_of(answer_parts(completion.message), model, number, completion)


def chunk_of(
    parts: list[dict[str, Any]], model: str, number: int, completion: Completion | None = None
) -> dict[str, Any]:
    """Some parts of an answer; `completion`: the last of them."""
    candidate: dict[str, Any] = {"content": {"role": "model", "parts": parts}, "index": 0}
    body: dict[str, Any] = {"candidates": [candidate], "modelVersion": model, "responseId": f"response-{number}"}
    if completion is not None:
        reason = completion.finish_reason
        candidate["finishReason"] = _ENDS.get(reason, reason)
        body["usageMetadata"] = usage_json(completion.usage)
    return body


def usage_of(usage: Any) -> Usage:
    """Tokens as counted. Gemini's candidates exclude the thoughts."""
    if not isinstance(usage, dict):
        return Usage()
    thoughts = count(usage.get("thoughtsTokenCount"))
    return Usage(
        count(usage.get("promptTokenCount")) + count(usage.get("toolUsePromptTokenCount")),
        count(usage.get("candidatesTokenCount")) + thoughts,
        count(usage.get("cachedContentTokenCount")),
        0,
        thoughts,
    )


def usage_json(usage: Usage) -> Mapping[str, Any]:
    """The inverse of `usage_of`."""
    fields = {
        "promptTokenCount": usage.prompt_tokens,
        "candidatesTokenCount": max(usage.completion_tokens - usage.reasoning_tokens, 0),
        "totalTokenCount": usage.prompt_tokens + usage.completion_tokens,
    }
    if usage.cached_tokens:
        fields["cachedContentTokenCount"] = usage.cached_tokens
    if usage.reasoning_tokens:
        fields["thoughtsTokenCount"] = usage.reasoning_tokens
    return fields


def error_body(status: int, message: str, code: str) -> dict[str, Any]:
    """Google's form of an error; `reason` is ours."""
    name = _STATUSES.get(status, "INTERNAL" if status >= 500 else "INVALID_ARGUMENT")
    return {"error": {"code": status, "message": message, "status": name, "reason": code}}
