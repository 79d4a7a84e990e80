"""A node that is not as the others is named, with what to do about it; the others do its part.

One test: .venv/bin/pytest tests/ray/test_nodes.py -k clock
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rollout_engine import RolloutEngine
from rollout_engine.config import RunConfig
from rollout_engine.errors import InputError
from rollout_engine.events import Event
from rollout_engine.version import VERSION
from tests.helpers import make_config, make_tasks, scripted
from tests.ray.joining import another_node
from tests.ray.rays import ROOT, SharedRay, blocking_until, until
from tests.ray.rows import essence, undisturbed

pytestmark = pytest.mark.ray

TASKS = 40


async def run(config: RunConfig, run_dir: Path, tasks: int = TASKS) -> tuple[list[Event], list[dict[str, Any]]]:
    """(what happened, the rows), which are those of a run where all is well."""
    async with asyncio.timeout(240), RolloutEngine(config=config, run_dir=run_dir) as engine:
        await engine.finish(make_tasks(tasks, **FIELDS))
        await engine.close()
        rollouts = engine.tables().rollouts
    assert rollouts.num_rows == tasks * config.k
    return list(engine.progress.events), rollouts.to_pylist()


FIELDS: dict[str, Any] = {}


def only(events: list[Event], kind: str) -> Event:
    found = [event for event in events if event.kind == kind]
    assert found, [event.kind for event in events]
    return found[0]


DRIVER = """
import asyncio
from rollout_engine import RolloutEngine
from rollout_engine.errors import InputError

async def main():
    async with RolloutEngine([{"name": "m", "kind": "scripted"}], sandbox="none") as engine:
        print("hosts:", engine.progress.hosts)
        print(*engine.progress.notes, sep="\\n")

try:
    asyncio.run(main())
except InputError as error:
    print("InputError:", error)
"""


def run_from(folder: Path, shared_ray: SharedRay) -> str:
    """What a driver says that starts elsewhere: from our own folder, Ray would send that along."""
    (folder / "driver.py").write_text(DRIVER)
    environment = shared_ray.environment(RAY_ADDRESS=shared_ray.address)
    done = subprocess.run(
        [sys.executable, "driver.py"], cwd=folder, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_node_with_another_version_is_named(shared_ray: SharedRay, tmp_path: Path) -> None:
    for package in ("rollout_engine", "actors"):
        shutil.copytree(ROOT / package, tmp_path / "node" / package, ignore=shutil.ignore_patterns("__pycache__"))
    version = tmp_path / "node/rollout_engine/version.py"
    version.write_text(version.read_text().replace(VERSION, "0.0.1"))
    with another_node(shared_ray, tmp_path / "node") as node_id:
        output = run_from(tmp_path, shared_ray)
    assert output.startswith(f"hosts: 1\nno host on node {node_id[:12]}")
    assert f"node {node_id[:12]} has rollout-engine 0.0.1, the driver has {VERSION}" in output
    assert f"install rollout-engine=={VERSION} on every node" in output
    blocking_until(lambda: not shared_ray.host_pids(), "no host is left")


def test_a_node_with_somebody_else_s_actors_is_named(shared_ray: SharedRay, tmp_path: Path) -> None:
    """The name is a common one; without ours, the node is as one without our package."""
    (tmp_path / "node/actors").mkdir(parents=True)
    for name in ("__init__", "host"):
        (tmp_path / f"node/actors/{name}.py").touch()
    with another_node(shared_ray, tmp_path / "node") as node_id:
        output = run_from(tmp_path, shared_ray)
    assert output.startswith(f"hosts: 1\nno host on node {node_id[:12]}")
    assert "actors.host" in output
    assert f"install rollout-engine=={VERSION} on every node" in output
    blocking_until(lambda: not shared_ray.host_pids(), "no host is left")


def node_folder(tmp_path: Path, customize: str = "") -> Path:
    """What a node finds first: a startup file of its own, and then this package."""
    folder = tmp_path / "node"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(customize)
    return folder


async def test_a_node_with_too_few_descriptors_is_named_and_the_others_run_all(
    shared_ray: SharedRay, tmp_path: Path
) -> None:
    folder, config = node_folder(tmp_path), make_config(scripted(), ray="auto", host={"slots": 300})
    with another_node(
        shared_ray, folder, {"PYTHONPATH": f"{folder}:{ROOT}"}, through=["prlimit", "--nofile=1024:1024", "--"]
    ) as node_id:
        events, rows = await run(config, tmp_path / "run")
    failed = only(events, "host_failed")
    assert failed.node == node_id
    assert "300 rollouts at once need 1112 open files; the hard limit is 1024" in failed.message
    assert "ulimit -Hn 1112" in failed.message
    assert node_id not in {row["node_id"] for row in rows}


async def test_where_no_node_has_enough_descriptors_nothing_starts(shared_ray: SharedRay, tmp_path: Path) -> None:
    config = make_config(scripted(), ray="auto", host={"slots": 10**7})
    with pytest.raises(InputError, match=r"10000000 rollouts at once need \d+ open files.*\(on node \w+"):
        async with RolloutEngine(config=config, run_dir=tmp_path / "run"):
            pass
    await until(lambda: not shared_ray.host_pids(), "no host is left")


HOURS_OFF = 3 * 3600
CLOCK = f"""
import time
_time = time.time
time.time = lambda: _time() + ({{sign}}{HOURS_OFF})
"""


@pytest.mark.parametrize(("sign", "how"), [("+", "ahead of"), ("-", "behind")])
async def test_a_clock_that_is_hours_off_is_named_and_is_in_no_row(
    shared_ray: SharedRay, tmp_path: Path, sign: str, how: str
) -> None:
    import time

    folder = node_folder(tmp_path, CLOCK.format(sign=sign))
    config = make_config(scripted(latency_ms=100, skill=0.5), ray="auto", k=2, seed=3, host={"slots": 8})
    began = time.time()
    with another_node(shared_ray, folder, {"PYTHONPATH": f"{folder}:{ROOT}"}) as node_id:
        events, rows = await run(config, tmp_path / "run")
    clock = only(events, "clock")
    assert clock.node == node_id
    assert clock.seconds == pytest.approx(float(f"{sign}{HOURS_OFF}"), abs=30)
    assert f"the clock of node {node_id[:12]} is {abs(clock.seconds):.0f} s {how} the driver's" in clock.message
    there = [row for row in rows if row["node_id"] == node_id]
    assert there
    for row in there:
        assert began <= row["queued_at"].timestamp() <= row["started_at"].timestamp() <= row["ended_at"].timestamp()
        assert row["ended_at"].timestamp() <= time.time()
        assert row["queue_s"] < HOURS_OFF / 10


async def test_a_node_without_the_sandboxes_that_tasks_need_spoils_no_rollout(
    shared_ray: SharedRay, tmp_path: Path
) -> None:
    folder = node_folder(tmp_path)
    config = make_config(
        scripted(latency_ms=50), ray="auto", k=2, sandbox="tests.ray.backends:only_where_allowed", host={"slots": 8}
    )
    environment = {"PYTHONPATH": f"{folder}:{ROOT}", "ROLLOUT_TEST_NO_SANDBOX": "1"}
    FIELDS["files"] = {"given.txt": "something"}
    try:
        with another_node(shared_ray, folder, environment) as node_id:
            events, rows = await run(config, tmp_path / "run")
    finally:
        FIELDS.clear()
    retired = only(events, "host_retired")
    assert retired.node == node_id
    assert node_id[:12] in retired.message
    assert "rollout doctor" in retired.message
    assert {(row["status"], row["score"]) for row in rows} == {("completed", 1.0)}
    assert node_id not in {row["node_id"] for row in rows}


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root for a file system that is full")
async def test_a_full_disk_under_the_traces_is_told_and_costs_no_row(shared_ray: SharedRay, tmp_path: Path) -> None:
    config = make_config(
        scripted(skill=0.5, latency_ms=20), ray="auto", k=2, seed=3, store={"inline_trace_bytes": 1}, host={"slots": 8}
    )
    run_dir = tmp_path / "run"
    async with asyncio.timeout(180), RolloutEngine(config=config, run_dir=run_dir) as engine:
        traces = run_dir / "traces"
        await asyncio.to_thread(mount, "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(traces))
        try:
            await engine.finish(make_tasks(TASKS))
            trouble = only(list(engine.progress.events), "trouble")
            tables = await asyncio.to_thread(engine.tables)
        finally:
            await engine.close()
            await asyncio.to_thread(subprocess.run, ["umount", traces], check=True)
    assert str(traces) in trouble.message
    assert "No space left on device" in trouble.message
    assert "make room there" in trouble.message
    (node,) = {row["node_id"] for row in tables.rollouts.to_pylist()}
    assert node[:12] in trouble.message
    assert essence(tables.rollouts) == await undisturbed(config, TASKS)
    assert tables.turns.num_rows >= 2 * TASKS
