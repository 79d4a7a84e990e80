"""What goes into a format comes out of it: requests, answers, and answers in pieces, however the network cuts them.

.venv/bin/pytest tests/formats/test_round_trips.py
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_engine.errors import ModelError
from rollout_engine.formats import FORMATS
from rollout_engine.formats.base import Asked, Overrides
from rollout_engine.formats.check import Malformed
from rollout_engine.formats.parts import Said
from rollout_engine.models.sse import DONE, EventSplitter
from rollout_engine.models.wire import encode
from rollout_engine.types import Completion, Delta, Sampling, ToolPiece, ToolSpec

from .talk import completions, requests, values

BARE = Asked("m", [])
quick = settings(max_examples=30)
each_format = pytest.mark.parametrize("name", FORMATS)


def over_the_wire(body: Any) -> Any:
    return json.loads(encode(body))


def pieces_of(completion: Completion, cuts: list[int]) -> list[Delta]:
    """An answer as a server might stream it: every text and every argument in small pieces."""
    found: list[Delta] = []
    for delta in Said().rest(completion):
        size = cuts[len(found) % len(cuts)]
        if delta.content or delta.reasoning:
            text = delta.content or delta.reasoning
            parts = [text[at : at + size] for at in range(0, len(text), size)]
            found += [Delta(part) if delta.content else Delta(reasoning=part) for part in parts]
        elif delta.tools:
            whole = delta.tools[0]
            found.append(Delta(tools=(replace(whole, arguments=""),)))
            parts = [whole.arguments[at : at + size] for at in range(0, len(whole.arguments), size)]
            found += [Delta(tools=(ToolPiece(whole.index, part),)) for part in parts]
        else:
            found.append(delta)
    return found


def folded(name: str, stream: bytes, size: int) -> tuple[Completion, list[Delta]]:
    """A stream put together again, and its pieces."""
    splitter, assembler = EventSplitter(), FORMATS[name].assembler()
    events: list[bytes] = []
    for at in range(0, len(stream), size):
        events += splitter.feed(stream[at : at + size])
    events += splitter.end()
    deltas = [assembler.add(json.loads(event)) for event in events if event != DONE]
    assert assembler.finished
    return assembler.completion(), deltas


@each_format
@quick
@given(data=st.data())
def test_a_request_survives(name: str, data: st.DataObject) -> None:
    asked = data.draw(requests(name))
    format = FORMATS[name]
    body = format.request("m", asked.messages, asked.sampling, asked.tools, asked.stream)
    again = format.parse(over_the_wire(body), "m", asked.stream)
    assert again.messages == asked.messages
    assert again.tools == asked.tools
    assert again.sampling == asked.sampling
    assert (again.model, again.stream) == ("m", asked.stream)


@each_format
@quick
@given(data=st.data())
def test_a_whole_answer_survives(name: str, data: st.DataObject) -> None:
    completion = data.draw(completions(name))
    body = over_the_wire(FORMATS[name].response(completion, BARE, 1, 0))
    assert FORMATS[name].completion(body) == completion


@each_format
@quick
@given(data=st.data())
def test_a_stream_folds_to_the_answer_that_is_not_streamed(name: str, data: st.DataObject) -> None:
    completion = data.draw(completions(name))
    writer = FORMATS[name].writer(BARE, 1, 0)
    stream = writer.begin()
    for delta in pieces_of(completion, data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=4))):
        stream += writer.write(delta)
        if data.draw(st.booleans()):
            stream += writer.ping
    stream += writer.end(completion)
    whole, deltas = folded(name, stream, data.draw(st.integers(1, 60)))
    assert whole == completion
    assert "".join(delta.content for delta in deltas) == (completion.message["content"] or "")


@each_format
@quick
@given(data=st.data())
def test_an_answer_that_comes_at_once_is_streamed_whole(name: str, data: st.DataObject) -> None:
    completion = data.draw(completions(name))
    writer = FORMATS[name].writer(BARE, 1, 0)
    assert folded(name, writer.begin() + writer.end(completion), 1000)[0] == completion


@pytest.mark.parametrize("target", FORMATS)
@each_format
@quick
@given(data=st.data())
def test_text_calls_and_usage_pass_between_any_two_formats(name: str, target: str, data: st.DataObject) -> None:
    """An agent of one format, a server of another: the answer, and the same answer sent back."""
    completion = data.draw(completions(name))
    server, agent = FORMATS[name], FORMATS[target]
    understood = server.completion(over_the_wire(server.response(completion, BARE, 1, 0)))
    shown = agent.completion(over_the_wire(agent.response(understood, BARE, 1, 0)))
    for field in ("content", "tool_calls"):
        if not (field == "tool_calls" and "extra_content" in str(completion.message.get(field))):
            assert shown.message.get(field) == completion.message.get(field)
    assert shown.usage.prompt_tokens == completion.usage.prompt_tokens
    assert shown.usage.completion_tokens == completion.usage.completion_tokens
    assert shown.usage.cached_tokens == completion.usage.cached_tokens
    assert shown.finish_reason in (completion.finish_reason, "tool_calls")


@each_format
@quick
@given(body=st.dictionaries(st.sampled_from(["messages", "input", "contents", "model", "tools"]), values))
def test_whatever_an_agent_sends_is_understood_or_told_where(name: str, body: dict[str, Any]) -> None:
    try:
        FORMATS[name].parse({"model": "m", **body}, "m", False)
    except Malformed as error:
        told = error
    else:
        return
    assert told.where


@each_format
@quick
@given(data=st.data())
def test_a_damaged_request_is_understood_or_told_where(name: str, data: st.DataObject) -> None:
    asked = data.draw(requests(name))
    body = over_the_wire(FORMATS[name].request("m", asked.messages, asked.sampling, asked.tools, asked.stream))
    spots = list(_spots(body))
    holder, key = data.draw(st.sampled_from(spots))
    holder[key] = data.draw(values)
    try:
        FORMATS[name].parse(body, "m", False)
    except Malformed as error:
        told = error
    else:
        return
    assert told.where


def _spots(data: Any) -> Any:
    for key, value in data.items() if isinstance(data, dict) else enumerate(data):
        yield data, key
        if isinstance(value, dict | list):
            yield from _spots(value)


@each_format
@quick
@given(data=values)
def test_whatever_a_server_sends_is_an_answer_or_a_typed_error(name: str, data: Any) -> None:
    assembler = FORMATS[name].assembler()
    for read in (FORMATS[name].completion, assembler.add, lambda _: assembler.completion()):
        try:
            read(data)
        except ModelError:
            continue


@each_format
@quick
@given(data=st.data())
def test_a_damaged_answer_is_an_answer_or_a_typed_error(name: str, data: st.DataObject) -> None:
    body = over_the_wire(FORMATS[name].response(data.draw(completions(name)), BARE, 1, 0))
    holder, key = data.draw(st.sampled_from(list(_spots(body))))
    holder[key] = data.draw(values)
    try:
        encode(FORMATS[name].completion(body).message)
    except ModelError:
        return


@each_format
@quick
@given(data=st.data())
def test_what_the_run_fixes_is_what_the_server_reads(name: str, data: st.DataObject) -> None:
    asked = data.draw(requests(name))
    format = FORMATS[name]
    body = over_the_wire(format.request("m", asked.messages, asked.sampling, asked.tools, False))
    before = json.dumps(body)
    tool = ToolSpec("only", "", {"type": "object"})
    fixed = Overrides("served", Sampling(temperature=0.25, max_tokens=7), "Be brief.", (tool,))
    again = format.parse(format.overridden(body, fixed), "served", False)
    assert json.dumps(body) == before, "the agent's own body stays as it is"
    assert (again.model, again.sampling.temperature, again.sampling.max_tokens) == ("served", 0.25, 7)
    assert again.tools == (tool,)
    assert again.messages[0] == {"role": "system", "content": "Be brief."}
    assert again.sampling.extra == asked.sampling.extra
    assert format.overridden(body, Overrides()) is body


@each_format
def test_errors_have_the_formats_own_shape(name: str) -> None:
    error = FORMATS[name].error(400, "no", "limit_reached")["error"]
    assert error["message"] == "no"
    assert b"no" in FORMATS[name].writer(BARE, 1, 0).error(400, "no", "limit_reached")
