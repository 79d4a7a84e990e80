"""A host whose process is killed in the middle of a run costs time, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from pathlib import Path

import pytest

from rollout_engine import RolloutEngine
from tests.helpers import make_config, make_tasks, scripted
from tests.ray.rays import SharedRay, alive, kill_process, until
from tests.ray.rows import essence, undisturbed

pytestmark = pytest.mark.ray

TASKS = 40


async def test_a_run_goes_on_by_itself_when_its_host_is_killed(shared_ray: SharedRay, tmp_path: Path) -> None:
    strong = scripted("strong", skill=0.8, latency_ms=500, latency_dist="exponential")
    weak = scripted("weak", skill=0.3, latency_ms=500, latency_dist="exponential")
    config = make_config(strong, weak, ray="auto", k=4, seed=7, host={"slots": 40})
    async with asyncio.timeout(180), RolloutEngine(config=config, run_dir=tmp_path / "run") as engine:
        host = shared_ray.host_pid()
        run = asyncio.create_task(engine.finish(make_tasks(TASKS)))
        await until(lambda: engine.progress.done >= 60, "60 rollouts are done")
        kill_process(host)
        await run
        another = shared_ray.host_pid()
        await engine.close()
        rollouts = engine.tables().rollouts
    assert another != host
    assert essence(rollouts) == await undisturbed(config, TASKS)
    assert any("is lost" in note for note in engine.progress.notes)
    again = [each for each in rollouts.to_pylist() if each["retries"]]
    assert again, "nothing was running on the host that was killed"
    assert {each["host_id"] for each in again} == {"host-1-e1"}
    assert {each["node_id"] for each in rollouts.to_pylist()} == {again[0]["node_id"]}
    await until(lambda: not shared_ray.host_pids() and not alive([another]), "no host is left")


async def test_a_host_that_falls_silent_is_given_up_and_ended(
    shared_ray: SharedRay, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGSTOP: the process is there, and says nothing. Its work is done elsewhere, also if it wakes up again."""
    monkeypatch.setattr("rollout_engine.serving.EXCHANGE_GRACE_S", 1.0)
    config = make_config(
        scripted(skill=0.5, latency_ms=100), ray="auto", k=4, seed=5, host={"slots": 10, "lease_s": 4.0}
    )
    async with asyncio.timeout(180), RolloutEngine(config=config, run_dir=tmp_path / "run") as engine:
        host = shared_ray.host_pid()
        run = asyncio.create_task(engine.finish(make_tasks(TASKS)))
        await until(lambda: engine.progress.done >= 20, "20 rollouts are done")
        os.kill(host, signal.SIGSTOP)
        await run
        with contextlib.suppress(ProcessLookupError):  # whoever gave it up may have ended it by now
            os.kill(host, signal.SIGCONT)
        await engine.close()
        assert essence(engine.tables().rollouts) == await undisturbed(config, TASKS)
    await until(lambda: not shared_ray.host_pids() and not alive([host]), "no host is left")
