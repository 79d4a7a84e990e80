"""Random conversations and answers in the engine's own form, as far as a format can carry them."""

from __future__ import annotations

import base64
import json
from typing import Any

from hypothesis import strategies as st

from rollout_engine.formats.base import Asked
from rollout_engine.formats.parts import answer_message, data_url, image_part, text_part, tool_call
from rollout_engine.models.wire import encode
from rollout_engine.types import Completion, Message, Sampling, ToolSpec, Usage

texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=30)
names = st.from_regex(r"[a-z][a-z_]{0,10}", fullmatch=True)
values: Any = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(-1e9, 1e9) | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
arguments = st.dictionaries(st.text(max_size=6), values, max_size=3).map(lambda data: encode(json.loads(encode(data))))
base64s = st.binary(min_size=1, max_size=20).map(lambda data: base64.b64encode(data).decode())
images = st.one_of(
    base64s.map(lambda data: image_part(data_url("image/png", data))),
    st.just(image_part("https://example.org/a.png")),
)
signatures = st.text("abcdefgh", min_size=1, max_size=8)


def thoughts(format_name: str, sent_back: bool) -> st.SearchStrategy[list[dict[str, Any]]]:
    """Reasoning as this format carries it; `sent_back`: what survives in a request to a server."""
    plain = texts.map(lambda text: [{"type": "reasoning", "text": text}])
    signed = st.fixed_dictionaries({"type": st.just("reasoning"), "text": texts, "signature": signatures})
    redacted = st.fixed_dictionaries({"type": st.just("reasoning"), "text": st.just(""), "encrypted": signatures})
    hidden = st.builds(
        lambda summary, secret, rs: {
            "type": "reasoning",
            "text": "\n\n".join(summary),
            "encrypted": secret,
            "id": rs,
            **({"summary": summary} if summary else {}),
        },
        st.lists(texts, max_size=2),
        signatures,
        signatures,
    )
    google = st.fixed_dictionaries({"type": st.just("reasoning"), "text": texts, "thought_signature": signatures})
    own = {"anthropic": signed | redacted, "responses": hidden, "gemini": google, "chat": signed}[format_name]
    carried = st.lists(own, min_size=1, max_size=2)
    if sent_back and format_name in ("anthropic", "responses"):
        return st.just([]) | carried
    if sent_back and format_name == "chat":  # a chat server knows thoughts as text alone
        return st.just([]) | plain
    return st.just([]) | plain | carried


@st.composite
def answers(draw: st.DrawFn, format_name: str, first_call: int = 0, sent_back: bool = False) -> Message:
    """An assistant message that says something."""
    calls = []
    for at in range(draw(st.integers(0, 3))):
        extra = None
        if format_name == "gemini" and draw(st.booleans()):
            extra = {"extra_content": {"google": {"thought_signature": draw(signatures)}}}
        calls.append(tool_call(f"call-{first_call + at}", draw(names), draw(arguments), extra))
    text = draw(texts) if not calls or draw(st.booleans()) else None
    return answer_message(text, draw(thoughts(format_name, sent_back)), calls)


@st.composite
def completions(draw: st.DrawFn, format_name: str) -> Completion:
    """A whole answer with usage as this format counts it."""
    message = draw(answers(format_name))
    cached, written, thought = (draw(st.integers(0, 50)) for _ in range(3))
    written = 0 if format_name == "gemini" else written
    prompt, said = cached + written + draw(st.integers(0, 100)), thought + draw(st.integers(0, 100))
    ends = ["length", "tool_calls" if "tool_calls" in message else "stop"]
    stop = draw(st.none() | texts) if format_name in ("chat", "anthropic") and "tool_calls" not in message else None
    reason = "stop" if stop is not None else draw(st.sampled_from(ends))
    return Completion(message, reason, Usage(prompt, said, cached, written, thought), stop_sequence=stop)


@st.composite
def users(draw: st.DrawFn) -> Message:
    parts = draw(st.lists(texts.map(text_part) | images, min_size=1, max_size=3))
    plain = len(parts) == 1 and parts[0]["type"] == "text"
    return {"role": "user", "content": parts[0]["text"] if plain else parts}


@st.composite
def requests(draw: st.DrawFn, format_name: str) -> Asked:
    """A whole request."""
    messages: list[Message] = []
    if draw(st.booleans()):
        messages.append({"role": "system", "content": draw(texts)})
    calls = 0
    for _ in range(draw(st.integers(1, 3))):
        messages.append(draw(users()))
        answer = draw(answers(format_name, calls, sent_back=True))
        messages.append(answer)
        for call in answer.get("tool_calls", ()):
            calls += 1
            result: Message = {"role": "tool", "tool_call_id": call["id"], "content": draw(st.text(max_size=20))}
            if format_name == "gemini":
                result = {**result, "name": call["function"]["name"]}
            if format_name == "anthropic" and draw(st.booleans()):
                result["is_error"] = True
            messages.append(result)
    if messages[-1]["role"] == "assistant":
        messages.append(draw(users()))
    tools = tuple(
        ToolSpec(name, draw(st.text(max_size=10)), {"type": "object", "properties": {"a": {"type": "string"}}})
        for name in draw(st.lists(names, max_size=3, unique=True))
    )
    return Asked("m", messages, draw(samplings(format_name)), tools, draw(st.booleans()))


@st.composite
def samplings(draw: st.DrawFn, format_name: str) -> Sampling:
    extra: dict[str, Any] = {}
    choice = draw(st.sampled_from([None, "auto", "none", "required", {"type": "function", "function": {"name": "f"}}]))
    if choice is not None:
        extra["tool_choice"] = choice
    if draw(st.booleans()):
        extra["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"a": 1}}}
    if format_name != "gemini" and draw(st.booleans()):
        extra["reasoning_effort"] = "low"
    if format_name in ("anthropic", "gemini", "chat") and draw(st.booleans()):
        extra["top_k"] = 5
    if format_name == "anthropic" and draw(st.booleans()) and choice not in (None, "none"):
        extra["parallel_tool_calls"] = False
    limit = draw(st.integers(1, 100)) if format_name == "anthropic" else draw(st.none() | st.integers(1, 100))
    return Sampling(
        temperature=draw(st.none() | st.floats(0, 2)),
        top_p=draw(st.none() | st.floats(0.1, 1)),
        max_tokens=limit,
        seed=draw(st.none() | st.integers(0, 9)) if format_name in ("chat", "gemini") else None,
        stop=tuple(draw(st.lists(texts, max_size=2))) if format_name != "responses" else (),
        extra=extra,
    )
