"""Answers of the responses format <-> Completion."""

from __future__ import annotations

from typing import Any

from rollout_engine.errors import ModelBadResponse, ModelServerError
from rollout_engine.formats.base import Asked
from rollout_engine.formats.check import Malformed, objects_of
from rollout_engine.formats.parts import blocks_of, calls_of, plain_text
from rollout_engine.formats.responses.items import Gatherer, call_item, output_thought
from rollout_engine.models.wire import clean, count, finish_reason
from rollout_engine.types import Completion, Message, Usage


def completion_of(data: Any, model_s: float = 0.0, weight_version: str | None = None) -> Completion:
    """The completion in a parsed 200 body. Raises ModelBadResponse, ModelRefused, ModelServerError."""
    if not isinstance(data, dict) or not isinstance(data.get("output"), list):
        raise ModelBadResponse("the answer is no response: it has no list `output`")
    if data.get("status") == "failed":
        error = data.get("error")
        said = error.get("message") if isinstance(error, dict) else None
        raise ModelServerError(f"the response failed: {str(said)[:200]}")
    gathered = Gatherer()
    try:
        for item, where in objects_of(data["output"], "output"):
            gathered.add(item, where)
    except Malformed as error:
        finding = str(error)
    else:
        gathered.end()
        message = _joined(gathered.messages)
        usage = usage_of(data.get("usage"))
        return Completion(message, _reason(data, message), usage, weight_version=weight_version, model_s=model_s)
    raise ModelBadResponse(f"the answer is no response: {finding}")


def _joined(messages: list[Message]) -> Message:
    """The items of an answer are one message, however many texts it has."""
    whole: Message = {"role": "assistant", "content": None}
    texts = [plain_text(message.get("content")) for message in messages if message.get("content") is not None]
    if texts:
        whole["content"] = clean("".join(texts))
    for message in messages:
        for name in ("reasoning_content", "reasoning_blocks"):
            if name in message:
                whole[name] = message[name] if name not in whole else whole[name] + message[name]
        if "tool_calls" in message:
            whole["tool_calls"] = [*whole.get("tool_calls", ()), *message["tool_calls"]]
    return whole


def _reason(data: dict[str, Any], message: Message) -> str:
    if data.get("status") == "incomplete":
        details = data.get("incomplete_details")
        reason = details.get("reason") if isinstance(details, dict) else None
        return finish_reason({"max_output_tokens": "length"}.get(str(reason), reason))
    return "tool_calls" if "tool_calls" in message else "stop"


def response_of(completion: Completion, asked: Asked, number: int, created: int) -> dict[str, Any]:
    """A whole answer's body."""
    items = output_items(completion.message, number, asked.free_text)
    return {**response_head(asked, number, created), **ending(completion), "output": items}


def response_head(asked: Asked, number: int, created: int) -> dict[str, Any]:
    """What a response is before anything is said."""
    return {
        "id": f"resp_{number:06d}",
        "object": "response",
        "created_at": created,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "model": asked.model,
        "output": [],
        "parallel_tool_calls": True,
        "temperature": asked.sampling.temperature,
        "tool_choice": "auto",
        "tools": [],
        "top_p": asked.sampling.top_p,
        "usage": None,
    }


def ending(completion: Completion) -> dict[str, Any]:
    """How a response ended."""
    fields: dict[str, Any] = {"status": "completed", "usage": usage_json(completion.usage)}
    if completion.finish_reason in ("length", "content_filter"):
        reason = "max_output_tokens" if completion.finish_reason == "length" else "content_filter"
        fields |= {"status": "incomplete", "incomplete_details": {"reason": reason}}
    return fields


def output_items(message: Message, number: int, free_text: frozenset[str]) -> list[dict[str, Any]]:
    """An answer's items: thoughts, text, calls."""
    items = [output_thought(block, f"rs_{number}_{at}") for at, block in enumerate(blocks_of(message))]
    text = message.get("content")
    if text is not None and (text or not calls_of(message)):
        items.append(message_item(plain_text(text), number))
    for at, call in enumerate(calls_of(message)):
        items.append({**call_item(call, free_text), "id": f"fc_{number}_{at}", "status": "completed"})
    return items


def message_item(text: str, number: int) -> dict[str, Any]:
    """The text of an answer."""
    part = {"type": "output_text", "text": text, "annotations": []}
    return {
        "type": "message",
        "id": f"msg_{number}",
        "role": "assistant",
        "status": "completed",
        "content": [part],
    }


def usage_of(usage: Any) -> Usage:
    """Tokens as counted."""
    if not isinstance(usage, dict):
        return Usage()
    read, thought = usage.get("input_tokens_details"), usage.get("output_tokens_details")
    read, thought = (each if isinstance(each, dict) else {} for each in (read, thought))
    return Usage(
        count(usage.get("input_tokens")),
        count(usage.get("output_tokens")),
        count(read.get("cached_tokens")),
        count(read.get("cache_write_tokens")),
        count(thought.get("reasoning_tokens")),
    )


def usage_json(usage: Usage) -> dict[str, Any]:
    """The inverse of `usage_of`."""
    read = {"cached_tokens": usage.cached_tokens, "cache_write_tokens": usage.cache_write_tokens}
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": read,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
