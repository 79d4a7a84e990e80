"""A killed driver leaves a run that can be gone on with, and nothing else."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import rollout_engine
from rollout_engine import RolloutEngine
from rollout_engine.config import RunConfig
from rollout_engine.store.rundir import open_run
from tests.helpers import make_config, make_tasks, scripted
from tests.ray.rays import SharedRay, alive, blocking_until, command, descendants, said, start_driver, temporary_folders
from tests.ray.rows import essence_of, undisturbed

pytestmark = pytest.mark.ray

TASKS = 30
Start = Callable[..., "subprocess.Popen[str]"]


def config_of(latency_ms: float = 100, **fields: Any) -> RunConfig:
    """240 rollouts, 20 at once, 100 ms each: 1.2 s of work."""
    models = [scripted(name, skill=skill, latency_ms=latency_ms, latency_dist="exponential") for name, skill in MODELS]
    return make_config(*models, k=4, seed=11, host={"slots": 20}, **{"ray": "auto", **fields})


MODELS = (("strong", 0.8), ("weak", 0.3))
FOR_EVER = 600_000
"""Milliseconds: a run whose models take so long is not over while a test looks at it."""
LATE = re.compile(r"^ray::(DashboardAgent|RuntimeEnvAgent)|/(dashboard|runtime_env/agent)/(agent|main)\.py")
"""Ray's own agents, by the name that they give themselves and by that before, want to report the death of their raylet
to a GCS that is dead too, and try for a minute."""


@pytest.fixture
def start(shared_ray: SharedRay) -> Iterator[Start]:
    """Starts a driver that joins the shared Ray by its address. No driver is left at the end."""
    drivers = []
    environment = shared_ray.environment(RAY_ADDRESS=shared_ray.address)

    def one(config: RunConfig, **orders: Any) -> subprocess.Popen[str]:
        driver = start_driver(
            environment,
            config=config.model_dump(mode="json", exclude_defaults=True),
            **{"tasks": TASKS, **orders},
        )
        drivers.append(driver)
        return driver

    yield one
    for driver in drivers:
        driver.kill()
        driver.communicate()


async def resumed(run_dir: Path, config: RunConfig) -> None:
    async with RolloutEngine(config=config, run_dir=run_dir, resume=True) as engine:
        await engine.finish(make_tasks(TASKS))


@pytest.mark.parametrize("moment", ["before", "after"])
async def test_a_driver_that_dies_around_a_commit_is_resumed_to_the_same_rows(
    shared_ray: SharedRay, start: Start, tmp_path: Path, moment: str
) -> None:
    """`after`: the rows are on disk, and neither acknowledged nor seen by anybody."""
    # While rows wait for the disk nothing is granted: the third commit is not the last, however slow the disk is.
    config, run_dir = config_of(store={"max_uncommitted_bytes": 1}), tmp_path / "run"
    driver = start(config, run_dir=str(run_dir), die=[moment, 3])
    assert driver.wait(120) == -signal.SIGKILL
    before = essence_of(run_dir)
    assert 0 < len(before) < 240
    await resumed(run_dir, config)
    assert essence_of(run_dir) == await undisturbed(config, TASKS)
    assert set(before) <= set(essence_of(run_dir))


async def test_a_driver_killed_again_and_again_at_any_moment_comes_to_the_same_rows(
    shared_ray: SharedRay, start: Start, tmp_path: Path
) -> None:
    config, run_dir = config_of(), tmp_path / "run"
    seed = random.randrange(10**6)
    moments = random.Random(seed)
    for _ in range(3):
        driver = start(config, run_dir=str(run_dir), resume=True)
        assert said(driver) == "open"
        await asyncio.sleep(moments.uniform(0.0, 0.6))
        driver.kill()
        driver.wait(60)
    await resumed(run_dir, config)
    assert essence_of(run_dir) == await undisturbed(config, TASKS), f"seed {seed}"
    assert open_run(run_dir).info.status == "finished"


def test_no_actor_no_host_process_and_no_folder_outlives_a_killed_driver_for_long(
    shared_ray: SharedRay, start: Start
) -> None:
    """Its temporary folder is removed by the next run that has one."""
    folders = temporary_folders()
    driver = start(config_of(FOR_EVER, hosts_per_node=2))
    assert said(driver) == "open"
    hosts = blocking_until(lambda: len(found := shared_ray.host_pids()) == 2 and found, "there are two hosts")
    assert alive(hosts) == hosts
    driver.kill()
    driver.wait(60)
    blocking_until(lambda: not shared_ray.host_pids() and not alive(hosts), "hosts are gone")
    assert len(temporary_folders() - folders) == 1
    rollout_engine.run(make_tasks(1), config=config_of(ray="off"))
    assert temporary_folders() <= folders


def test_a_second_driver_on_a_live_run_is_refused_before_anything_starts(
    shared_ray: SharedRay, start: Start, tmp_path: Path
) -> None:
    run_dir, gates = tmp_path / "run", tmp_path / "gates"
    gates.mkdir()
    config = config_of(agent="tests.nodes.agents:Waits", agent_options={"folder": str(gates)})
    driver = start(config, run_dir=str(run_dir))
    assert said(driver) == "open"
    second = start(config, run_dir=str(run_dir), resume=True)
    assert said(second).startswith("InputError: ")
    assert second.wait(60) == 2
    (gates / "gate").touch()
    assert said(driver) == "rows 240"
    assert driver.wait(60) == 0


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_local_ray_ends_with_its_driver(start: Start, tmp_path: Path, how: signal.Signals) -> None:
    """No process of the driver's or of its Ray's is left, and no temporary folder; SIGINT is noted in the run."""
    folders, run_dir = temporary_folders(), tmp_path / "run"
    driver = start(config_of(FOR_EVER, ray="local"), run_dir=str(run_dir))
    assert said(driver) == "open"
    below = [pid for pid in descendants(driver.pid) if how == signal.SIGINT or not LATE.search(command(pid))]
    assert sum("RolloutHost" in command(pid) for pid in below) == 1
    os.kill(driver.pid, how)
    assert driver.wait(120) == (130 if how == signal.SIGINT else -how)
    blocking_until(lambda: not alive(below), "they are gone", 50)
    assert temporary_folders() <= folders
    if how == signal.SIGINT:
        assert open_run(run_dir).info.status == "interrupted"


def test_an_interrupted_driver_leaves_no_host_on_a_ray_that_it_joined(
    shared_ray: SharedRay, start: Start, tmp_path: Path
) -> None:
    folders = temporary_folders()
    driver = start(config_of(FOR_EVER))
    assert said(driver) == "open"
    hosts = shared_ray.host_pids()
    assert hosts
    os.kill(driver.pid, signal.SIGINT)
    assert driver.wait(120) == 130
    blocking_until(lambda: not shared_ray.host_pids() and not alive(hosts), "hosts are gone")
    assert temporary_folders() <= folders


def test_a_run_that_was_refused_leaves_nothing(shared_ray: SharedRay, start: Start, tmp_path: Path) -> None:
    folders, run_dir = temporary_folders(), tmp_path / "run"
    driver = start(config_of(agent="tests.ray.nobody:nothing"), run_dir=str(run_dir))
    assert said(driver).startswith("InputError: ")
    assert driver.wait(60) == 2
    assert not shared_ray.host_pids()
    assert not run_dir.exists()
    assert temporary_folders() <= folders
