"""Turns as deltas: what was said is stored once, and what an agent rewrote is told.

.venv/bin/pytest tests/proxy/test_threads.py
"""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_engine.formats import FORMATS
from rollout_engine.formats.base import Asked
from rollout_engine.models.wire import encode
from rollout_engine.proxy.normal import compact, normal, same
from rollout_engine.proxy.threads import Threads
from rollout_engine.types import Completion, Message, Turn, conversation

from ..formats.talk import answers, completions

quick = settings(max_examples=40)
USER: Message = {"role": "user", "content": "hi"}


def said(text: str, **more: Any) -> Completion:
    return Completion({"role": "assistant", "content": text, **more}, "stop")


def roles(turn: Turn) -> list[str]:
    return [message["role"] for message in turn.messages]


def test_a_conversation_that_goes_on_is_stored_once() -> None:
    threads = Threads("agent")
    first = threads.turn(0, [USER], said("one"), 0)
    second = threads.turn(1, [USER, {"role": "assistant", "content": "one"}, USER], said("two"), 0)
    assert roles(first) == roles(second) == ["user", "assistant"]
    assert (second.parent, second.kept) == (None, None)


def test_what_an_agent_sends_back_in_another_spelling_is_the_same() -> None:
    call = {"id": "c1", "index": 0, "type": "function", "function": {"name": "f", "arguments": '{"a": 1,  "b": []}'}}
    answer = said("Let me see. \n", tool_calls=[call], reasoning_content="hm", refusal=None)
    back: Message = {
        "role": "assistant",
        "content": [{"type": "text", "text": "Let me see."}],
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":1,"b":[]}'}}],
    }
    threads = Threads("agent")
    first = threads.turn(0, [USER], answer, 0)
    second = threads.turn(1, [USER, back, {"role": "tool", "tool_call_id": "c1", "content": "x"}], said("done"), 0)
    assert roles(second) == ["tool", "assistant"]
    assert first.messages[-1]["content"] == "Let me see."
    assert first.messages[-1]["tool_calls"] == back["tool_calls"]


def test_a_rewritten_history_is_a_branch_that_says_what_it_kept() -> None:
    threads = Threads("agent")
    one: Message = {"role": "assistant", "content": "one"}
    turns = [
        threads.turn(0, [USER], said("one"), 0),
        threads.turn(1, [USER, one, USER], said("two"), 0),
        threads.turn(2, [USER, {"role": "user", "content": "summary of all that"}], said("three"), 0),
        threads.turn(3, [USER, one, USER, {"role": "assistant", "content": "two"}, USER], said("four"), 0),
    ]
    assert (turns[2].parent, turns[2].kept) == (None, 1)
    assert (turns[3].parent, turns[3].kept) == (1, None)
    assert [message["content"] for message in conversation(turns)] == ["hi", "one", "hi", "two", "hi", "four"]
    assert [message["content"] for message in conversation(turns[:3])] == ["hi", "summary of all that", "three"]


def test_a_call_that_is_made_again_keeps_its_prompt_and_not_the_first_answer() -> None:
    threads = Threads("agent")
    threads.turn(0, [USER], said("one"), 0)
    again = threads.turn(1, [USER], said("another"), 0)
    assert (again.kept, [message["content"] for message in again.messages]) == (1, ["another"])


texts = st.sampled_from(["a", "b", "c"])
prompts = st.lists(
    st.builds(lambda role, text: {"role": role, "content": text}, st.sampled_from(["user", "assistant"]), texts),
    min_size=1,
    max_size=6,
)


@quick
@given(st.lists(st.tuples(prompts, texts), min_size=1, max_size=12))
def test_every_prompt_can_be_put_together_from_the_turns(calls: list[tuple[list[Message], str]]) -> None:
    threads = Threads("agent")
    turns: list[Turn] = []
    for index, (prompt, answer) in enumerate(calls):
        turns.append(threads.turn(index, prompt, said(answer), 0))
        assert conversation(turns) == [*prompt, {"role": "assistant", "content": answer}]


@quick
@given(st.data())
def test_an_answer_that_comes_back_through_its_format_is_the_turn_that_was_stored(data: st.DataObject) -> None:
    """So that the tokens of the next prompt begin with those of this one and its answer."""
    name = data.draw(st.sampled_from(sorted(FORMATS)))
    completion = data.draw(completions(name))
    shown = json.loads(encode(FORMATS[name].response(completion, Asked("m", []), 1, 0)))
    sent_back = FORMATS[name].completion(shown).message
    assert same(normal(completion.message), normal(sent_back))
    threads = Threads("agent")
    threads.turn(0, [USER], completion, 0)
    assert threads.turn(1, [USER, sent_back, USER], said("x"), 0).kept is None


@quick
@given(answers("anthropic"))
def test_the_normal_form_is_its_own(message: Message) -> None:
    assert normal(normal(message)) == normal(message)


@quick
@given(st.text(max_size=20))
def test_arguments_that_are_no_object_stay_as_they_are(text: str) -> None:
    if compact(text) != text:
        assert isinstance(json.loads(text) if text.strip() else {}, dict)
