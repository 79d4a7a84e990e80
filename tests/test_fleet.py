"""The driver over nodes that join, are drained, or have no sandboxes; hosts are real, in this process.

One test: .venv/bin/pytest tests/test_fleet.py -k drained
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from rollout_engine.errors import InputError, SandboxUnavailable
from rollout_engine.placement import Node
from rollout_engine.sandboxes.base import Sandbox, SandboxSpec
from rollout_engine.sandboxes.local import LocalProvider
from rollout_engine.specs import Task
from tests.helpers import make_config, make_tasks
from tests.rig import Gate, gated
from tests.test_driver import Drive, Hosts, assert_each_key_once, driving, no_patience

__all__ = ["no_patience"]


def kinds(drive: Drive) -> list[str]:
    return [event.kind for event in drive.driver.progress.events if event.kind != "host_up"]


def held(drive: Drive) -> dict[str, int]:
    return {host: len(keys) for host, keys in drive.driver.board.scheduler.held.items()}


async def test_a_node_that_joins_gets_its_share(no_patience: None) -> None:
    gate, hosts = Gate(), Hosts(1)
    async with driving(make_config(host={"slots": 4, "prefetch": 0.0}, **gated(gate)), hosts=hosts) as drive:
        submission = drive.submit(make_tasks(8))
        await gate.reached(4)
        hosts.join()
        await gate.reached(8)
        gate.open()
        rows = await drive.done(submission)
    assert_each_key_once(rows, 8)
    assert {row.host_id for row in rows} == {"host-0", "host-1"}


@pytest.mark.parametrize("tasks", [5, 12, 15, 24])
async def test_nothing_queues_on_one_host_that_could_start_on_another(tasks: int) -> None:
    gate = Gate()
    config = make_config(host={"slots": 4, "prefetch": 1.0}, **gated(gate))
    async with driving(config, hosts=Hosts(3)) as drive:
        submission = drive.submit(make_tasks(tasks))
        await gate.reached(min(tasks, 12))
        assert gate.inside == min(tasks, 12)
        await drive.until(lambda: sum(held(drive).values()) == tasks)
        gate.open()
        assert_each_key_once(await drive.done(submission), tasks)


def drain(hosts: Hosts, number: int, seconds: float) -> None:
    hosts.there[number] = hosts.there[number]._replace(leaving_in_s=seconds)


async def test_a_draining_host_gives_back_what_it_has_not_started_and_finishes_the_rest(no_patience: None) -> None:
    gate, hosts = Gate(), Hosts(2)
    config = make_config(host={"slots": 3, "prefetch": 1.0}, retry={"max_host_losses": 0}, **gated(gate))
    async with driving(config, hosts=hosts) as drive:
        submission = drive.submit(make_tasks(12))
        await gate.reached(6)
        await drive.until(lambda: sum(held(drive).values()) == 12)
        drain(hosts, 0, 600.0)
        await drive.until(lambda: held(drive)["host-0"] == 3)
        assert kinds(drive) == ["draining"]
        gate.open()
        rows = await drive.done(submission)
        await drive.until(lambda: "drained" in kinds(drive))
        assert drive.driver.progress.hosts == 1
    assert_each_key_once(rows, 12)
    assert {row.status for row in rows} == {"completed"}
    assert {row.retries for row in rows} == {0}
    assert sum(row.host_id == "host-0" for row in rows) == 3


@pytest.mark.slow
async def test_a_draining_host_hands_back_what_does_not_end_in_time_and_no_loss_is_counted(no_patience: None) -> None:
    gate, hosts = Gate(), Hosts(2)
    config = make_config(host={"slots": 4, "prefetch": 0.0}, retry={"max_host_losses": 0}, **gated(gate))
    async with driving(config, hosts=hosts) as drive:
        submission = drive.submit(make_tasks(8))
        await gate.reached(8)
        began = time.monotonic()
        drain(hosts, 0, 8.0)
        await drive.until(lambda: "drained" in kinds(drive))
        assert 4.0 < time.monotonic() - began < 8.0
        assert gate.inside == 4, "what was handed back still runs there"
        gate.open()
        rows = await drive.done(submission)
    assert_each_key_once(rows, 8)
    assert {row.status for row in rows} == {"completed"}
    assert {row.host_id for row in rows} == {"host-1"}
    assert sum(row.retries for row in rows) == 4


async def test_a_run_whose_last_node_is_drained_waits_for_another(no_patience: None) -> None:
    gate, hosts = Gate(), Hosts(1)
    async with driving(make_config(**gated(gate)), hosts=hosts) as drive:
        submission = drive.submit(make_tasks(3))
        await gate.reached(3)
        hosts.join()
        drain(hosts, 0, 0.0)
        await gate.reached(6)
        gate.open()
        assert_each_key_once(await drive.done(submission), 3)


async def test_a_node_on_which_no_host_comes_up_is_named_and_the_others_go_on() -> None:
    class Odd(Hosts):
        async def start(self, node_id: str) -> Any:
            if node_id == "node-1":
                raise InputError("the wrong version", where="ray", fix="install another")
            return await super().start(node_id)

    async with driving(make_config(), hosts=Odd(3)) as drive:
        assert_each_key_once(await drive.run(make_tasks(9)), 9)
        assert any("no host on node node-1" in note and "wrong version" in note for note in drive.driver.progress.notes)
        assert drive.driver.progress.hosts == 2


class Choosy(LocalProvider):
    """Has a sandbox neither on the nodes nor for the tasks that are named."""

    nodes: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    opening = ""
    """The node whose host is being opened."""

    def __init__(self) -> None:
        super().__init__()
        self._node = Choosy.opening

    async def open(self, spec: SandboxSpec) -> Sandbox:  # type: ignore[override]
        await asyncio.sleep(0.01)
        if self._node in self.nodes or spec.label in self.tasks:
            raise SandboxUnavailable("there is none")
        return await super().open(spec)


@pytest.fixture
def choosy(monkeypatch: pytest.MonkeyPatch) -> type[Choosy]:
    for name in ("nodes", "tasks"):
        monkeypatch.setattr(Choosy, name, ())
    return Choosy


class Boxed(Hosts):
    """Hosts whose providers know their node."""

    async def start(self, node_id: str) -> Any:
        Choosy.opening = node_id
        return await super().start(node_id)


def boxed(**fields: Any) -> Any:
    return make_config(sandbox="tests.test_fleet:Choosy", host={"slots": 4}, k=2, **fields)


def boxed_tasks(n: int) -> list[Task]:
    return [task.model_copy(update={"files": {"name": task.task_id}}) for task in make_tasks(n)]


async def test_a_node_without_sandboxes_is_retired_and_spoils_no_rollout(choosy: type[Choosy]) -> None:
    choosy.nodes = ("node-0",)
    async with driving(boxed(), hosts=Boxed(2)) as drive:
        rows = await drive.run(boxed_tasks(20))
        assert "host_retired" in kinds(drive)
        assert any("rollout doctor" in note for note in drive.driver.progress.notes)
    assert_each_key_once(rows, 40)
    assert {(row.status, row.host_id) for row in rows} == {("completed", "host-1")}


async def test_a_task_that_no_node_has_a_sandbox_for_fails_and_retires_nobody(choosy: type[Choosy]) -> None:
    choosy.tasks = ("t3",)
    async with driving(boxed(), hosts=Boxed(2)) as drive:
        rows = await drive.run(boxed_tasks(20))
        assert kinds(drive) == []
    assert_each_key_once(rows, 40)
    assert {row.task_id for row in rows if row.failure_type == "SandboxUnavailable"} == {"t3"}
    assert sum(row.status == "completed" for row in rows) == 38


async def test_where_no_node_has_sandboxes_every_rollout_says_so(choosy: type[Choosy]) -> None:
    choosy.nodes = ("node-0", "node-1", "node-2")
    async with driving(boxed(), hosts=Boxed(3)) as drive:
        rows = await drive.run(boxed_tasks(10))
    assert_each_key_once(rows, 20)
    assert {(row.status, row.failure_type) for row in rows} == {("failed", "SandboxUnavailable")}


async def test_a_loss_and_its_recovery_are_on_record() -> None:
    gate = Gate()
    async with driving(make_config(host={"slots": 4}, **gated(gate)), hosts=Hosts(2)) as drive:
        submission = drive.submit(make_tasks(6))
        await gate.reached(6)
        lost = held(drive)["host-0"]
        await drive.hosts.handles[0].die()
        await drive.until(lambda: "recovered" in kinds(drive))
        gate.open()
        await drive.done(submission)
        await drive.until(lambda: len(drive.store.events) == len(drive.driver.progress.events))
        found = {event.kind: event for event in drive.store.events}
    assert (found["host_lost"].host, found["host_lost"].node, found["host_lost"].rollouts) == ("host-0", "node-0", lost)
    assert found["recovered"].rollouts == lost
    assert found["recovered"].seconds is not None
    assert found["recovered"].seconds < 60


def test_a_node_is_named_by_its_id_and_address() -> None:
    assert str(Node("0123456789abcdef", address="10.0.0.1")) == "0123456789ab (10.0.0.1)"
