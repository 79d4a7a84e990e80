"""Code of the user's that ends its process, or tries to, costs its own rollout and no other."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from rollout_engine import RolloutEngine, Task
from tests.helpers import make_config, scripted
from tests.ray.rays import SharedRay

pytestmark = pytest.mark.ray

OTHERS = 40


def task(task_id: str, **metadata: str) -> Task:
    verifier = {"type": "tests.ray.endings:Verifier"}
    return Task(task_id=task_id, prompt="Say yes.", solution="yes", verifier=verifier, metadata=metadata)


def tasks(**deadly: dict[str, str]) -> Iterator[Task]:
    """The deadly ones in the middle of others."""
    yield from (task(f"before-{number}") for number in range(OTHERS // 2))
    yield from (task(task_id, **metadata) for task_id, metadata in deadly.items())
    yield from (task(f"after-{number}") for number in range(OTHERS // 2))


async def rows_of(**deadly: dict[str, str]) -> tuple[RolloutEngine, dict[str, dict[str, Any]]]:
    config = make_config(
        scripted(latency_ms=50),
        ray="auto",
        agent="tests.ray.endings:Agent",
        trusted_code=["tests.ray.endings:*"],
        host={"slots": 16},
        retry={"backoff_s": 0},
    )
    async with asyncio.timeout(240), RolloutEngine(config=config) as engine:
        rows = [record async for record in engine.rollouts(tasks(**deadly))]
    by_task = {record.task_id: record for record in rows}
    assert len(rows) == len(by_task) == OTHERS + len(deadly)
    others = [record for record in rows if record.task_id not in deadly]
    assert {(record.status, record.score) for record in others} == {("completed", 1.0)}
    return engine, {task_id: {name: getattr(by_task[task_id], name) for name in NAMES} for task_id in deadly}


NAMES = ("status", "score", "failure_boundary", "failure_type", "retries")


async def test_an_exit_that_is_raised_is_a_failure_of_its_own_rollout(shared_ray: SharedRay) -> None:
    engine, rows = await rows_of(
        **{f"agent-{kind}": {"agent": kind} for kind in ("SystemExit", "KeyboardInterrupt")},
        **{f"verifier-{kind}": {"verifier": kind} for kind in ("SystemExit", "KeyboardInterrupt")},
    )
    for kind in ("SystemExit", "KeyboardInterrupt"):
        agent, verifier = rows[f"agent-{kind}"], rows[f"verifier-{kind}"]
        assert (agent["status"], agent["score"]) == ("failed", None)
        assert (agent["failure_boundary"], agent["failure_type"]) == ("agent", kind)
        assert (verifier["status"], verifier["score"]) == ("completed", None)
        assert (verifier["failure_boundary"], verifier["failure_type"]) == ("verifier", kind)
    assert not [event for event in engine.progress.events if event.kind == "host_lost"]


@pytest.mark.parametrize("where", ["agent", "verifier"])
async def test_a_rollout_that_ends_its_host_is_given_up_and_the_others_complete(
    shared_ray: SharedRay, where: str
) -> None:
    engine, rows = await rows_of(deadly={where: "os._exit"})
    deadly = rows["deadly"]
    assert (deadly["status"], deadly["score"]) == ("failed", None)
    assert (deadly["failure_boundary"], deadly["failure_type"]) == ("host", "HostLost")
    assert deadly["retries"] <= engine.config.retry.max_host_losses
