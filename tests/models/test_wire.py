"""Bodies <-> Completion, whole and streamed, cut anywhere.

.venv/bin/pytest tests/models/test_wire.py
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_engine.errors import ModelBadResponse, ModelError
from rollout_engine.models.sse import DONE, Assembler, EventSplitter, chunks_of
from rollout_engine.models.wire import (
    completion_of,
    encode,
    load_big_json,
    load_json,
    request_body,
    request_head,
    response_of,
)
from rollout_engine.types import Completion, Sampling, Usage

_NAMES = (
    "choices message delta content role tool_calls function index token_ids logprobs logprob usage prompt_tokens "
    "finish_reason metadata weight_version name arguments"
)
FIELDS = _NAMES.split()

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=200)
count = st.integers(0, 2**40)
ids = st.none() | st.lists(st.integers(0, 2**31 - 1), max_size=50)
function = st.fixed_dictionaries({"name": text.filter(bool), "arguments": text})
tool_call = st.fixed_dictionaries({"id": text, "type": st.just("function"), "function": function})
message = st.builds(
    lambda content, calls, thought: {
        "role": "assistant",
        "content": content,
        **({"tool_calls": calls} if calls else {}),
        **({"reasoning_content": thought} if thought else {}),
    },
    st.none() | text,
    st.lists(tool_call, max_size=3),
    text,
)
completions = st.builds(
    Completion,
    message=message,
    finish_reason=st.sampled_from(["stop", "length", "tool_calls", "eos"]),
    usage=st.builds(Usage, count, count, count),
    prompt_token_ids=ids,
    completion_token_ids=ids,
    logprobs=st.none() | st.lists(st.floats(-1e6, 0), max_size=50),
    weight_version=st.none() | text.filter(bool),
)
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(FIELDS),
            inner,
            max_size=6,
        )
    ),
    max_leaves=30,
)


@given(completions)
def test_a_whole_answer_survives_the_wire(completion: Completion) -> None:
    body = encode(response_of(completion, "m", 1, 0)).encode("ascii")
    assert completion_of(load_json(body)) == completion
    assert completion_of(load_big_json(body)) == completion


@given(completions, st.integers(1, 40), st.sampled_from([b"\n", b"\r\n"]))
def test_a_streamed_answer_survives_the_wire_however_it_is_cut(completion: Completion, size: int, end: bytes) -> None:
    events = [encode(chunk).encode("ascii") for chunk in chunks_of(completion, "m", 1, 0)]
    stream = b": a comment" + end + b"".join(b"data: " + event + end + end for event in [*events, DONE])
    splitter, assembler = EventSplitter(), Assembler()
    got: list[bytes] = []
    for start in range(0, len(stream), size):
        got += splitter.feed(stream[start : start + size])
    assert list(splitter.end()) == []
    assert got == [*events, DONE]
    texts = [assembler.add(json.loads(event)).content for event in events]
    assert "".join(texts) == (completion.message["content"] or "")
    whole = assembler.completion()
    if completion.completion_token_ids == [] or completion.logprobs == []:
        return  # an empty list in pieces is a list that nobody sent
    assert whole == completion


def test_an_unended_last_event_counts() -> None:
    splitter = EventSplitter()
    assert list(splitter.feed(b"data: a\n\ndata:b\ndata: c")) == [b"a"]
    assert list(splitter.end()) == [b"b\nc"]


@given(anything)
def test_whatever_a_server_sends_is_a_completion_or_a_typed_error(data: Any) -> None:
    assembler = Assembler()
    for read in (completion_of, assembler.add, lambda _: assembler.completion()):
        try:
            result = read(data)
        except ModelError:
            continue
        if isinstance(result, Completion):
            encode(result.message)
            assert result.message["content"] is None or isinstance(result.message["content"], str | list)


@given(st.binary(max_size=100))
def test_whatever_bytes_a_server_sends_are_json_or_a_typed_error(body: bytes) -> None:
    try:
        load_json(body)
    except ModelBadResponse:
        return
    json.loads(body)


@given(anything, st.booleans())
def test_any_json_is_read_as_the_standard_library_reads_it(data: Any, ascii_only: bool) -> None:
    text = json.dumps(data, ensure_ascii=ascii_only)
    body = text.encode("utf-8", "surrogatepass")
    try:
        expected = json.loads(body.decode("utf-8"))
    except ValueError:
        with pytest.raises(ModelBadResponse):
            load_json(body)
    else:
        assert repr(load_json(body)) == repr(expected)  # 1 is not 1.0 or True, nan is nan


@given(
    st.lists(
        st.sampled_from([b"data: ", b"data:", b"\n", b"\n\n", b"\r\n", b"a", b"data: b\n\n", b": ping"]), max_size=12
    ),
    st.integers(min_value=1, max_value=8),
)
def test_events_are_the_same_wherever_the_network_cuts_them(parts: list[bytes], size: int) -> None:
    stream, whole, cut = b"".join(parts), EventSplitter(), EventSplitter()
    events = [event for at in range(0, len(stream), size) for event in cut.feed(stream[at : at + size])]
    assert whole.feed(stream) + whole.end() == events + cut.end()


@given(st.lists(st.dictionaries(st.text(max_size=5), st.text(), max_size=3), max_size=3), st.text())
def test_any_message_can_be_sent(messages: list[dict[str, str]], model: str) -> None:
    head = request_head(model, Sampling(extra={"messages": "not these", "top_k": 1}), (), True)
    body = json.loads(request_body(head, messages))
    assert body["messages"] == messages
    assert body["model"] == model
    assert body["stream"] is True
    assert body["top_k"] == 1


def test_deep_nesting_is_a_bad_response() -> None:
    with pytest.raises(ModelBadResponse):
        load_json(b'{"a":' * 100_000)


def test_parsing_a_big_body_gives_way_to_the_event_loop() -> None:
    body = encode({"ids": list(range(600_000)), "tokens": [{"logprob": -0.5}] * 60_000}).encode("ascii")
    parts: list[float] = []
    while len(parts) < 20 and min(parts, default=1.0) >= 0.3:  # others take the processor away, too
        parts.append(_longest_wait(lambda: load_big_json(body)))
    assert min(parts) < 0.3, parts  # the C parser alone holds the interpreter lock: 0.8


def _longest_wait(work: Callable[[], object]) -> float:
    """The longest time that this thread could not run, as a part of the time that `work` took in another."""
    thread = threading.Thread(target=work)
    began = last = time.perf_counter()
    longest = 0.0
    thread.start()
    while thread.is_alive():
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    return longest / (time.perf_counter() - began)
