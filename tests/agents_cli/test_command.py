"""Any program is an agent: run in a sandbox without a network, its calls are the rollout's turns, however it behaves.

One test: .venv/bin/pytest tests/agents_cli/test_command.py -k well
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rollout_engine.rolloutline import rollout_line
from rollout_engine.specs import Task
from rollout_engine.types import RolloutRecord
from tests.agents_cli.conftest import Serve, behind, needs_namespaces, shell_task
from tests.agents_cli.tiny import left, tiny
from tests.helpers import make_config
from tests.ray.rays import until
from tests.rig import bench


@pytest.fixture(autouse=True)
def _namespaces() -> None:
    needs_namespaces()


async def ran(
    serve: Serve, mode: str = "well", *, options: dict[str, Any] | None = None, limits: dict[str, Any] | None = None,
    task: Task | None = None, model: dict[str, Any] | None = None,
) -> RolloutRecord:  # fmt: skip
    """One rollout of the tiny agent in this mode."""
    task = task if task is not None else shell_task()
    url = await serve([task], m={"skill": 1.0, "turns": 2, **(model or {})})
    agent = tiny(mode, **(options or {}))
    given = {"agent": "command", "agent_options": agent, "sandbox": "namespace", "limits": limits or {}}
    async with bench(make_config(behind(url), **given)) as rig:
        return await rig.run(task)


def spoken(mode: str) -> Task:
    """The mode `stream` offers no tool."""
    return shell_task(solution="Done.") if mode == "stream" else shell_task()


def evidence(record: RolloutRecord) -> dict[str, Any]:
    assert record.evidence is not None
    found: dict[str, Any] = json.loads(record.evidence)
    return found


async def test_an_agent_that_does_well_has_turns_tokens_evidence_and_a_score(serve: Serve) -> None:
    record = await ran(serve)
    assert (record.status, record.stop_reason, record.score) == ("completed", "finished", 1.0), record
    assert record.final_answer == "Done."
    assert record.agent_exit_code == 0
    assert [len(turn.messages) for turn in record.turns] == [2, 2, 2]
    assert record.turns[1].messages[0]["role"] == "tool"
    found = evidence(record)
    assert found["usage"]["agree"] is True
    assert found["usage"]["proxy"] == [record.prompt_tokens, record.completion_tokens]
    assert rollout_line(record)["exit_code"] == 0
    assert found["calls"]["agent"] == {"begun": 3, "answered": 3, "tool_calls": {"shell": 2}}


async def test_an_agent_that_makes_no_call_is_a_failure_with_its_log(serve: Serve) -> None:
    record = await ran(serve, "quits")
    assert (record.status, record.score, record.failure_boundary) == ("failed", None, "agent")
    assert record.failure_type == "AgentError"
    assert "ended with 0 and made no model call: no idea what to do" in str(record.failure_message)


async def test_an_agent_that_crashes_after_its_first_turn_is_truncated_and_verified(serve: Serve) -> None:
    record = await ran(serve, "crash")
    assert (record.status, record.stop_reason, record.score) == ("truncated", "agent_exit", 0.0)
    assert record.agent_exit_code not in (None, 0)
    assert len(record.turns) == 1


async def test_an_agent_that_hangs_without_a_call_meets_the_idle_limit(serve: Serve) -> None:
    record = await ran(serve, "silent", options={"idle_s": 8.0})
    assert (record.status, record.failure_type) == ("failed", "AgentError")
    assert "idle for too long and made no model call: thinking" in str(record.failure_message)


async def test_an_agent_that_hangs_after_a_call_is_ended_by_its_time_and_all_its_children_with_it(serve: Serve) -> None:
    record = await ran(serve, "stubborn", limits={"agent_s": 8.0})
    assert (record.status, record.stop_reason, record.score) == ("truncated", "agent_timeout", 0.0)
    assert record.agent_exit_code is None
    assert evidence(record)["ended"] == "time"


@pytest.mark.parametrize(
    ("mode", "said"),
    [
        ("stranger", "refused with 404: there is no model 'gpt-somebody-else' in this run"),
        ("foreigner", "there is no POST /v1/complete here"),
        ("mumbler", "refused with 400: body: this is no JSON"),
        ("giant", "refused with 413: the body is larger than 33554432 bytes"),
    ],
)
async def test_an_agent_whose_requests_are_no_model_calls_is_told_so_and_so_is_its_row(
    serve: Serve, mode: str, said: str
) -> None:
    record = await ran(serve, mode)
    assert (record.status, record.failure_boundary, record.failure_type) == ("failed", "agent", "AgentError")
    assert f"ended with 4 and made no model call; {said}" in str(record.failure_message)
    assert evidence(record)["notes"][0].startswith(said)


async def test_a_token_that_is_not_the_rollouts_is_worth_nothing(serve: Serve) -> None:
    record = await ran(serve, "intruder")
    assert record.score == 1.0
    assert "refused 404" in evidence(record)["stderr"]
    assert evidence(record)["calls"]["agent"]["begun"] == 3


async def test_a_flood_of_output_is_bounded_and_its_end_is_read(serve: Serve) -> None:
    record = await ran(serve, "flood")
    assert (record.status, record.score) == ("completed", 1.0)
    assert record.evidence is not None
    assert len(record.evidence) < 60_000
    assert record.final_answer == "Done."


async def test_an_agent_that_forks_until_nothing_is_left_is_ended_by_its_time(serve: Serve) -> None:
    task = shell_task(environment={"processes": 64})
    record = await ran(serve, "bomb", task=task, limits={"agent_s": 8.0})
    assert (record.status, record.stop_reason, record.score) == ("truncated", "agent_timeout", 0.0), record
    await until(lambda: not left(), "nothing of the agent is left")


async def test_an_agent_that_uses_up_its_memory_is_truncated(serve: Serve) -> None:
    record = await ran(serve, "glutton", task=shell_task(environment={"memory_mb": 256}))
    assert (record.status, record.score) == ("truncated", 0.0), record
    # Without a control group the program meets an rlimit, and ends with an error of its own.
    held = "memory:cgroup" in str(record.limits_enforced)
    assert record.stop_reason == ("out_of_memory" if held else "agent_exit")


async def test_a_program_that_is_not_there_is_named(serve: Serve) -> None:
    record = await ran(serve, options={"argv": ["no-such-agent"]})
    assert (record.status, record.failure_type, record.retryable) == ("failed", "AgentUnavailable", False)
    assert "no-such-agent" in str(record.failure_message)


async def test_a_program_for_another_machine_is_named(serve: Serve) -> None:
    task = shell_task(setup=["printf '\\177ELF\\2\\1\\1\\0\\0\\0\\0\\0\\0\\0\\0\\0\\2\\0\\363\\0' > a; chmod 755 a"])
    record = await ran(serve, options={"argv": ["./a"]}, task=task)
    assert (record.status, record.failure_type, record.retryable) == ("failed", "AgentUnavailable", False)


async def test_an_installation_without_the_program_is_named(serve: Serve, tmp_path: Path) -> None:
    url = await serve([shell_task()], m={})
    config = make_config(behind(url), agent="codex", agent_options={"directory": str(tmp_path)}, sandbox="namespace")
    async with bench(config) as rig:
        record = await rig.run(shell_task())
    assert (record.status, record.failure_type, record.retryable) == ("failed", "AgentUnavailable", False)
    assert f"{tmp_path} holds no node_modules" in str(record.failure_message)


async def test_a_turn_limit_is_told_to_the_agent_and_the_prefix_is_verified(serve: Serve) -> None:
    record = await ran(serve, limits={"max_turns": 1})
    assert (record.status, record.stop_reason, len(record.turns)) == ("truncated", "max_turns", 1)
    assert record.score is not None
    assert "limit: max_turns" in str(evidence(record)["said"])


@pytest.mark.parametrize("fault", ["p_429", "p_500", "p_cut", "p_garbage"])
@pytest.mark.parametrize("mode", ["well", "stream"])
async def test_a_model_that_fails_fails_the_rollout_and_ends_the_agent(serve: Serve, mode: str, fault: str) -> None:
    record = await ran(serve, mode, task=spoken(mode), model={fault: 1.0, "retry_after_s": 0.0})
    assert (record.status, record.failure_boundary, record.score) == ("failed", "model", None), record
    assert record.retryable


@pytest.mark.parametrize("mode", ["well", "stream"])
async def test_an_empty_completion_is_an_answer(serve: Serve, mode: str) -> None:
    record = await ran(serve, mode, task=spoken(mode), model={"p_empty": 1.0})
    assert (record.status, record.stop_reason, len(record.turns)) == ("completed", "finished", 1), record
    assert (record.final_answer or "") == ""
    assert record.score == (1.0 if mode == "stream" else 0.0), "what it left in its workspace counts"


async def test_a_model_that_hangs_is_a_fault_of_the_model(serve: Serve) -> None:
    record = await ran(serve, model={"p_hang": 1.0}, limits={"agent_s": 8.0})
    assert (record.status, record.failure_boundary, record.failure_type) == ("failed", "model", "ModelTimeout")
