"""Nodes that are drained, that join and that leave while a run goes on.

One test: .venv/bin/pytest tests/nodes/test_changes.py -k drained
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from rollout_engine.config import RunConfig
from tests.helpers import make_config, scripted
from tests.nodes.test_loss import rows_of, running
from tests.nodes.three import ThreeNodes, draining
from tests.ray.rays import until

pytestmark = pytest.mark.ray

TASKS = 30
FAR_S = 600.0
"""A notice whose end no test comes to see."""


def drain(node: Any, address: str, seconds: float) -> None:
    """As a preemption notice does."""
    from ray._raylet import GcsClient
    from ray.core.generated import autoscaler_pb2

    reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    accepted, why = GcsClient(address=address).drain_node(
        node.node_id, reason, "the test says so", int((time.time() + seconds) * 1000)
    )
    assert accepted, why
    assert node.node_id in draining()


def gated(folder: Path, **fields: Any) -> RunConfig:
    """60 rollouts that wait for a gate, at most 20 on a host; one that counts as lost fails."""
    folder.mkdir()
    model = scripted(skill=0.5, latency_ms=5)
    agent = {"agent": "tests.nodes.agents:Waits", "agent_options": {"folder": str(folder)}}
    retry = {"max_host_losses": 0}
    return make_config(model, ray="auto", k=2, seed=5, host={"slots": 20, **fields}, retry=retry, **agent)


def started(folder: Path) -> int:
    return sum(1 for _ in folder.iterdir())


async def test_a_draining_node_hands_back_in_time_and_nobody_is_to_blame(three: ThreeNodes, tmp_path: Path) -> None:
    notice_s, node, folder = 20.0, three.others[0], tmp_path / "gates"
    async with running(gated(folder), tmp_path / "run", TASKS) as watched:
        await until(lambda: watched.engine.progress.running == 2 * TASKS, "all rollouts run")
        board = watched.engine._run.driver.board
        (host,) = (host for host, peer in board.peers.items() if peer.handle.node_id == node.node_id)
        held = len(board.scheduler.held[host])
        assert held
        before = time.time()
        drain(node, three.address, notice_s)
        drained = await watched.event("drained")
        in_time = drained.at - before
        (folder / "gate").touch()
    print(f"{held} rollouts handed back {in_time:.1f} s after a notice of {notice_s:g} s")
    assert in_time < notice_s
    rows = await rows_of(tmp_path / "run")
    again = [row for row in rows if row["retries"]]
    assert len(again) == held
    assert {row["status"] for row in rows} == {"completed"}
    assert node.node_id not in {row["node_id"] for row in rows}
    assert not watched.events("host_lost")


async def test_what_ends_before_the_deadline_ends_where_it_runs(three: ThreeNodes, tmp_path: Path) -> None:
    node, folder = three.others[0], tmp_path / "gates"
    async with running(gated(folder), tmp_path / "run", TASKS) as watched:
        await until(lambda: watched.engine.progress.running == 2 * TASKS, "all rollouts run")
        drain(node, three.address, FAR_S)
        await watched.event("draining")
        (folder / "gate").touch()
        await watched.event("drained")
    rows = await rows_of(tmp_path / "run")
    assert not [row for row in rows if row["retries"]]
    assert node.node_id in {row["node_id"] for row in rows}


async def test_a_draining_node_gets_nothing_new(three: ThreeNodes, tmp_path: Path) -> None:
    """What had been sent there and not started is started elsewhere."""
    node, folder = three.others[0], tmp_path / "gates"
    config = gated(folder, slots=5, prefetch=1.0)
    async with running(config, tmp_path / "run", TASKS) as watched:
        await until(lambda: started(folder) == 15, "three hosts are full")
        drain(node, three.address, FAR_S)
        await watched.event("draining")
        board = watched.engine._run.driver.board
        (host,) = (host for host, peer in board.peers.items() if peer.handle.node_id == node.node_id)
        await until(lambda: len(board.scheduler.held[host]) == 5, "it has given back what was queued")
        (folder / "gate").touch()
        await watched.event("drained")
    there = [row for row in await rows_of(tmp_path / "run") if row["node_id"] == node.node_id]
    assert len(there) == 5


async def test_a_node_that_joins_gets_a_host_and_one_that_leaves_is_not_missed(
    three: ThreeNodes, tmp_path: Path
) -> None:
    # Two minutes of work, so that it is not over before the node is there; what is left then takes no time.
    folder = tmp_path / "gates"
    folder.mkdir()
    agent = {"agent": "tests.nodes.agents:Paces", "agent_options": {"folder": str(folder)}}
    config = make_config(scripted(skill=0.5), ray="auto", k=4, seed=5, host={"slots": 5}, **agent)
    async with running(config, tmp_path / "run", 1500) as watched:
        await watched.done(20)
        node = three.add()  # from the main thread alone; the driver has a loop of its own
        await until(lambda: watched.engine.progress.hosts == 4, "the new node has a host", 90)
        peers = watched.engine._run.driver.board.peers.values()
        (link,) = (peer.link for peer in peers if peer.handle.node_id == node.node_id)
        await until(lambda: link.acked_seq > 0, "rows of the new host are committed")
        await asyncio.to_thread(three.remove, node)
        lost = await watched.event("host_lost")
        (folder / "gate").touch()
    assert lost.node == node.node_id
    assert node.node_id in {row["node_id"] for row in await rows_of(tmp_path / "run")}
