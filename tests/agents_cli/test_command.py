"""Any program is an agent: run in a sandbox without a network, its calls are the rollout's turns, however it behaves.

One test: .venv/bin/pytest tests/agents_cli/test_command.py -k well
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from typing import Any

import pytest

from rollout_engine.rolloutline import rollout_line
from rollout_engine.specs import Task
from rollout_engine.types import RolloutRecord
from tests.agents_cli.conftest import Serve, behind, needs_namespaces, shell_task
from tests.agents_cli.tiny import left, tiny
from tests.helpers import make_config
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
    record = await ran(serve, "silent", options={"idle_s": 4.0})
    assert (record.status, record.failure_type) == ("failed", "AgentError")
    assert "idle for too long and made no model call: thinking" in str(record.failure_message)


async def test_an_agent_that_hangs_after_a_call_is_ended_by_its_time_and_all_its_children_with_it(serve: Serve) -> None:
    record = await ran(serve, "stubborn", limits={"agent_s": 2.0})
    assert (record.status, record.stop_reason, record.score) == ("truncated", "agent_timeout", 0.0)
    assert record.agent_exit_code is None
    assert evidence(record)["ended"] == "time"


async def test_an_agent_that_asks_for_another_model_is_told_so_and_so_is_its_row(serve: Serve) -> None:
    record = await ran(serve, "stranger")
    assert (record.status, record.failure_type) == ("failed", "AgentError")
    assert "gpt-somebody-else" in str(record.failure_message)


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


async def test_a_turn_limit_is_told_to_the_agent_and_the_prefix_is_verified(serve: Serve) -> None:
    record = await ran(serve, limits={"max_turns": 1})
    assert (record.status, record.stop_reason, len(record.turns)) == ("truncated", "max_turns", 1)
    assert record.score is not None
    assert "limit: max_turns" in str(evidence(record)["said"])


@pytest.mark.parametrize("fault", ["p_429", "p_500", "p_cut", "p_garbage"])
async def test_a_model_that_fails_fails_the_rollout_and_ends_the_agent(serve: Serve, fault: str) -> None:
    record = await ran(serve, model={fault: 1.0, "retry_after_s": 0.0})
    assert (record.status, record.failure_boundary, record.score) == ("failed", "model", None), record
    assert record.retryable


async def test_a_model_that_hangs_is_a_fault_of_the_model(serve: Serve) -> None:
    record = await ran(serve, model={"p_hang": 1.0}, limits={"agent_s": 2.0})
    assert (record.status, record.failure_boundary, record.failure_type) == ("failed", "model", "ModelTimeout")


async def test_rollouts_that_are_cancelled_at_any_moment_leave_nothing(serve: Serve) -> None:
    """No descriptor of this process (listener, connection, pipe), and no process of the agent."""
    task = shell_task()
    url = await serve([task], m={"skill": 1.0, "turns": 2, "latency_ms": 100})
    config = make_config(behind(url), agent="command", agent_options=tiny(), sandbox="namespace")
    moments = random.Random(7)
    async with bench(config, starting=4) as rig:
        await rig.run(task)
        before = len(os.listdir("/proc/self/fd"))

        async def cancelled(attempt: int) -> bool:
            running = asyncio.create_task(rig.rollout(task, attempt=attempt).run())
            await asyncio.wait({running}, timeout=moments.uniform(0.0, 2.5))
            running.cancel()
            await asyncio.wait({running})
            return running.cancelled()

        ends: list[bool] = []
        for batch in range(5):
            ends += await asyncio.gather(*(cancelled(8 * batch + number) for number in range(8)))
        assert any(ends), "none was cut"
        async with asyncio.timeout(20):
            while len(os.listdir("/proc/self/fd")) > before + 2 or await asyncio.to_thread(left):
                await asyncio.sleep(0.05)
