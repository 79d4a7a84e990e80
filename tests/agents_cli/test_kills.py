"""An agent program that is killed, whatever it is doing: one row that says so, its work judged, nothing of it left.

One test: .venv/bin/pytest tests/agents_cli/test_kills.py -k "during and namespace"
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from rollout_engine.engine import RolloutEngine
from rollout_engine.store import read_rollouts
from rollout_engine.types import RolloutRecord
from tests.agents_cli.conftest import BACKENDS, ENVIRONMENTS, Serve, behind, needs_backend, needs_namespaces, shell_task
from tests.agents_cli.tiny import agents, left, processes, tiny
from tests.helpers import make_config
from tests.ray.rays import until
from tests.rig import answer, bench, chat_server

NAP = f"600.{os.getpid()}"
"""What a program of the agent's sleeps, and is known by."""
ROLLOUT_S = 120.0
CALL = {"id": "c", "type": "function", "function": {"name": "shell", "arguments": json.dumps({"command": "true"})}}


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    needs_backend(request.param)
    return str(request.param)


async def killed(
    url: str, backend: str, ready: Callable[[], Any], mode: str = "well", script: str | None = None
) -> RolloutRecord:
    """One rollout whose agent is killed as soon as `ready`."""
    task = shell_task(environment=ENVIRONMENTS[backend], **({"solution": {"script": script}} if script else {}))
    config = make_config(behind(url), agent="command", agent_options=tiny(mode, NAP), sandbox=backend)
    async with bench(config) as rig:
        rollout = rig.rollout(task)
        async with asyncio.timeout(ROLLOUT_S):
            running = asyncio.create_task(rollout.run())
            (agent,) = await until(lambda: ready() and agents(), "the agent is where it is to be killed", ROLLOUT_S)
            os.kill(agent, signal.SIGKILL)
            await running
        # Its children end with its sandbox.
        await until(lambda: not left() and not processes(NAP), "nothing of the agent is left", ROLLOUT_S)
    return rollout.record


def check(record: RolloutRecord, status: str, turns: int, score: float | None) -> dict[str, Any]:
    """Its evidence."""
    assert (record.status, len(record.turns), record.score) == (status, turns, score), record
    assert record.agent_exit_code == -signal.SIGKILL
    if status == "truncated":
        assert (record.stop_reason, record.failure_type) == ("agent_exit", None)
    else:
        assert (record.failure_boundary, record.failure_type, record.retryable) == ("agent", "AgentError", True)
    found: dict[str, Any] = json.loads(record.evidence or "")
    assert found["ended"] == "exit"
    return found


async def test_before_its_first_call(serve: Serve, backend: str) -> None:
    url = await serve([shell_task()], m={})
    record = await killed(url, backend, lambda: processes(f"sleep\0{NAP}"), "silent")
    check(record, "failed", 0, None)
    assert record.failure_message == "the agent program ended with -9 and made no model call: thinking"


@dataclass
class Slow:
    """A model that answers `quick` calls, and then thinks until its caller goes away."""

    quick: int = 0
    calls: int = 0
    thinking: int = 0
    left: asyncio.Event = field(default_factory=asyncio.Event)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        self.calls += 1
        if self.calls <= self.quick:
            choice = {"index": 0, "message": {"role": "assistant", "tool_calls": [CALL]}, "finish_reason": "tool_calls"}
            return answer(choices=[choice])
        self.thinking += 1
        try:
            await asyncio.Event().wait()
        finally:
            self.left.set()
        raise AssertionError


@pytest.mark.parametrize("quick", [0, 1])
async def test_during_a_call_which_ends_with_it(backend: str, quick: int) -> None:
    model = Slow(quick)
    async with chat_server(model.chat) as url:
        record = await killed(url, backend, lambda: model.thinking)
        await asyncio.wait_for(model.left.wait(), 60)
    assert model.calls == quick + 1
    found = check(record, *(("truncated", 1, 0.0) if quick else ("failed", 0, None)))
    assert found["calls"]["agent"]["begun"] == quick + 1
    if not quick:
        assert record.failure_message == "the agent program ended with -9 before a model call was answered"


async def test_between_two_calls(serve: Serve, backend: str) -> None:
    """While a command runs that the model asked for; what was done before it is judged."""
    script = f"printf forty-two > out.txt; sleep {NAP}"
    url = await serve([shell_task(solution={"script": script})], m={"turns": 1})
    record = await killed(url, backend, lambda: processes(f"sleep\0{NAP}"), script=script)
    check(record, "truncated", 1, 1.0)


async def test_after_its_final_answer(serve: Serve, backend: str) -> None:
    """It said that it came to its end, and its exit code says something else: judged, and not `completed`."""
    url = await serve([shell_task()], m={"turns": 2})
    record = await killed(url, backend, lambda: processes(f"sleep\0{NAP}"), "lingers")
    found = check(record, "truncated", 3, 1.0)
    assert record.final_answer == "Done."
    assert found["usage"]["agree"] is True


async def test_one_that_had_not_begun_is_started_again_under_the_same_attempt(serve: Serve, tmp_path: Path) -> None:
    needs_namespaces()
    task = shell_task()
    url = await serve([task], m={"turns": 2, "latency_ms": 1000})
    async with RolloutEngine(
        [behind(url)], agent="command", agent_options=tiny(), sandbox="namespace", ray="off", run_dir=tmp_path / "run"
    ) as engine:
        running = asyncio.create_task(engine.finish([task]))
        (agent,) = await until(agents, "the agent runs", ROLLOUT_S)
        os.kill(agent, signal.SIGKILL)
        await running
    (row,) = read_rollouts(tmp_path / "run").to_pylist()
    assert (row["attempt"], row["retries"], row["status"], row["score"]) == (0, 1, "completed", 1.0)
    await until(lambda: not left(), "nothing of the agents is left", ROLLOUT_S)
