"""A driver in an actor of its own: it needs nobody who waits for it, and can be found, drained and cancelled.

One test: .venv/bin/pytest tests/ray/test_driver_actor.py -k detached
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from actors.driver import DriverHandle, find_driver, start_driver
from rollout_engine.config import RunConfig
from rollout_engine.errors import InputError, RunError
from rollout_engine.store.rundir import open_run, read_rollouts
from tests.helpers import make_config, make_tasks, scripted
from tests.ray.rays import ROOT, SharedRay, blocking_until, kill_process
from tests.ray.rows import essence_of, undisturbed

pytestmark = pytest.mark.ray

TASKS = 30


LONG = 1000
"""Tasks of a run that is not over before somebody on a busy machine has asked for it: 20 s of work."""


def config_of(slots: int = 20, **fields: Any) -> RunConfig:
    """120 rollouts, 20 at once, 100 ms each."""
    return make_config(scripted(skill=0.5, latency_ms=100), ray="auto", k=4, seed=11, host={"slots": slots}, **fields)


def ended(handle: DriverHandle) -> tuple[str, int]:
    end = handle.wait(150)
    assert end is not None, "it goes on"
    assert not end.message
    return end.status, end.rows


def test_a_driver_in_an_actor_commits_what_one_in_this_process_would(shared_ray: SharedRay, tmp_path: Path) -> None:
    config, run_dir = config_of(), tmp_path / "run"
    handle = start_driver(config, list(make_tasks(TASKS)), run_dir, name="one")
    try:
        assert handle.progress()["hosts"] == 1
        assert ended(handle) == ("finished", 4 * TASKS)
    finally:
        handle.kill()
    assert essence_of(run_dir) == asyncio.run(undisturbed(config, TASKS))
    assert open_run(run_dir).info.status == "finished"
    blocking_until(lambda: not shared_ray.host_pids(), "no host is left")


START = f"""
import sys
from actors.driver import start_driver
from rollout_engine.config import RunConfig
from tests.helpers import make_tasks

config, run_dir, name = RunConfig.model_validate_json(sys.argv[1]), sys.argv[2], sys.argv[3]
start_driver(config, list(make_tasks({LONG})), run_dir, name=name, detached=True)
print("started", flush=True)
"""


def test_a_detached_driver_outlives_whoever_started_it_and_can_be_drained_and_resumed(
    shared_ray: SharedRay, tmp_path: Path
) -> None:
    config, run_dir = config_of(), tmp_path / "run"
    started = subprocess.run(
        [sys.executable, "-c", START, config.model_dump_json(exclude_defaults=True), str(run_dir), "far"],
        cwd=ROOT,
        env=shared_ray.environment(RAY_ADDRESS=shared_ray.address, RAY_AUTH_MODE="token"),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert started.stdout.strip().endswith("started"), started.stdout + started.stderr
    handle = find_driver("far")
    try:
        before = handle.progress()["done"]
        blocking_until(lambda: handle.progress()["done"] > before + 40, "it goes on by itself")
        with pytest.raises(InputError, match="a driver named 'far' is there already"):
            start_driver(config, list(make_tasks(1)), tmp_path / "other", name="far")
        handle.drain(60)
        status, rows = ended(handle)
    finally:
        handle.kill()
    assert status == "interrupted"
    assert rows == read_rollouts(run_dir).num_rows < 4 * LONG
    blocking_until(lambda: not shared_ray.host_pids(), "no host is left")
    again = start_driver(config_of(slots=250), list(make_tasks(LONG)), run_dir, name="far-again", resume=True)
    try:
        assert ended(again) == ("finished", 4 * LONG)
    finally:
        again.kill()


def test_a_cancelled_driver_ends_at_once_and_says_so(shared_ray: SharedRay, tmp_path: Path) -> None:
    handle = start_driver(config_of(), list(make_tasks(LONG)), tmp_path / "run", name="short")
    try:
        handle.cancel()
        assert ended(handle)[0] == "interrupted"
    finally:
        handle.kill()
    assert open_run(tmp_path / "run").info.status == "interrupted"


def test_a_driver_that_is_gone_is_named_and_so_is_one_that_cannot_start(shared_ray: SharedRay, tmp_path: Path) -> None:
    import ray._private.state as state

    with pytest.raises(InputError, match="no driver is named 'nobody'"):
        find_driver("nobody")
    with pytest.raises(InputError, match="nobody"):
        start_driver(config_of(agent="tests.ray.nobody:nothing"), [], tmp_path / "run", name="wrong")
    handle = start_driver(config_of(), list(make_tasks(LONG)), tmp_path / "run", name="gone")
    (driver,) = (each for each in state.actors().values() if each["Name"] == "gone")
    kill_process(driver["Pid"])
    with pytest.raises(RunError, match="the driver 'gone' is gone; see its run directory, and resume it there"):
        handle.wait(90)
    blocking_until(lambda: not shared_ray.host_pids(), "its hosts go with it")
    assert json.loads((tmp_path / "run/run.json").read_text())["status"] == "running"
