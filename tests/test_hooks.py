"""Hooks of agents and verifiers: each runs, whatever the others do; each ends; what goes wrong is in the row.

make one T=tests/test_hooks.py
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from rollout_engine import hooks
from rollout_engine.agents.base import AgentLimits, AgentModel, OnTurn
from rollout_engine.agents.single_turn import SingleTurn
from rollout_engine.errors import SandboxDied, SetupError, SetupTimeout
from rollout_engine.exchange import HostLimits, Lease, Request
from rollout_engine.hooks import hooked, noting, tear_down
from rollout_engine.host import Host
from rollout_engine.permits import UNLIMITED
from rollout_engine.sandboxes.base import Sandbox
from rollout_engine.specs import Task, body_digest, task_body
from rollout_engine.types import Isolation, RolloutRecord, Score, StopReason, Trajectory
from tests.helpers import make_config, make_plan, scripted
from tests.rig import bench, spec_of, task_of

CALLS: list[str] = []


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    CALLS.clear()
    for name in ("SETUP_S", "CLEANUP_S", "TEARDOWN_S"):
        monkeypatch.setattr(hooks, name, 0.5)


class Hooks:
    """Notes each call; then does what it was told to do there."""

    def __init__(self, name: str, **does: str) -> None:
        self._name, self._does = name, does

    async def setup(self, task: Task, sandbox: Sandbox | None) -> None:
        await self._do("setup")

    async def cleanup(self, task: Task, sandbox: Sandbox | None) -> None:
        await self._do("cleanup")

    async def teardown(self) -> None:
        await self._do("teardown")

    async def _do(self, hook: str) -> None:
        CALLS.append(f"{self._name}.{hook}")
        does = self._does.get(hook)
        if does == "raises":
            raise ValueError("oh no")
        if does == "exits":
            raise SystemExit(3)
        if does == "dies":
            raise SandboxDied("gone")
        if does == "hangs":
            await asyncio.sleep(60)
        if does == "clings":
            while True:
                try:
                    await asyncio.sleep(1.0)
                    return
                except asyncio.CancelledError:
                    continue
        if does is not None:
            CALLS.append(does)


class Agent(Hooks):
    needs_sandbox = False

    def __init__(self, **does: str) -> None:
        super().__init__("agent", **does)

    async def run(
        self, task: Task, model: AgentModel, sandbox: Sandbox | None, limits: AgentLimits, on_turn: OnTurn
    ) -> StopReason:
        CALLS.append("agent.run")
        return await SingleTurn().run(task, model, sandbox, limits, on_turn)


class Verifier(Hooks):
    isolation = Isolation.PURE

    def __init__(self, spec: Mapping[str, Any], *, timeout_s: float) -> None:
        super().__init__(spec.get("name", "verifier"), **spec.get("does", {}))

    async def verify(self, task: Task, trajectory: Trajectory, sandbox: Sandbox | None) -> Score:
        CALLS.append("verifier.verify")
        return Score(1.0)


def verifier(name: str = "verifier", **does: str) -> dict[str, Any]:
    return {"type": f"{__name__}:Verifier", "does": does, "name": name}


async def row_of(agent: dict[str, str], verifies: dict[str, Any]) -> RolloutRecord:
    config = make_config(agent=f"{__name__}:Agent", agent_options=agent)
    async with bench(config) as made:
        return await made.run(task_of(verifier=verifies))


class TestOneRollout:
    async def test_hooks_stand_around_the_work_of_each(self) -> None:
        row = await row_of({}, verifier())
        assert (row.score, row.hook_errors) == (1.0, [])
        agent, verdict = (["X.setup", f"X.{work}", "X.cleanup"] for work in ("run", "verify"))
        around = [each.replace("X", "agent") for each in agent] + [each.replace("X", "verifier") for each in verdict]
        assert around == CALLS

    @pytest.mark.parametrize("does", ["raises", "exits", "hangs", "clings"])
    async def test_a_cleanup_that_fails_costs_no_score_and_is_on_record(self, does: str) -> None:
        row = await row_of({"cleanup": does}, verifier(cleanup=does))
        assert (row.status, row.score, row.failure_type) == ("completed", 1.0, None)
        assert [error.split(":")[0] for error in row.hook_errors] == ["Agent.cleanup", "Verifier.cleanup"]

    @pytest.mark.parametrize(
        ("does", "kind"), [("raises", "SetupError"), ("exits", "SetupError"), ("hangs", "SetupTimeout")]
    )
    async def test_an_agent_whose_setup_fails_does_not_run_and_cleans_up(self, does: str, kind: str) -> None:
        row = await row_of({"setup": does}, verifier())
        assert (row.status, row.failure_boundary, row.failure_type) == ("failed", "setup", kind)
        assert [error.split(":")[0] for error in row.hook_errors] == ["Agent.setup"]
        assert CALLS == ["agent.setup", "agent.cleanup"]

    async def test_a_verifier_whose_setup_fails_is_no_finding(self) -> None:
        row = await row_of({}, verifier(setup="raises"))
        assert (row.status, row.score, row.failure_type) == ("completed", None, "VerifierError")
        assert CALLS[-2:] == ["verifier.setup", "verifier.cleanup"]

    async def test_infrastructure_stays_infrastructure(self) -> None:
        row = await row_of({"setup": "dies"}, verifier())
        assert (row.status, row.failure_boundary, row.failure_type) == ("failed", "sandbox", "SandboxDied")

    async def test_parts_of_a_verifier_have_their_own(self) -> None:
        parts = {name: {"verifier": verifier(name, cleanup="raises", setup=f"{name} ready")} for name in "ab"}
        row = await row_of({}, {"type": "composite", "components": parts})
        assert row.score == 1.0
        assert len(row.hook_errors) == 2
        assert {"a.setup", "b.setup", "a ready", "b ready", "a.cleanup", "b.cleanup"} <= set(CALLS)

    async def test_one_setup_that_fails_does_not_skip_the_others(self) -> None:
        parts = {"a": {"verifier": verifier("a", setup="raises")}, "b": {"verifier": verifier("b", setup="b ready")}}
        row = await row_of({}, {"type": "composite", "components": parts})
        assert row.score is None
        assert row.hook_errors == ["Verifier.setup: ValueError: oh no"]
        assert "b ready" in CALLS
        assert {"a.cleanup", "b.cleanup"} <= set(CALLS)


async def test_a_cancelled_rollout_is_cleaned_up_after() -> None:
    owner, notes = Agent(cleanup="cleaned"), list[str]()

    async def work() -> None:
        CALLS.append("working")
        await asyncio.sleep(60)

    task = asyncio.create_task(
        hooked(work, owner, None, None, note=noting(notes), failed=SetupError, late=SetupTimeout)
    )
    async with asyncio.timeout(60):
        while "working" not in CALLS:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert CALLS[-1] == "cleaned"
    assert notes == []


async def test_a_row_keeps_only_so_many_errors() -> None:
    notes: list[str] = []
    await tear_down([Agent(teardown="raises")] * 40, noting(notes))
    assert len(notes) == hooks.MAX_ERRORS
    assert CALLS.count("agent.teardown") == 40


async def test_teardown_comes_once_with_the_host(caplog: pytest.LogCaptureFixture) -> None:
    task = task_of(verifier=verifier(teardown="raises"))
    config = make_config(scripted(), agent=f"{__name__}:Agent", agent_options={"teardown": "hangs"})
    host = Host(make_plan(config))
    await host.open()
    leases: dict[str, Lease] = {"m": UNLIMITED}
    body = task_body(task)
    request = Request(1, 1, 2, (spec_of(task), spec_of(task, key=1, attempt=1)), {body_digest(body): body},
                      limits=HostLimits(leases, linger_s=0.5))  # fmt: skip
    rows = 0
    async with asyncio.timeout(60):
        number = 1
        while rows < 2:
            reply = await host.exchange(request)
            rows = sum(batch.num_rows for _, batch in reply.batches)
            number += 1
            request = Request(1, number, 2, limits=HostLimits(leases))
        await host.close()
    assert CALLS.count("agent.teardown") == CALLS.count("verifier.teardown") == 1
    assert CALLS[-2:] == ["agent.teardown", "verifier.teardown"]
    assert "Verifier.teardown: ValueError: oh no" in caplog.text
    assert "Agent.teardown: did not end" in caplog.text
