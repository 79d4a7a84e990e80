"""What a rollout waits for is known at every moment, to the host and to whoever asks it."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import pytest
from aiohttp import web

from rollout_engine.config import RunConfig
from rollout_engine.exchange import HostLimits, Lease, Request
from rollout_engine.host import Host
from rollout_engine.specs import Task, task_body
from rollout_engine.waiting import Activity, Cell, Waiting, awaiting, enter_rollout, stuck_longest, waiting
from tests.helpers import make_config, make_plan
from tests.rig import Gate, answer, chat_server, gated, gated_verifier, served, spec_of, task_of

TRUSTED: dict[str, Any] = {"environment": {"trusted": True}}


async def hold(host: Host, *tasks: Task, permits: int = 8, model: str = "m") -> None:
    """Grants one rollout of each task."""
    specs = tuple(spec_of(task, model, key=key) for key, task in enumerate(tasks))
    bodies = {spec.digest: task_body(task) for spec, task in zip(specs, tasks, strict=True)}
    limits = HostLimits({model: Lease(permits, -1.0)}, wait_s=0.0)
    await host.exchange(Request(1, 1, len(specs), specs, bodies, limits=limits))


async def told(host: Host, key: int, phase: str, what: str) -> Waiting:
    """What the host says of a rollout, once that is this."""
    async with asyncio.timeout(60):
        while True:
            rows = [row for row in host.waiting_for() if row.key == key]
            if rows and rows[0].phase == phase and what in rows[0].waits_for:
                return rows[0]
            await asyncio.sleep(0.01)


class Opened:
    """A host from open to close."""

    def __init__(self, config: RunConfig) -> None:
        self.host = Host(make_plan(config))

    async def __aenter__(self) -> Host:
        await self.host.open()
        return self.host

    async def __aexit__(self, *error: object) -> None:
        await self.host.close()


async def test_one_that_has_no_slot_waits_for_one_and_one_that_has_waits_for_its_agent() -> None:
    gate = Gate()
    async with Opened(make_config(host={"slots": 1}, **gated(gate))) as host:
        await hold(host, task_of(), task_of())
        await gate.reached(1)
        first, second = host.waiting_for()
        assert (first.key, first.phase, first.waits_for) == (0, "agent", "its agent")
        assert (second.key, second.phase, second.waits_for) == (1, "queue", "a slot on host-0")
        assert first.rollout == "m/0/t"
        assert [row.key for row in host.waiting_for(1)] == [0]


async def test_one_whose_body_has_not_come_says_so() -> None:
    async with Opened(make_config()) as host:
        await host.exchange(Request(1, 1, 1, (spec_of(task_of()),), limits=HostLimits(wait_s=0.0)))
        assert [row.waits_for for row in host.waiting_for()] == ["its task's body from the driver"]


async def test_a_permit_and_a_call_are_told_apart_by_model_and_number() -> None:
    asked, release = asyncio.Event(), asyncio.Event()

    async def silent(request: web.Request) -> web.StreamResponse:
        asked.set()
        await release.wait()
        return answer()

    async with chat_server(silent) as url, Opened(make_config(served(url))) as host:
        await hold(host, task_of(), task_of(), permits=1)
        await asked.wait()
        await told(host, 0, "agent", "call 1 to model m")
        await told(host, 1, "agent", "a permit of model m")
        release.set()


async def test_a_setup_command_a_service_and_a_verifier_are_named() -> None:
    gate = Gate()
    service = {"name": "db", "command": "sleep 60", "health": "false", "health_timeout_s": 60}
    tasks = [
        task_of(task_id="setup", setup=["sleep 61"], **TRUSTED),
        task_of(task_id="service", services=[service], **TRUSTED),
        task_of(task_id="verify", verifier=gated_verifier(gate)),
    ]
    config = make_config(sandbox="local", trusted_code=["tests.rig:*"])
    async with Opened(config) as host:
        await hold(host, *tasks)
        await told(host, 0, "setup", "setup command 'sleep 61'")
        await told(host, 1, "setup", "service db to be healthy")
        await told(host, 2, "verify", "its verifier")


async def test_the_wait_for_one_thing_is_counted_from_its_own_beginning() -> None:
    cell = Cell()
    cell.enter("agent", "its agent")
    began = cell.since
    enter_rollout(cell)
    with awaiting("a permit"):
        assert (cell.what, cell.phase) == ("a permit", "agent")
        assert cell.since >= began
    assert cell.what == "its agent"


async def test_work_of_a_subtask_is_told_as_its_rollouts() -> None:
    cell = Cell()
    enter_rollout(cell)

    async def below() -> str:
        with awaiting("a tool"):
            return cell.what

    assert await asyncio.create_task(below()) == "a tool"


def test_without_a_rollout_nothing_is_told() -> None:
    with awaiting("nothing"):
        pass


def test_what_goes_forward_is_counted_and_what_is_awaited_is_not() -> None:
    activity = Activity()
    cell = Cell(activity)
    cell.enter("start", "a sandbox")
    cell.wait("something else")
    cell.moved()
    assert activity.moves == 2


def test_rows_cross_to_the_driver_and_the_longest_wait_comes_first() -> None:
    rows = [Waiting(key, f"m/{key}/t", "agent", "its agent", float(key), 9.0) for key in range(5)]
    assert pickle.loads(pickle.dumps(rows)) == rows
    assert [row.key for row in stuck_longest(rows, 2)] == [4, 3]
    assert str(rows[3]) == "m/3/t: agent, waits for its agent for 3 s (planned 9 s ago)"


def test_no_name_of_a_tool_reaches_a_terminal_as_it_is() -> None:
    row = waiting(spec_of(task_of()), "agent", "tool \x1b[2J", 0.0, 0.0)
    assert row.waits_for == "tool ?[2J"


@pytest.mark.parametrize("length", [10, 10_000])
async def test_a_long_command_does_not_make_a_long_row(length: int) -> None:
    command = "sleep 62 #" + "x" * length
    async with Opened(make_config(sandbox="local")) as host:
        await hold(host, task_of(setup=[command], **TRUSTED))
        row = await told(host, 0, "setup", "setup command 'sleep 62")
        assert len(row.waits_for) <= 160
