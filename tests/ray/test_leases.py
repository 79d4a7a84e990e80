"""Limits of a model's server hold over all hosts together, whatever happens to one of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pytest

from rollout_engine import ModelSpec, RolloutEngine
from rollout_engine.config import RunConfig
from rollout_engine.models.server_process import ServerProcess
from tests.helpers import make_config, make_tasks
from tests.ray.rays import SharedRay, kill_process, until
from tests.rig import served

pytestmark = pytest.mark.ray

LATENCY_MS = 100
TASKS = 60


@pytest.fixture
def server() -> Iterator[ServerProcess]:
    """A model behind real HTTP, in a process of its own, that counts its calls."""
    spec = ModelSpec(name="m", kind="scripted", options={"latency_ms": LATENCY_MS})
    solutions = {task.task_id: task.answer or "" for task in make_tasks(TASKS)}
    with ServerProcess({"m": spec}, solutions=solutions) as process:
        yield process


def config_of(server: ServerProcess, hosts: int, **limits: Any) -> RunConfig:
    model = served(server.url, seed_header=True, **limits)
    return make_config(model, ray="auto", hosts_per_node=hosts, k=4, host={"slots": 4})


async def test_three_hosts_together_keep_to_a_servers_limit_and_use_it(
    shared_ray: SharedRay, server: ServerProcess, tmp_path: Path
) -> None:
    limit = 8
    async with asyncio.timeout(180), RolloutEngine(config=config_of(server, 3, max_concurrency=limit)) as engine:
        await engine.finish(make_tasks(TASKS))
        await engine.close()
        tables = engine.tables()
    rollouts = tables.rollouts
    stats = server.stats()
    assert set(rollouts["score"].to_pylist()) == {1.0}
    assert len(set(rollouts["host_id"].to_pylist())) == 3
    assert stats["max_in_flight"] == limit
    assert stats["calls"] == rollouts.num_rows == 4 * TASKS
    # 240 calls of 100 ms, 8 at once: 3 s, and more on a busy machine, which makes the calls longer, too. The permits
    # may idle for as long as the hosts take to start and to end.
    took = pc.max(rollouts["ended_at"]).as_py() - pc.min(rollouts["started_at"]).as_py()
    assert pc.sum(tables.turns["model_s"]).as_py() > 0.5 * limit * took.total_seconds()


async def means(server: ServerProcess, found: list[float]) -> None:
    """How many calls the server had at once in one second after the other: the mean, and not more than it was."""
    before, asked = server.stats()["in_flight_s"], time.monotonic()
    while True:
        await asyncio.sleep(1)
        next_asked = time.monotonic()
        now = server.stats()["in_flight_s"]
        found.append((now - before) / (time.monotonic() - asked))
        before, asked = now, next_asked


async def test_the_limit_holds_while_hosts_are_killed(
    shared_ray: SharedRay, server: ServerProcess, tmp_path: Path
) -> None:
    limit = 8
    async with asyncio.timeout(180), RolloutEngine(config=config_of(server, 2, max_concurrency=limit)) as engine:
        hosts, at_once = shared_ray.host_pids(), list[float]()
        watching = asyncio.create_task(means(server, at_once))
        run = asyncio.create_task(engine.finish(make_tasks(TASKS)))
        for number, host in enumerate(hosts, 1):
            await until(lambda so_far=60 * number: engine.progress.done >= so_far, "the run goes on")
            kill_process(host)
        await run
        watching.cancel()
        await engine.close()
        rollouts = engine.tables().rollouts
    assert set(rollouts["score"].to_pylist()) == {1.0}
    assert rollouts.num_rows == 4 * TASKS
    # For a server that is held up, a killed host's calls may end a moment after those have begun that take their place.
    assert max(at_once) < limit + 0.5, at_once
    assert limit <= server.stats()["max_in_flight"] <= limit + limit / len(hosts)


async def test_a_rate_holds_over_all_hosts_and_is_used(
    shared_ray: SharedRay, server: ServerProcess, tmp_path: Path
) -> None:
    """600 a minute are 10 a second; a second's worth may come at once."""
    async with asyncio.timeout(180), RolloutEngine(config=config_of(server, 2, requests_per_minute=600)) as engine:
        began = time.monotonic()
        run = asyncio.create_task(engine.finish(make_tasks(TASKS)))
        await until(lambda: server.stats()["calls"] >= 1, "calls are made")
        readings = []
        while len(readings) < 10 and (not readings or readings[-1][1] < 3 * TASKS):  # of 4: it must not be over
            await asyncio.sleep(0.4)
            asked, calls = time.monotonic() - began, server.stats()["calls"]
            readings.append((asked, calls, time.monotonic() - began))
        run.cancel()
        await asyncio.gather(run, return_exceptions=True)
    for _, calls, answered in readings:
        assert calls <= 10 * answered + 11, readings
    (_, few, first), (last, many, _) = readings[0], readings[-1]
    assert last > first, readings
    assert many - few >= 0.6 * 10 * (last - first), readings
