"""A cluster of three nodes that misbehaves: every planned row is there once, and the same as if nothing had happened.

One test: .venv/bin/pytest tests/nodes/test_loss.py -k raylet
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rollout_engine import RolloutEngine
from rollout_engine.config import HostSpec, RunConfig
from rollout_engine.events import Event
from tests.helpers import make_config, make_tasks, scripted
from tests.nodes.agents import BLOCK_S
from tests.nodes.three import ThreeNodes, host_pids, kill_raylet
from tests.ray.rays import alive, command, descendants, kill_process, until
from tests.ray.rows import essence, undisturbed

pytestmark = pytest.mark.ray

TASKS, K, SLOTS = 60, 4, 20
RECOVERY_S = 15.0
"""From the error reaching the driver until every lost rollout runs again."""


def config_of(**fields: Any) -> RunConfig:
    """480 rollouts of some 0.5 s, 60 at once."""
    models = [
        scripted(name, skill=skill, latency_ms=500, latency_dist="exponential")
        for name, skill in (("strong", 0.8), ("weak", 0.3))
    ]
    host = {"slots": SLOTS, **fields.pop("host", {})}
    return make_config(*models, ray="auto", k=K, seed=7, host=host, **fields)


class Watched:
    """A run that goes on by itself, to be disturbed."""

    def __init__(self, engine: RolloutEngine, run: asyncio.Task[None]) -> None:
        self.engine, self.run = engine, run
        self.hosts = host_pids()

    async def done(self, rows: int) -> None:
        await until(lambda: self.engine.progress.done >= rows or self.run.done(), f"{rows} rows are committed", 60)
        assert not self.run.done(), "it was over before it was disturbed"

    def events(self, kind: str) -> list[Event]:
        return [event for event in self.engine.progress.events if event.kind == kind]

    async def event(self, kind: str, seconds: float = 60) -> Event:
        return (await until(lambda: self.events(kind), kind, seconds))[0]


@asynccontextmanager
async def running(config: RunConfig, run_dir: Path, tasks: int = TASKS, **fields: Any) -> AsyncIterator[Watched]:
    """At the end the run is finished, its rows are those of an undisturbed one, and nothing of it is left."""
    folders, mounts = ours_in_tmp(), box_mounts()
    async with asyncio.timeout(400), RolloutEngine(config=config, run_dir=run_dir) as engine:
        assert engine.progress.hosts == 3
        below = {pid for host in host_pids().values() for pid in (host, *descendants(host))}
        watched = Watched(engine, asyncio.create_task(engine.finish(make_tasks(tasks, **fields))))
        yield watched
        await watched.run
        below |= {pid for host in host_pids().values() for pid in (host, *descendants(host))}
        await engine.close()
        rollouts = engine.tables().rollouts
    calm = config.model_copy(update={"host": HostSpec()})
    assert essence(rollouts) == await undisturbed(calm, tasks, **fields)
    keys = Counter(zip(*(rollouts[name].to_pylist() for name in ("task_id", "model", "attempt")), strict=True))
    assert set(keys.values()) == {1}
    assert len(keys) == tasks * config.k * len(config.models)
    left: list[Any] = []

    def nothing_left() -> bool:
        left[:] = [*host_pids().items(), *((pid, command(pid)) for pid in hosts_among(below))]
        left.extend([*(ours_in_tmp() - folders), *(box_mounts() - mounts)])
        return not left

    try:
        await until(nothing_left, "no host and nothing below one is left, no folder and no mount")
    except AssertionError as error:
        raise AssertionError(left) from error
    written = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    assert [event["kind"] for event in written] == [event.kind for event in engine.progress.events]
    for event in written:
        print(event["kind"], event["message"])


def ours_in_tmp() -> set[str]:
    return {name for name in os.listdir(tempfile.gettempdir()) if name.startswith("rollout-")}


def box_mounts() -> set[str]:
    """What is mounted in this process's namespace by a path of ours."""
    return {line for line in Path("/proc/self/mountinfo").read_text().splitlines() if tempfile.gettempdir() in line}


def hosts_among(pids: set[int]) -> list[int]:
    """Ray's own idle workers may stay."""
    return [pid for pid in alive(pids) if "RolloutHost" in command(pid) or "rollout-" in command(pid)]


def taken_up(rollouts: list[dict[str, Any]], lost: Event) -> float:
    """Seconds from a loss until the last of what it cost was running again."""
    again = [row["started_at"].timestamp() for row in rollouts if row["retries"]]
    assert again, "nothing was running on the host that was lost"
    return max(again) - lost.at


async def rows_of(run_dir: Path) -> list[dict[str, Any]]:
    from rollout_engine.store.rundir import read_rollouts

    rows: list[dict[str, Any]] = (await asyncio.to_thread(read_rollouts, run_dir)).to_pylist()
    return rows


async def test_a_killed_raylet_costs_seconds_and_no_row(three: ThreeNodes, tmp_path: Path) -> None:
    config, node = config_of(), three.others[0]
    # Enough of them that the survivors have their hands full however late Ray tells of the loss.
    async with running(config, tmp_path / "run", 4 * TASKS) as watched:
        await watched.done(100)
        kill_raylet(node)
        lost = await watched.event("host_lost")
        began = asyncio.get_running_loop().time()
        await until(lambda: watched.engine.progress.running >= 2 * SLOTS, "the survivors are full", RECOVERY_S)
        full = asyncio.get_running_loop().time() - began
    recovered = watched.events("recovered")[0]
    assert lost.node == recovered.node == node.node_id
    seconds = taken_up(await rows_of(tmp_path / "run"), lost)
    print(f"survivors full after {full:.2f} s, {recovered.rollouts} lost rollouts running after {seconds:.2f} s")
    assert recovered.seconds is not None
    assert recovered.seconds <= seconds < RECOVERY_S


async def test_a_killed_host_is_started_again_on_its_node(three: ThreeNodes, tmp_path: Path) -> None:
    node = three.others[0].node_id
    async with running(config_of(), tmp_path / "run", 4 * TASKS) as watched:  # not over before there is another one
        await watched.done(100)
        kill_process(watched.hosts[node])
        lost = await watched.event("host_lost")
        await until(lambda: watched.engine.progress.hosts == 3, "three hosts again")
    assert lost.node == node
    assert [event.node for event in watched.events("host_up")].count(node) == 2
    assert taken_up(await rows_of(tmp_path / "run"), lost) < RECOVERY_S


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="boxes of the namespace sandbox are asked for as root")
@pytest.mark.parametrize("what", ["host", "raylet"])
async def test_boxes_end_with_the_host_or_the_raylet_that_is_killed(
    three: ThreeNodes, tmp_path: Path, what: str
) -> None:
    node, config = three.others[0], config_of(sandbox="namespace", host={"slots": 6})
    async with running(config, tmp_path / "run", 20, files={"given.txt": "something"}) as watched:
        await watched.done(30)
        host = watched.hosts[node.node_id]
        below = await until(lambda: boxes(host), "a box runs")
        kill_process(host) if what == "host" else kill_raylet(node)
        lost = await watched.event("host_lost")
        await until(lambda: not alive([host, *below]), f"what {len(below)} boxes held is gone")
    assert lost.node == node.node_id
    assert {row["sandbox"] for row in await rows_of(tmp_path / "run")} == {"namespace"}


def boxes(host: int) -> list[int]:
    """The launcher of a host, and what is below it."""
    launchers = [pid for pid in descendants(host) if "rollout-box-launcher" in command(pid)]
    return [pid for launcher in launchers for pid in (launcher, *descendants(launcher)) if descendants(launcher)]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout_engine.serving.EXCHANGE_GRACE_S", 1.0)


async def test_a_stopped_host_is_given_up_and_ends_when_it_wakes(
    three: ThreeNodes, tmp_path: Path, impatient: None
) -> None:
    """SIGSTOP: the process is there and says nothing. What it did is done elsewhere, and it does not come back."""
    lease_s, node = 5.0, three.others[0].node_id
    async with running(config_of(host={"lease_s": lease_s}), tmp_path / "run") as watched:
        await watched.done(100)
        host = watched.hosts[node]
        at = asyncio.get_running_loop().time()
        os.kill(host, signal.SIGSTOP)
        await watched.event("host_lost")
        print(f"given up after {asyncio.get_running_loop().time() - at:.1f} s with a lease of {lease_s:g} s")
        await watched.event("recovered")
        with contextlib.suppress(ProcessLookupError):
            os.kill(host, signal.SIGCONT)
        await until(lambda: not alive([host]), "it has ended")


async def test_a_host_whose_loop_is_blocked_is_given_up_although_it_still_answers_a_nudge(
    three: ThreeNodes, tmp_path: Path, impatient: None
) -> None:
    import ray

    marker = tmp_path / "blocked"
    agent = {"agent": "tests.nodes.agents:BlocksOnce", "agent_options": {"marker": str(marker)}}
    async with running(config_of(host={"lease_s": 10.0}, **agent), tmp_path / "run") as watched:
        await until(marker.exists, "a rollout blocks its host")
        pid, node = (int(number) if number.isdigit() else number for number in marker.read_text().split())
        peers = watched.engine._run.driver.board.peers.values()
        (handle,) = (peer.handle for peer in peers if peer.handle.node_id == node)
        await asyncio.to_thread(ray.get, handle._actor.nudge.remote(), timeout=30)  # type: ignore[attr-defined]
        await until(lambda: node in [lost.node for lost in watched.events("host_lost")], "it is given up", BLOCK_S)
        await until(lambda: not alive([int(pid)]), "it has ended", 20)
        assert time.time() - marker.stat().st_mtime < BLOCK_S, "it was blocked to its end"


def ending(kinds: tuple[str, ...]) -> Iterator[Any]:
    for number, task in enumerate(make_tasks(TASKS)):
        yield task.model_copy(update={"metadata": {"agent": kinds[number % 10]} if number % 10 < len(kinds) else {}})


async def test_exits_that_are_raised_cost_no_host(three: ThreeNodes, tmp_path: Path) -> None:
    config = config_of(agent="tests.ray.endings:Agent", retry={"backoff_s": 0.0})
    tasks = list(ending(("SystemExit", "KeyboardInterrupt")))
    async with asyncio.timeout(300), RolloutEngine(config=config, run_dir=tmp_path / "run") as engine:
        await engine.finish(tasks)
        await engine.close()
        rollouts = engine.tables().rollouts
    async with RolloutEngine(config=config, ray="off") as calm:
        await calm.finish(tasks)
        await calm.close()
        assert essence(rollouts) == essence(calm.tables().rollouts)
    kinds = Counter(rollouts["failure_type"].to_pylist())
    assert kinds == {None: 48 * 8, "SystemExit": 6 * 8, "KeyboardInterrupt": 6 * 8}
    assert not [event for event in engine.progress.events if event.kind == "host_lost"]
    await until(lambda: not host_pids(), "no host is left")


async def test_a_host_that_nobody_has_opened_ends_with_its_raylet(three: ThreeNodes) -> None:
    """Its raylet may be gone between the two: nobody else will tell it."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from actors.host import RolloutHost

    node = three.others[0]
    where = NodeAffinitySchedulingStrategy(node.node_id, soft=False)
    actor = RolloutHost.options(num_cpus=0, scheduling_strategy=where).remote(None)  # type: ignore[attr-defined]
    pid = await until(lambda: host_pids().get(node.node_id), "there is a host")
    kill_raylet(node)
    await until(lambda: not alive([pid]), "it has ended")
    del actor
