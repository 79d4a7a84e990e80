"""What rollouts wait for is known of a host in another process too, even of one whose event loop is blocked."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rollout_engine import RolloutEngine
from rollout_engine.errors import StuckError
from rollout_engine.waiting import Waiting
from tests.helpers import make_config, scripted
from tests.ray.endings import BLOCK_S
from tests.ray.rays import SharedRay
from tests.ray.test_exits import task

pytestmark = pytest.mark.ray


async def rows_of(engine: RolloutEngine) -> list[Waiting]:
    return [row for rows in (await engine.waiting()).values() for row in rows]


async def test_a_host_with_a_blocked_loop_says_by_what(shared_ray: SharedRay, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    config = make_config(ray="auto", agent="tests.ray.endings:Agent", trusted_code=["tests.ray.endings:*"])
    async with asyncio.timeout(2 * BLOCK_S), RolloutEngine(config=config) as engine:
        running = asyncio.create_task(engine.finish([task("blocks", agent=f"block:{gate}")]))
        async with asyncio.timeout(BLOCK_S):
            while not (rows := await rows_of(engine)) or rows[0].phase != "agent":
                await asyncio.sleep(0.05)
        assert (rows[0].rollout, rows[0].waits_for) == ("m/0/blocks", "its agent")
        assert not running.done()
        gate.touch()
        await running


async def test_a_model_that_hangs_on_a_host_elsewhere_ends_the_run_and_is_named(shared_ray: SharedRay) -> None:
    limits = dict.fromkeys(("queue_s", "start_s", "agent_s", "verify_s"), 1e6)
    config = make_config(
        {**scripted(latency_ms=8e7), "call_timeout_s": 1e6}, ray="auto", no_progress_s=8.0, limits=limits
    )
    async with asyncio.timeout(120), RolloutEngine(config=config) as engine:
        with pytest.raises(StuckError, match=r"m/0/waits: agent, waits for call 1 to model m"):
            await engine.finish([task("waits").model_copy(update={"verifier": {"type": "match", "expected": "yes"}})])
