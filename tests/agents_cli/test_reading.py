"""What programs print is read, and how a rollout ended is decided, without a program: pure functions.

One test: .venv/bin/pytest tests/agents_cli/test_reading.py -k ending
"""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_engine.agents import make_agent
from rollout_engine.agents.cli import claude_code, codex, gemini, mini_swe_agent, opencode
from rollout_engine.agents.cli.ending import Facts, ending
from rollout_engine.agents.cli.program import Hear, Heard
from rollout_engine.errors import AgentError, AgentUnavailable, InputError, ModelServerError, ModelTimeout
from rollout_engine.types import StopReason

WORKED = Facts("exit", 0, 2, 2, None, None, Heard(finished=True))
HEARS: list[Hear] = [claude_code.hear, codex.hear, gemini.hear, mini_swe_agent.hear, opencode.hear]


def lines(*events: object) -> bytes:
    return b"".join(json.dumps(event).encode() + b"\n" for event in events)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, StopReason.FINISHED),
        ({"exit_code": 1}, StopReason.AGENT_EXIT),
        ({"exit_code": -9}, StopReason.AGENT_EXIT),
        ({"exit_code": -9, "out_of_memory": True}, StopReason.OUT_OF_MEMORY),
        ({"out_of_memory": True}, StopReason.FINISHED),  # of a command that it could do without
        ({"heard": Heard(failed="api error")}, StopReason.AGENT_EXIT),
        ({"heard": Heard(finished=False)}, StopReason.AGENT_EXIT),
        ({"heard": Heard()}, StopReason.FINISHED),
        ({"ended": "time", "exit_code": None}, StopReason.AGENT_TIMEOUT),
        ({"ended": "idle", "exit_code": None}, StopReason.AGENT_TIMEOUT),
        ({"ended": "limit", "exit_code": None, "limit": StopReason.MAX_TURNS}, StopReason.MAX_TURNS),
        ({"exit_code": 1, "limit": StopReason.MAX_TOKENS}, StopReason.MAX_TOKENS),
        # An agent may shorten its history after an overflow and come to a good end.
        ({"limit": StopReason.CONTEXT_OVERFLOW}, StopReason.FINISHED),
        ({"exit_code": 1, "limit": StopReason.CONTEXT_OVERFLOW}, StopReason.CONTEXT_OVERFLOW),
    ],
)
def test_an_ending_is_judged_from_exit_events_and_limits(change: dict[str, object], reason: StopReason) -> None:
    assert ending(WORKED._replace(**change)) is reason  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"failure": ModelServerError("500")}, ModelServerError),
        ({"begun": 0, "answered": 0}, AgentError),
        ({"begun": 0, "answered": 0, "exit_code": 127}, AgentUnavailable),
        ({"begun": 1, "answered": 0}, AgentError),
        ({"begun": 1, "answered": 0, "ended": "time", "exit_code": None}, ModelTimeout),
    ],
)
def test_an_ending_without_a_model_is_a_failure(change: dict[str, object], error: type[Exception]) -> None:
    with pytest.raises(error) as found:
        ending(WORKED._replace(log="its log", **change))  # type: ignore[arg-type]
    assert type(found.value) is error


def test_claude_codes_success_after_an_error_of_the_api_is_none() -> None:
    result = {"type": "result", "subtype": "success", "is_error": True, "result": "API Error: 400", "usage": {}}
    heard = claude_code.hear(lines({"type": "system"}, result), None)
    assert (heard.final, heard.failed, heard.finished) == (None, "API Error: 400", True)
    usage = {"input_tokens": 5, "cache_read_input_tokens": 2, "cache_creation_input_tokens": 1, "output_tokens": 3}
    good = claude_code.hear(lines({"type": "result", "is_error": False, "result": "Done.", "usage": usage}), None)
    assert good == Heard("Done.", None, True, 8, 3)


def test_codex_may_recover_from_an_error_but_not_from_a_failed_turn() -> None:
    message = {"type": "item.completed", "item": {"type": "agent_message", "text": "Done."}}
    end = {"type": "turn.completed", "usage": {"input_tokens": 9, "output_tokens": 4}}
    assert codex.hear(lines({"type": "error", "message": "again"}, message, end), None) == Heard(
        "Done.", None, True, 9, 4
    )
    failed = codex.hear(lines({"type": "turn.failed", "error": {"message": "400"}}), None)
    assert (failed.failed, failed.finished) == ("400", False)


def test_opencode_is_done_when_its_last_step_calls_no_tool() -> None:
    def step(reason: str) -> dict[str, object]:
        tokens = {"input": 5, "output": 2, "reasoning": 1, "cache": {"read": 4, "write": 0}}
        return {"type": "step_finish", "part": {"reason": reason, "tokens": tokens}}

    text = {"type": "text", "part": {"text": "Done."}}
    assert opencode.hear(lines(step("tool-calls"), text, step("stop")), None) == Heard("Done.", None, True, 18, 6)
    assert opencode.hear(lines(step("tool-calls")), None).finished is False
    error = {"type": "error", "error": {"name": "APIError", "data": {"message": "the rollout has ended"}}}
    assert opencode.hear(lines(error), None).failed == "the rollout has ended"


def test_gemini_and_mini_swe_agent_say_it_at_their_end() -> None:
    stats = {"models": {"m": {"tokens": {"prompt": 7, "candidates": 2, "thoughts": 1}}}}
    printed = b"Loaded.\n" + json.dumps({"response": "Done.", "stats": stats}).encode()
    assert gemini.hear(printed, None) == Heard("Done.", None, True, 7, 3)
    submitted = json.dumps({"info": {"exit_status": "Submitted", "submission": "x"}}).encode()
    assert mini_swe_agent.hear(b"", submitted) == Heard("x", None, True)
    assert mini_swe_agent.hear(b"", b'{"info": {"exit_status": "LimitsExceeded"}}').failed == "LimitsExceeded"
    assert mini_swe_agent.hear(b"", None).finished is False


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "item", "part", "usage", "tokens", "error", "info", "stats"]), inner)
    ),
    max_leaves=8,
)
_KINDS = st.sampled_from(["result", "text", "error", "step_finish", "item.completed", "turn.completed", "turn.failed"])


@given(events=st.lists(st.tuples(_KINDS, _JSON), max_size=4), junk=st.binary(max_size=30))
def test_nothing_that_a_program_prints_makes_reading_fail(events: list[tuple[str, object]], junk: bytes) -> None:
    made = [
        {**(each if isinstance(each, dict) else {"part": each, "item": each}), "type": kind} for kind, each in events
    ]
    printed = junk + b"\n" + lines(*made)
    for hear in HEARS:
        heard = hear(printed, printed)
        assert heard.final is None or isinstance(heard.final, str)
        assert heard.failed is None or isinstance(heard.failed, str)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("command", {}, "agent_options.argv"),
        ("command", {"argv": ["x"], "prompt": "argument"}, "no argument holds {prompt}"),
        ("command", {"argv": ["x"], "package": ["x@1"]}, "has no package"),
        ("command", {"argv": ["x"], "directory": "my-agent"}, "agent_options.directory: must be an absolute path"),
        ("codex", {"idle_s": 0}, "agent_options.idle_s"),
        ("codex", {"modle": "x"}, "modle"),
        ("opencode", {"roles": [{"role": "boss"}]}, "agent_options.roles"),
    ],
)
def test_a_wrong_option_is_named(name: str, options: dict[str, object], said: str) -> None:
    with pytest.raises(InputError) as found:
        make_agent(name, options)
    assert said in str(found.value)
