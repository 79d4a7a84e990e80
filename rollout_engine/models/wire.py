"""The bodies of /chat/completions <-> messages and Completion, for the client and for our own server."""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Final

from pydantic_core import from_json

from rollout_engine.config import ModelSpec
from rollout_engine.errors import ModelBadResponse, ModelRefused, ModelServerError
from rollout_engine.types import Completion, Message, Sampling, ToolSpec, Usage

# Made once: json.dumps with other than the default separators makes a new encoder for every call. ASCII only, so
# that a lone surrogate in a tool's output is sent as an escape and not raised as an encoding error.
encode: Final = json.JSONEncoder(separators=(",", ":")).encode

PARSE_IN_THREAD_BYTES = 256 * 1024
"""A body above this size is parsed beside the event loop."""
WEIGHT_VERSION_HEADER = "x-weight-version"
_MAX_COUNT = 2**53
_EXCERPT = 200


def sampling_of(spec: ModelSpec) -> Sampling:
    """The sampling parameters that a model's spec asks for."""
    return Sampling(
        temperature=spec.temperature,
        top_p=spec.top_p,
        max_tokens=spec.max_tokens,
        seed=spec.seed,
        stop=spec.stop,
        logprobs=spec.logprobs,
        extra=spec.extra_body,
    )


def request_head(model: str, sampling: Sampling, tools: Sequence[ToolSpec], stream: bool) -> str:
    """A request body up to its messages: the same for every call with this sampling and these tools."""
    return encode(request_fields(model, sampling, tools, stream))[:-1] + ',"messages":'


def request_fields(model: str, sampling: Sampling, tools: Sequence[ToolSpec], stream: bool) -> dict[str, Any]:
    """A request body without its messages."""
    body: dict[str, Any] = {"model": model}
    for name in ("temperature", "top_p", "max_tokens", "seed"):
        value = getattr(sampling, name)
        if value is not None:
            body[name] = value
    if sampling.stop:
        body["stop"] = list(sampling.stop)
    if sampling.logprobs:
        body["logprobs"] = True
        body["return_token_ids"] = True
    if tools:
        body["tools"] = [tool_json(tool) for tool in tools]
    if stream:
        body["stream"] = True
        body["stream_options"] = {"include_usage": True}
    body.update(sampling.extra)
    body.pop("messages", None)
    return body


def request_body(head: str, messages: Sequence[Message]) -> bytes:
    """The whole request body, after `request_head`."""
    return (head + encode(messages) + "}").encode("ascii")


def tool_json(tool: ToolSpec) -> dict[str, Any]:
    """A tool as the request names it."""
    function = {"name": tool.name, "description": tool.description, "parameters": dict(tool.parameters)}
    return {"type": "function", "function": function}


def load_json(body: bytes) -> Any:
    """Parses a small body on the spot. Raises ModelBadResponse.

    With pydantic's parser, at 0.4 of the cost; what it does not take (a lone surrogate, deep nesting) json may.
    """
    try:
        return from_json(body, cache_strings="keys")
    except ValueError:
        pass
    return _load(body, {})


def load_big_json(body: bytes) -> Any:
    """Parses a big body in a thread of its own. Raises ModelBadResponse.

    The C parser holds the interpreter lock through the whole text. The hooks are Python functions, so it gives way
    at each object and number, and the event loop goes on meanwhile.
    """
    return _load(body, {"object_hook": _as_it_is, "parse_int": _int, "parse_float": _float})


def _load(body: bytes, hooks: dict[str, Any]) -> Any:
    try:
        return json.loads(body.decode("utf-8"), **hooks)
    except (ValueError, RecursionError) as error:
        # A JSONDecodeError holds the whole text; only its finding goes on.
        why = error.msg if isinstance(error, json.JSONDecodeError) else type(error).__name__
    raise ModelBadResponse(f"the answer is no JSON ({why}): {excerpt(body)}")


def _as_it_is(value: dict[str, Any]) -> dict[str, Any]:
    return value


def _int(text: str) -> int:
    return int(text)


def _float(text: str) -> float:
    return float(text)


def excerpt(body: bytes) -> str:
    """The beginning of a body that cannot be used, for a message."""
    return body[:_EXCERPT].decode("utf-8", "replace") if body else "(empty)"


def completion_of(data: Any, model_s: float = 0.0, weight_version: str | None = None) -> Completion:
    """The completion in a parsed 200 body. Raises ModelBadResponse, ModelRefused, ModelServerError (aborted)."""
    if not isinstance(data, dict):
        raise ModelBadResponse(f"the answer is a JSON {type(data).__name__}, not an object")
    choices = data.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise ModelBadResponse(f"the answer has no choices: {encode(data)[:_EXCERPT]}")
    choice = choices[0]
    logprobs = choice.get("logprobs")
    return Completion(
        message=_message(choice.get("message")),
        finish_reason=finish_reason(choice.get("finish_reason")),
        usage=usage_of(data.get("usage")),
        prompt_token_ids=_token_ids(data.get("prompt_token_ids")),
        completion_token_ids=_token_ids(choice.get("token_ids")),
        logprobs=logprobs_of(logprobs) if logprobs is not None else None,
        weight_version=_weight_version(data) or weight_version,
        model_s=model_s,
        stop_sequence=clean(choice["stop_reason"]) if isinstance(choice.get("stop_reason"), str) else None,
    )


def finish_reason(value: Any) -> str:
    """The reason as sent. Raises ModelRefused for a content filter, ModelServerError for an aborted answer."""
    if value == "content_filter":
        raise ModelRefused("the provider's content filter withheld the answer")
    if value == "abort":
        # vLLM and SGLang end running answers so when their weights are swapped: a part of an answer is no answer.
        raise ModelServerError("the server aborted the answer")
    return clean(value) if isinstance(value, str) else "unknown"


def _message(message: Any) -> Message:
    """The message as sent, without the fields that the server left empty (they may be refused when sent back)."""
    if not isinstance(message, dict):
        raise ModelBadResponse("the answer's first choice has no message")
    content, calls = message.get("content"), message.get("tool_calls")
    if not (content is None or isinstance(content, str | list)):
        raise ModelBadResponse(f"the answer's content is a {type(content).__name__}")
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise ModelBadResponse("the answer's tool_calls are no list of objects")
    role = message.get("role")
    kept: Message = {"role": clean(role) if isinstance(role, str) else "assistant"}
    kept["content"] = clean(content) if isinstance(content, str) else content
    if len(message) > 2:
        kept.update((name, value) for name, value in message.items() if name not in kept and value not in (None, []))
        if "reasoning_blocks" in kept:  # our own server says the same as text, for those who know no blocks
            kept.pop("reasoning_content", None)
    return kept


def usage_of(usage: Any) -> Usage:
    """Tokens as the server counted them; what is absent or no count is 0."""
    if not isinstance(usage, dict):
        return Usage()
    details, thought = usage.get("prompt_tokens_details"), usage.get("completion_tokens_details")
    details = details if isinstance(details, dict) else {}
    return Usage(
        count(usage.get("prompt_tokens")),
        count(usage.get("completion_tokens")),
        count(details.get("cached_tokens")),
        count(details.get("cache_write_tokens")),
        count(thought.get("reasoning_tokens")) if isinstance(thought, dict) else 0,
    )


def count(value: Any) -> int:
    """A number of tokens; what is absent or no count is 0."""
    # Bounded: a count that fits no column would take its whole batch of rows with it.
    return value if type(value) is int and 0 <= value < _MAX_COUNT else 0


def _token_ids(ids: Any) -> list[int] | None:
    if ids is None:
        return None
    try:
        return list(array("i", ids))  # checks type and range in C: ids are 32-bit columns
    except (TypeError, OverflowError):
        pass
    raise ModelBadResponse("the answer's token ids are no list of 32-bit integers")


def logprobs_of(logprobs: Any) -> list[float] | None:
    """The log-probability of each token; None where they are not all there (a part could not be aligned)."""
    content = logprobs.get("content") if isinstance(logprobs, dict) else None
    if not isinstance(content, list):
        return None
    try:
        return list(array("d", [token["logprob"] for token in content]))
    except (TypeError, KeyError, OverflowError):
        return None


def _weight_version(data: Mapping[str, Any]) -> str | None:
    value = data.get("weight_version")
    if value is None:
        metadata = data.get("metadata")  # where SGLang puts it
        value = metadata.get("weight_version") if isinstance(metadata, dict) else None
    return clean(str(value)) if isinstance(value, str | int) else None


def clean(text: str) -> str:
    """The text without lone surrogates, which JSON may hold but no UTF-8 column can."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace").decode()
    return text


def response_of(completion: Completion, model: str, number: int, created: int) -> dict[str, Any]:
    """A whole response body: the inverse of `completion_of` but for `model_s`."""
    choice: dict[str, Any] = {"index": 0, "message": completion.message, "finish_reason": completion.finish_reason}
    if completion.stop_sequence is not None:
        choice["stop_reason"] = completion.stop_sequence
    if completion.logprobs is not None:
        choice["logprobs"] = logprobs_json(completion.logprobs)
    if completion.completion_token_ids is not None:
        choice["token_ids"] = completion.completion_token_ids
    body: dict[str, Any] = {
        "id": f"chatcmpl-{number}",
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": [choice],
        "usage": usage_json(completion.usage),
    }
    if completion.prompt_token_ids is not None:
        body["prompt_token_ids"] = completion.prompt_token_ids
    if completion.weight_version is not None:
        body["weight_version"] = completion.weight_version
    return body


def logprobs_json(logprobs: Sequence[float]) -> dict[str, Any]:
    """Log-probabilities in the chat form; the tokens' texts are not known."""
    return {"content": [{"token": "", "logprob": value, "top_logprobs": []} for value in logprobs]}


def usage_json(usage: Usage) -> dict[str, Any]:
    """The usage object of a response."""
    body: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
    if usage.cache_write_tokens:
        body["prompt_tokens_details"]["cache_write_tokens"] = usage.cache_write_tokens
    if usage.reasoning_tokens:
        body["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning_tokens}
    return body
