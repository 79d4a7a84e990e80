"""What a server's refusal means: HTTP status and error code -> typed error. Text decides in one case only (below)."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any

from rollout_engine.errors import (
    LimitReached,
    ModelAuthError,
    ModelError,
    ModelMissingAnswer,
    ModelRateLimited,
    ModelRefused,
    ModelRequestError,
    ModelServerError,
)
from rollout_engine.models.retry import Failed, retry_after_s
from rollout_engine.models.wire import clean
from rollout_engine.types import StopReason

MISSING_ANSWER = "missing_answer"
"""Error code of our own server for an answer that was not recorded."""
MAX_DETAIL_CHARS = 500

_OVERFLOW_CODES = frozenset({"context_length_exceeded"})
_REFUSED_CODES = frozenset({"content_filter", "content_policy_violation"})
# vLLM, SGLang, Anthropic and Gemini answer a prompt that does not fit with a plain 400 without a code of its own.
_OVERFLOW_TEXT = re.compile(
    r"(maximum|model's) context length|prompt is too long|exceeds the maximum number of tokens", re.IGNORECASE
)
_STATUS_OF_TYPE = {
    "invalid_request_error": 400,
    "authentication_error": 401,
    "permission_error": 403,
    "not_found_error": 404,
    "request_too_large": 413,
    "rate_limit_error": 429,
}
"""Anthropic's types of error; all others are the server's own."""

Redact = Callable[[str], str]


def refusal(status: int, headers: Mapping[str, str], body: bytes, where: str, redact: Redact) -> Failed:
    """The typed error of a response that is no 2xx, and the pause that it asks for."""
    code, detail = error_fields(body)
    if _is_overflow(status, code, detail):
        return Failed(LimitReached(StopReason.CONTEXT_OVERFLOW))
    # Redacted before it is cut, or a cut through the key would leave its first part.
    text = f"{where}: {status} {_phrase(status)}: {redact(detail)[:MAX_DETAIL_CHARS]}"
    if 300 <= status < 400:
        target = redact(headers.get("location", "nowhere"))[:MAX_DETAIL_CHARS]
        return Failed(ModelRequestError(f"{text} (redirected to {target}: fix base_url)"))
    pause = retry_after_s(headers.get("retry-after"), time.time())
    return Failed(typed_error(status, code, text, pause), pause)


def typed_error(status: int, code: str | None, text: str, pause: float | None = None) -> ModelError:
    """The kind of error that a status and an error code stand for."""
    if code in _REFUSED_CODES:
        return ModelRefused(text)
    if code == MISSING_ANSWER:
        return ModelMissingAnswer(text)
    if status == HTTPStatus.TOO_MANY_REQUESTS:
        return ModelRateLimited(text, pause)
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        return ModelAuthError(text)
    if status >= 500 or status == HTTPStatus.REQUEST_TIMEOUT:
        return ModelServerError(text)
    return ModelRequestError(text)


def stream_error(error: Any, where: str, redact: Redact) -> ModelError | LimitReached:
    """The typed error of an error event within a stream, whose status was 200."""
    code, detail = _fields({"error": error})
    status = error.get("code") if isinstance(error, dict) else None
    if not (isinstance(status, int) and 400 <= status < 600):
        kind = error.get("type") if isinstance(error, dict) else None
        status = _STATUS_OF_TYPE.get(str(kind), int(HTTPStatus.INTERNAL_SERVER_ERROR))
    if _is_overflow(status, code, detail):
        return LimitReached(StopReason.CONTEXT_OVERFLOW)
    return typed_error(status, code, f"{where}: error within the stream: {redact(detail)[:MAX_DETAIL_CHARS]}")


def error_within(event: Any) -> Any:
    """The error that an event of a stream holds, None where it holds an answer's piece."""
    if not isinstance(event, dict):
        return None
    if event.get("error"):
        return event["error"]
    kind, response = event.get("type"), event.get("response")
    if kind == "response.failed":
        return (response.get("error") if isinstance(response, dict) else None) or "the response failed"
    return event if kind == "error" else None


def error_fields(body: bytes) -> tuple[str | None, str]:
    """The error's code, where it has one, and its message (or the beginning of the body)."""
    text = body.decode("utf-8", "replace").strip()
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return None, text or "(empty)"
    return _fields(data)


def _fields(data: Any) -> tuple[str | None, str]:
    error = data.get("error", data) if isinstance(data, dict) else data
    if not isinstance(error, dict):
        return None, clean(str(error))
    code, message = error.get("code"), error.get("message")
    detail = message if isinstance(message, str) else json.dumps(error)
    code = code if isinstance(code, str) else error.get("reason")  # Gemini's code is the status
    return code if isinstance(code, str) else None, clean(detail)


def _is_overflow(status: int, code: str | None, detail: str) -> bool:
    return code in _OVERFLOW_CODES or (status == HTTPStatus.BAD_REQUEST and _OVERFLOW_TEXT.search(detail) is not None)


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return ""
