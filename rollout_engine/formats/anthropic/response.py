"""Anthropic's answers and errors <-> Completion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout_engine.errors import ModelBadResponse
from rollout_engine.formats.anthropic.blocks import answer_blocks, assistant_message
from rollout_engine.formats.check import Malformed
from rollout_engine.formats.parts import plain_text
from rollout_engine.models.wire import clean, count, finish_reason
from rollout_engine.types import Completion, Usage

_STOPS = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "tool_use": "tool_calls",
    "refusal": "content_filter",
}
_ENDS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    529: "overloaded_error",
}


def completion_of(data: Any, model_s: float = 0.0, weight_version: str | None = None) -> Completion:
    """The completion in a parsed 200 body. Raises ModelBadResponse and ModelRefused."""
    if not isinstance(data, dict) or not isinstance(data.get("content"), list):
        raise ModelBadResponse("the answer is no message: it has no list `content`")
    stop = data.get("stop_reason")
    reason = finish_reason(_STOPS.get(stop, stop) if isinstance(stop, str) else None)
    try:
        message = assistant_message(data["content"], "content")
    except Malformed as error:
        finding = str(error)
    else:
        # One text, as every agent knows it; which block it came in says nothing.
        if isinstance(message["content"], list) and all(part.get("type") == "text" for part in message["content"]):
            message["content"] = plain_text(message["content"])
        if isinstance(message["content"], str):
            message["content"] = clean(message["content"])
        stopped = data.get("stop_sequence")
        return Completion(
            message=message,
            finish_reason=reason,
            usage=usage_of(data.get("usage")),
            weight_version=weight_version,
            model_s=model_s,
            stop_sequence=clean(stopped) if isinstance(stopped, str) else None,
        )
    raise ModelBadResponse(f"the answer is no message: {finding}")


def response_of(completion: Completion, model: str, number: int) -> dict[str, Any]:
    """A whole answer's body."""
    return {
        **message_head(model, number),
        "content": answer_blocks(completion.message, sent_back=False),
        **stop_json(completion),
        "usage": usage_json(completion.usage),
    }


def message_head(model: str, number: int) -> dict[str, Any]:
    """What an answer is before anything is said."""
    return {"id": f"msg_{number:06d}", "type": "message", "role": "assistant", "model": model}


def stop_json(completion: Completion) -> dict[str, Any]:
    """Why the answer ended."""
    reason = _ENDS.get(completion.finish_reason, completion.finish_reason)
    if completion.stop_sequence is not None:
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": completion.stop_sequence}


def usage_of(usage: Any) -> Usage:
    """Tokens as counted. Anthropic's input excludes what was read from or written to the cache."""
    if not isinstance(usage, dict):
        return Usage()
    read, written = count(usage.get("cache_read_input_tokens")), count(usage.get("cache_creation_input_tokens"))
    details = usage.get("output_tokens_details")
    return Usage(
        count(usage.get("input_tokens")) + read + written,
        count(usage.get("output_tokens")),
        read,
        written,
        count(details.get("reasoning_tokens")) if isinstance(details, dict) else 0,
    )


def usage_json(usage: Usage) -> dict[str, Any]:
    """The inverse of `usage_of`."""
    fields: dict[str, Any] = {
        "input_tokens": max(usage.prompt_tokens - usage.cached_tokens - usage.cache_write_tokens, 0),
        "cache_creation_input_tokens": usage.cache_write_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
    if usage.reasoning_tokens:
        fields["output_tokens_details"] = {"reasoning_tokens": usage.reasoning_tokens}
    return fields


def error_body(status: int, message: str, code: str) -> dict[str, Any]:
    """Anthropic's form of an error; `code` is ours."""
    kind = _ERRORS.get(status, "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": message, "code": code}}


def merged_usage(before: Mapping[str, Any], update: Any) -> dict[str, Any]:
    """The usage of a stream's end over that of its beginning: what the end leaves out stays."""
    new = update if isinstance(update, dict) else {}
    return {**before, **{name: value for name, value in new.items() if value is not None}}
