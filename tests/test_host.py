"""A host alone: slots, queues, backpressure, cancellation, lingering, traces, and that nothing stays behind.

One test: .venv/bin/pytest tests/test_host.py -k linger
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import operator
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rollout_engine.agents.base import AgentLimits, AgentModel, OnTurn
from rollout_engine.bodies import IDLE_BODIES
from rollout_engine.config import RunConfig
from rollout_engine.errors import HostError, InputError
from rollout_engine.exchange import HostLimits, Lease, Reply, Request, scramble
from rollout_engine.held import OVERDUE_S, SWEEP_S
from rollout_engine.host import Host
from rollout_engine.sandboxes.base import Sandbox
from rollout_engine.schema import batch_to_records
from rollout_engine.specs import Task, body_digest, task_body
from rollout_engine.store import create_run
from rollout_engine.store.traces import read_trace
from rollout_engine.types import RolloutRecord, RolloutSpec, StopReason, Turn
from tests.helpers import make_config, make_plan, scripted
from tests.rig import Gate, gated, gated_verifier, in_virtual_time, spec_of, task_of

FREE = {"m": Lease(-1, -1.0)}


class Talk:
    """The driver's side by hand: numbers what it says, and keeps what it hears."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.rows: list[RolloutRecord] = []
        self.sizes: list[int] = []
        """Rows of each batch that came."""
        self.bodies: dict[str, bytes] = {}
        self._number = self._granted = self._received = self._acked = 0
        self._loop = asyncio.get_running_loop()

    def request(
        self,
        *specs: RolloutSpec,
        cancel: Iterable[int] = (),
        bodies: dict[str, bytes] | None = None,
        acked: int | None = None,
        want_held: bool = False,
        leases: dict[str, Lease] | None = None,
        wait_s: float = 0.0,
        linger_s: float = 0.0,
        paused: bool = False,
    ) -> Request:
        self._number += 1
        self._granted += len(specs)
        self._acked = acked if acked is not None else self._acked
        return Request(
            epoch=1,
            number=self._number,
            grant_seq=self._granted,
            specs=specs,
            bodies=bodies if bodies is not None else self.bodies,
            cancel_keys=tuple(cancel),
            received_seq=self._received,
            acked_seq=self._acked,
            limits=HostLimits(leases if leases is not None else FREE, linger_s, wait_s, paused),
            want_held=want_held,
        )

    async def say(self, *specs: RolloutSpec, **fields: Any) -> Reply:
        return self.hear(await self.host.exchange(self.request(*specs, **fields)))

    def hear(self, reply: Reply) -> Reply:
        for seq, batch in reply.batches:
            assert seq == self._received + 1
            self._received = seq
            self.sizes.append(batch.num_rows)
            self.rows += batch_to_records(batch)
        return reply

    @property
    def received(self) -> int:
        return self._received

    async def until(self, rows: int, **fields: Any) -> list[RolloutRecord]:
        """Asks until so many rows have come, in the order of their keys."""
        async with asyncio.timeout(60):
            while len(self.rows) < rows:
                await self.say(wait_s=0.5, **fields)
        return sorted(self.rows, key=lambda record: record.key)

    async def until_said(self, holds: Any, **fields: Any) -> Reply:
        """Asks until a reply is as wanted."""
        async with asyncio.timeout(60):
            while not holds(reply := await self.say(wait_s=0.01, **fields)):
                pass
        return reply


@contextlib.asynccontextmanager
async def talking(config: RunConfig | None = None, task: Task | None = None, **fields: Any) -> AsyncIterator[Talk]:
    """A host that is closed at the end, and leaves no task behind."""
    before = asyncio.all_tasks()
    host = Host(replace(make_plan(config or make_config()), **fields))
    await host.open()
    talk = Talk(host)
    task = task or task_of()
    talk.bodies = {body_digest(task_body(task)): task_body(task)}
    try:
        yield talk
    finally:
        await host.close()
        assert asyncio.all_tasks() == before


def specs(count: int, task: Task | None = None, first: int = 0) -> list[RolloutSpec]:
    return [spec_of(task or task_of(), key=key, attempt=key) for key in range(first, first + count)]


# -- slots ------------------------------------------------------------------------------------------------------------


async def test_free_slots_are_slots_and_prefetch_less_what_is_held() -> None:
    gate = Gate()
    async with talking(make_config(host={"slots": 4, "prefetch": 0.5}, **gated(gate))) as talk:
        assert (await talk.say()).free_slots == 6
        reply = await talk.say(*specs(5))
        assert (reply.free_slots, reply.running, reply.held_count) == (1, 4, 5)
        await gate.reached(4)
        assert gate.inside == 4
        gate.open()
        await talk.until(5)
        reply = await talk.say(acked=talk.received)
        assert (reply.free_slots, reply.running, reply.held_count) == (6, 0, 0)


async def test_a_prefetched_rollout_starts_as_soon_as_a_slot_is_free_without_being_asked_for() -> None:
    gate = Gate()
    async with talking(make_config(host={"slots": 2, "prefetch": 2.0}, **gated(gate))) as talk:
        await talk.say(*specs(6))
        await gate.reached(2)
        gate.let(2)
        await gate.reached(4)
        gate.open()
        await gate.reached(6)
        assert gate.most == 2
        rows = await talk.until(6)
        assert [row.status for row in rows] == ["completed"] * 6


async def test_a_verifying_rollout_holds_no_slot_but_those_held_in_all_phases_are_bounded() -> None:
    gate = Gate()
    task = task_of(verifier=gated_verifier(gate))
    async with talking(make_config(host={"slots": 2, "prefetch": 0.0, "verifying": 99}), task) as talk:
        granted = 0
        async with asyncio.timeout(60):
            while granted < 4:
                reply = await talk.say(wait_s=0.05)
                new = specs(min(reply.free_slots, 4 - granted), task, granted)
                granted += len(new)
                await talk.say(*new)
        await gate.reached(4)
        reply = await talk.say()
        assert (reply.running, reply.held_count, reply.free_slots) == (4, 4, 0)
        gate.open()
        await talk.until(4)


async def test_only_so_many_verify_at_once() -> None:
    gate = Gate()
    task = task_of(verifier=gated_verifier(gate))
    async with talking(make_config(host={"slots": 8, "verifying": 2}), task) as talk:
        await talk.say(*specs(6, task))
        await gate.reached(2)
        await talk.until_said(lambda reply: reply.free_slots == 12)
        assert gate.arrived == 2
        gate.open()
        rows = await talk.until(6)
        assert gate.most == 2
        assert {row.score for row in rows} == {1.0}


async def test_a_paused_host_lets_run_what_runs_and_starts_nothing() -> None:
    gate = Gate()
    async with talking(make_config(host={"slots": 1, "prefetch": 4.0}, **gated(gate))) as talk:
        await talk.say(*specs(3))
        await gate.reached(1)
        reply = await talk.say(paused=True)
        gate.open()
        reply = await talk.until_said(lambda reply: not reply.running, paused=True)
        assert (len(talk.rows), gate.arrived, reply.held_count) == (1, 1, 2)
        assert len(await talk.until(3)) == 3


async def test_nothing_starts_without_a_lease_and_calls_wait_for_it() -> None:
    async with talking() as talk:
        await talk.say(*specs(3), leases={"m": Lease(0, -1.0)})
        reply = await talk.until_said(lambda reply: reply.demand["m"].waiting == 3, leases={"m": Lease(0, -1.0)})
        assert reply.running == 3
        assert talk.rows == []
        assert len(await talk.until(3)) == 3


# -- backpressure -----------------------------------------------------------------------------------------------------


async def test_rows_that_are_not_committed_stop_new_rollouts_until_they_are() -> None:
    config = make_config(host={"slots": 2, "prefetch": 4.0, "max_unacked_bytes": 600})
    async with talking(config) as talk:
        await talk.say(*specs(8))
        rows = await talk.until(2)
        for _ in range(3):
            reply = await talk.say(wait_s=0.01)
            assert reply.free_slots == 0
        started = len(talk.rows)
        assert started < 8
        while len(talk.rows) < 8:
            await talk.say(acked=talk.received, wait_s=0.01)
        rows = await talk.until(8)
        assert [row.status for row in rows] == ["completed"] * 8
        assert (await talk.say(acked=talk.received)).free_slots == 10


async def test_an_unacknowledged_batch_is_sent_again_and_an_acknowledged_one_never() -> None:
    async with talking() as talk:
        first = talk.request(*specs(2))
        replies = [await talk.host.exchange(first)]
        async with asyncio.timeout(60):
            while not replies[-1].batches:
                replies.append(await talk.host.exchange(talk.request(wait_s=0.2)))
        again = await talk.host.exchange(talk.request())
        assert [seq for seq, _ in again.batches][: len(replies[-1].batches)] == [seq for seq, _ in replies[-1].batches]
        talk.hear(again)
        rows = await talk.until(2)
        assert [row.key for row in rows] == [0, 1]
        assert (await talk.say(acked=talk.received)).batches == ()
        talk._received = 0
        assert (await talk.say()).batches == ()


# -- bodies -----------------------------------------------------------------------------------------------------------


async def test_a_missing_body_is_asked_for_and_the_rollouts_wait() -> None:
    async with talking() as talk:
        digest, body = next(iter(talk.bodies.items()))
        reply = await talk.say(*specs(3), bodies={})
        assert (reply.missing, reply.held_count, reply.running) == ((digest,), 3, 0)
        assert (await talk.say(bodies={})).missing == (digest,)
        reply = await talk.say(bodies={digest: body})
        assert reply.missing == ()
        assert [row.score for row in await talk.until(3, bodies={})] == [1.0] * 3


async def test_a_body_is_kept_for_later_rollouts_of_its_task() -> None:
    async with talking() as talk:
        await talk.say(*specs(1))
        await talk.until(1)
        assert (await talk.say(*specs(1, first=1), bodies={})).missing == ()
        await talk.until(2, bodies={})


async def test_bodies_that_nothing_uses_are_kept_for_a_while_and_those_in_use_for_ever() -> None:
    gate = Gate()
    count = IDLE_BODIES + 50
    tasks = [task_of(task_id=f"t{number}") for number in range(count)]
    async with talking(make_config(host={"slots": 1, "prefetch": 4.0}, **gated(gate))) as talk:
        bodies = {body_digest(task_body(task)): task_body(task) for task in tasks}
        await talk.say(*specs(2, tasks[0]), bodies=bodies)  # only the first is in use
        assert (await talk.say(bodies={})).missing == ()
        gate.open()
        await talk.until(2, bodies={})
        last, first = tasks[-1], tasks[1]
        reply = await talk.say(*specs(1, last, 2), *specs(1, first, 3), bodies={})
        assert reply.missing == (body_digest(task_body(first)),)
        assert len(talk.host._bodies) <= IDLE_BODIES + 1


async def test_a_rollout_whose_body_never_came_can_be_cancelled() -> None:
    async with talking() as talk:
        await talk.say(*specs(2), bodies={})
        reply = await talk.say(cancel=[0], bodies={})
        assert (reply.held_count, len(reply.missing)) == (1, 1)
        reply = await talk.say(cancel=[1], bodies={})
        assert (reply.held_count, reply.missing) == (0, ())
        rows = await talk.until(2, bodies={})
        assert [row.status for row in rows] == ["cancelled"] * 2
        assert [row.host_id for row in rows] == ["host-0"] * 2


@pytest.mark.parametrize(
    "body", [b"no json", b"{}", b'{"task_id":"t","prompt":"p","verifier":{"type":"no such"}}', b"\xff\xfe"]
)
async def test_a_body_that_does_not_fit_fails_its_rollouts_and_no_other(body: bytes) -> None:
    digest = body_digest(body)
    async with talking() as talk:
        broken = [spec._replace(digest=digest) for spec in specs(2)]
        await talk.say(*broken, *specs(2, first=2), bodies={digest: body, **talk.bodies})
        rows = await talk.until(4)
    assert [row.status for row in rows] == ["failed", "failed", "completed", "completed"]
    assert [(row.failure_boundary, row.failure_type, row.retryable) for row in rows[:2]] == [
        ("task", "TaskBodyError", False)
    ] * 2


# -- cancellation -----------------------------------------------------------------------------------------------------


async def test_cancelled_in_the_queue_it_never_starts() -> None:
    gate = Gate()
    async with talking(make_config(host={"slots": 1}, **gated(gate))) as talk:
        await talk.say(*specs(2))
        await gate.reached(1)
        await talk.say(cancel=[1])
        gate.open()
        rows = await talk.until(2)
        assert [row.status for row in rows] == ["completed", "cancelled"]
        assert gate.arrived == 1
        assert rows[1].score is None


@pytest.mark.parametrize("phase", ["agent", "verify"])
async def test_cancelled_while_it_runs_it_has_a_cancelled_row_and_frees_its_slot(phase: str) -> None:
    gate = Gate()
    task = task_of() if phase == "agent" else task_of(verifier=gated_verifier(gate))
    config = make_config(host={"slots": 1}, **(gated(gate) if phase == "agent" else {}))
    async with talking(config, task) as talk:
        await talk.say(*specs(1, task))
        await gate.reached(1)
        await talk.say(cancel=[0])
        (row,) = await talk.until(1)
        assert (row.status, row.score, row.failure_boundary) == ("cancelled", None, None)
        assert row.num_turns == (1 if phase == "verify" else 0)
        reply = await talk.say(acked=talk.received)
        assert (reply.free_slots, reply.held_count, reply.running, gate.inside) == (1, 0, 0, 0)


async def test_cancelled_before_its_first_step_it_has_its_row_all_the_same() -> None:
    async with talking() as talk:
        talk.host.nudge()  # so that neither exchange waits: the second follows before any rollout could start
        await talk.say(*specs(3))
        talk.host.nudge()
        await talk.say(cancel=[0, 2])
        rows = await talk.until(3)
        assert [row.status for row in rows] == ["cancelled", "completed", "cancelled"]
        assert (await talk.say(acked=talk.received)).free_slots == 384


async def test_a_key_that_is_granted_and_cancelled_at_once_never_starts() -> None:
    gate = Gate()
    async with talking(make_config(**gated(gate))) as talk:
        await talk.say(*specs(1), cancel=[0])
        (row,) = await talk.until(1)
        assert (row.status, gate.arrived) == ("cancelled", 0)


async def test_cancelling_twice_too_late_or_nothing_changes_nothing() -> None:
    gate = Gate()
    async with talking(make_config(**gated(gate))) as talk:
        await talk.say(*specs(2))
        await gate.reached(2)
        await talk.say(cancel=[0, 99])
        await talk.say(cancel=[0, 99])
        gate.open()
        await talk.until(2)
        await talk.say(cancel=[0, 1])
        assert [(row.key, row.status) for row in await talk.until(2)] == [(0, "cancelled"), (1, "completed")]


class Deaf:
    """Does not let itself be cancelled, as user code with a bare `except:` in a loop does not."""

    def __init__(self, gate: str) -> None:
        self._gate = Gate._all[gate]

    async def run(
        self, task: Task, model: AgentModel, sandbox: Sandbox | None, limits: AgentLimits, on_turn: OnTurn
    ) -> StopReason:
        completion = await model.complete(task.messages())
        on_turn(Turn(0, [completion.message], completion))
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await self._gate.enter()
                return StopReason.FINISHED


def deaf(gate: Gate) -> dict[str, Any]:
    return {"agent": "tests.test_host:Deaf", "agent_options": {"gate": gate.name}}


def test_a_rollout_that_does_not_let_itself_be_ended_is_given_up_after_its_deadline() -> None:
    async def scenario() -> None:
        gate = Gate()
        clock = asyncio.get_running_loop().time
        config = make_config(
            host={"slots": 1, "prefetch": 0.0, "lease_s": 1e6}, limits={"agent_s": 100.0}, **deaf(gate)
        )
        async with talking(config) as talk:
            began = clock()
            await talk.say(*specs(1))
            while not talk.rows:
                await talk.say(wait_s=60.0)
            (row,) = talk.rows
            assert config.limits.deadline_s <= clock() - began <= config.limits.deadline_s + OVERDUE_S + 2 * SWEEP_S
            assert (row.status, row.failure_boundary, row.failure_type) == ("failed", "deadline", "DeadlineError")
            assert (row.retryable, row.score, row.num_turns) == (False, None, 1)
            assert "was in phase agent" in (row.failure_message or "")
            reply = await talk.say(*specs(1, first=1), acked=talk.received)
            assert (reply.held_count, reply.running) == (1, 1)
            gate.open()
            rows = await talk.until(2)
            assert [(row.key, row.status) for row in rows] == [(0, "failed"), (1, "completed")]
            await talk.say(wait_s=30.0)
            assert len(talk.rows) == 2

    in_virtual_time(scenario())


def test_a_cancelled_rollout_that_goes_on_is_given_up_soon() -> None:
    async def scenario() -> None:
        gate = Gate()
        clock = asyncio.get_running_loop().time
        async with talking(make_config(host={"lease_s": 1e6}, **deaf(gate))) as talk:
            await talk.say(*specs(2))
            await gate.reached(2)
            began = clock()
            await talk.say(cancel=[0])
            while not talk.rows:
                await talk.say(wait_s=60.0)
            assert [(row.key, row.status) for row in talk.rows] == [(0, "cancelled")]
            assert clock() - began <= 30.0 + OVERDUE_S + 2 * SWEEP_S
            gate.open()
            assert [row.status for row in await talk.until(2)] == ["cancelled", "completed"]

    in_virtual_time(scenario())


def test_a_host_closes_in_bounded_time_whatever_its_rollouts_do() -> None:
    async def scenario() -> None:
        gate = Gate()
        clock = asyncio.get_running_loop().time
        async with talking(make_config(**deaf(gate))) as talk:
            await talk.say(*specs(3))
            await gate.reached(3)
            began = clock()
            await talk.host.close()
            assert clock() - began <= 21.0
            gate.open()
            await asyncio.sleep(0.1)

    in_virtual_time(scenario())


# -- what is said, and when -------------------------------------------------------------------------------------------


async def test_held_keys_are_told_by_count_and_hash_and_as_a_list_where_asked() -> None:
    gate = Gate()
    async with talking(make_config(**gated(gate))) as talk:
        reply = await talk.say(*specs(3))
        assert (reply.held_count, reply.held_hash) == (3, scramble(0) ^ scramble(1) ^ scramble(2))
        assert reply.held is None
        assert set((await talk.say(want_held=True)).held or ()) == {0, 1, 2}
        gate.open()
        await talk.until(3)
        reply = await talk.say(want_held=True)
        assert (reply.held_count, reply.held_hash, reply.held) == (0, 0, ())


async def test_a_grant_that_is_said_again_is_taken_once() -> None:
    async with talking() as talk:
        request = talk.request(*specs(2))
        await talk.host.exchange(request)
        await talk.host.exchange(request)
        later = replace(talk.request(*specs(1, first=2)), specs=(*request.specs, *specs(1, first=2)))
        await talk.host.exchange(later)
        assert [row.key for row in await talk.until(3)] == [0, 1, 2]
        assert (await talk.say()).stats["started"] == 3


async def test_an_older_request_that_arrives_late_is_answered_and_not_obeyed() -> None:
    async with talking() as talk:
        old = talk.request(cancel=[0], paused=True)
        await talk.say(*specs(1))
        await talk.host.exchange(old)
        assert [row.status for row in await talk.until(1)] == ["completed"]


async def test_another_epochs_driver_is_refused() -> None:
    async with talking() as talk:
        with pytest.raises(HostError, match="epoch 1, not 2"):
            await talk.host.exchange(replace(talk.request(), epoch=2))


async def test_a_closed_host_says_so_and_lets_nobody_wait() -> None:
    async with talking() as talk:
        waiting = asyncio.create_task(talk.host.exchange(talk.request(wait_s=60.0)))
        await asyncio.sleep(0)
        await talk.host.close()
        async with asyncio.timeout(30):
            await waiting
        with pytest.raises(HostError, match="closed"):
            await talk.say()


async def test_closing_ends_every_rollout_in_whatever_phase() -> None:
    gate, verifying = Gate(), Gate()
    judged = task_of(verifier=gated_verifier(verifying))
    config = make_config(scripted(), host={"slots": 4}, **gated(gate))
    async with talking(config, judged) as talk:
        await talk.say(*specs(6, judged))
        await gate.reached(4)
        gate.let(2)
        await verifying.reached(2)
        await gate.reached(6)
        await talk.host.close()
        assert (gate.inside, verifying.inside) == (0, 0)


async def test_a_host_is_refused_that_may_not_open_files_enough() -> None:
    host = Host(make_plan(make_config(host={"slots": 10**9})))
    with pytest.raises(InputError, match="open files"):
        await host.open()


def test_a_finished_row_lingers_for_company_and_no_longer() -> None:
    """Two rows that end 30 ms apart travel together; what ends later travels apart."""

    async def scenario() -> None:
        clock = asyncio.get_running_loop().time
        models = [scripted(name, latency_ms=ms) for name, ms in (("a", 100), ("b", 130), ("c", 500))]
        async with talking(make_config(*models)) as talk:
            task = task_of()
            granted = [spec_of(task, model, key=key) for key, model in enumerate("abc")]
            leases = {name: Lease(-1, -1.0) for name in "abc"}
            began = clock()
            await talk.say(*granted, leases=leases)
            heard: list[tuple[float, int]] = []
            while len(talk.rows) < 3:
                before = len(talk.rows)
                await talk.say(leases=leases, wait_s=10.0, linger_s=0.05)
                if len(talk.rows) > before:
                    heard.append((round(clock() - began, 3), len(talk.rows)))
            assert heard == [(0.15, 2), (0.55, 3)]

    in_virtual_time(scenario())


def test_a_host_with_nothing_to_say_answers_by_the_heartbeat() -> None:
    async def scenario() -> None:
        clock = asyncio.get_running_loop().time
        async with talking() as talk:
            began = clock()
            reply = await talk.say(wait_s=1.5)
            assert clock() - began == pytest.approx(1.5)
            assert reply.batches == ()

    in_virtual_time(scenario())


def test_a_nudge_makes_a_waiting_exchange_return_at_once_and_the_next_one_wait_again() -> None:
    async def scenario() -> None:
        clock = asyncio.get_running_loop().time
        async with talking() as talk:
            began = clock()
            waiting = asyncio.create_task(talk.say(wait_s=60.0))
            asyncio.get_running_loop().call_later(0.25, talk.host.nudge)
            await waiting
            assert clock() - began == pytest.approx(0.25)
            await talk.say(wait_s=2.0)
            assert clock() - began == pytest.approx(2.25)

    in_virtual_time(scenario())


def test_a_nudge_that_comes_before_the_exchange_is_not_lost() -> None:
    async def scenario() -> None:
        clock = asyncio.get_running_loop().time
        async with talking() as talk:
            began = clock()
            talk.host.nudge()
            await talk.say(wait_s=60.0)
            assert clock() == began

    in_virtual_time(scenario())


def test_a_full_batch_does_not_linger_and_none_is_larger() -> None:
    async def scenario() -> None:
        clock = asyncio.get_running_loop().time
        async with talking(make_config(scripted(latency_ms=100), host={"max_batch_rows": 4})) as talk:
            began = clock()
            await talk.say(*specs(10))
            await talk.say(wait_s=60.0, linger_s=30.0)
            assert clock() - began == pytest.approx(0.1)
            await talk.until(10)
            assert max(talk.sizes) == 4

    in_virtual_time(scenario())


async def test_a_reply_holds_no_more_than_a_batch_of_bytes_and_the_rest_comes_at_once(tmp_path: Path) -> None:
    """Also of rows so big that each is a batch of its own."""
    config = make_config(agent=WRITER, host={"max_batch_bytes": 1_000_000})
    big, small = task_of(prompt="400000"), task_of(prompt="100000", task_id="small")
    async with talking(config, big) as talk:
        talk.bodies[body_digest(task_body(small))] = task_body(small)
        await talk.say(*specs(8, big), *specs(16, small, 8))
        async with asyncio.timeout(60):
            while len(talk.rows) < 24:
                reply = await talk.say(wait_s=600.0, linger_s=0.05, want_held=True)
                assert sum(batch.nbytes for _, batch in reply.batches) < 2_500_000
                talk.host._outbox.acknowledge(talk.received)
                # What has no row yet is held, or the driver would think it lost.
                left = set(range(24)) - {row.key for row in talk.rows}
                assert (set(reply.held or ()), reply.held_count) == (left, len(left))
                assert reply.held_hash == functools.reduce(operator.xor, map(scramble, left), 0)
                assert reply.running == len(left)
        assert sorted(row.key for row in talk.rows) == list(range(24))
        assert {len(row.turns[0].messages[0]["content"]) for row in talk.rows} == {400_000, 100_000}


def test_a_straggler_holds_nobody_back() -> None:
    async def scenario() -> None:
        clock = asyncio.get_running_loop().time
        models = [scripted("fast"), scripted("slow", latency_ms=3_600_000)]
        async with talking(make_config(*models, limits={"agent_s": 10_000})) as talk:
            task, leases = task_of(), {"fast": Lease(-1, -1.0), "slow": Lease(-1, -1.0)}
            began = clock()
            await talk.say(spec_of(task, "slow", key=0), spec_of(task, "fast", key=1), leases=leases)
            while not talk.rows:
                await talk.say(leases=leases, wait_s=60.0, linger_s=0.05)
            assert [row.key for row in talk.rows] == [1]
            assert clock() - began < 0.1

    in_virtual_time(scenario())


def test_a_freed_slot_is_news_too() -> None:
    """A long verification must not keep the driver from sending more."""

    async def scenario() -> None:
        clock = asyncio.get_running_loop().time
        gate = Gate()
        task = task_of(verifier=gated_verifier(gate))
        async with talking(make_config(scripted(latency_ms=100), host={"slots": 1, "prefetch": 0.0}), task) as talk:
            began = clock()
            assert (await talk.say(*specs(1, task))).free_slots == 0
            reply = await talk.say(wait_s=60.0, linger_s=0.05)
            assert reply.free_slots == 1
            assert clock() - began == pytest.approx(0.15)

    in_virtual_time(scenario())


def test_a_host_that_its_driver_has_forgotten_ends_by_itself() -> None:
    async def scenario() -> None:
        clock = asyncio.get_running_loop().time
        gate = Gate()
        expired: list[float] = []
        plan = make_plan(make_config(host={"lease_s": 30.0}, **gated(gate)))
        host = Host(plan, on_expired=lambda: expired.append(clock()))
        await host.open()
        talk = Talk(host)
        talk.bodies = {body_digest(task_body(task_of())): task_body(task_of())}
        began = clock()
        await talk.say(*specs(2))
        await gate.reached(2)
        for _ in range(4):
            await talk.say(wait_s=20.0)  # heard from in time, again and again
        assert (expired, clock() - began) == ([], 80.0)
        await asyncio.sleep(31.0)
        assert expired == [began + 110.0]
        assert gate.inside == 0
        with pytest.raises(HostError):
            await talk.say()

    in_virtual_time(scenario())


# -- rows -------------------------------------------------------------------------------------------------------------


class Writer:
    """Records a turn of whatever the task's prompt says: a size, or something that no table holds."""

    async def run(
        self, task: Task, model: AgentModel, sandbox: Sandbox | None, limits: AgentLimits, on_turn: OnTurn
    ) -> StopReason:
        completion = await model.complete(task.messages())
        what = str(task.prompt)
        odd: dict[str, Any] = {
            "surrogate": "\ud83d",
            "bytes": {"role": "tool", "content": b"raw"},
            "circle": {"role": "tool", "content": "x", "extra": object()},
            "no message": 7,
        }
        content: Any = odd.get(what) or "x" * int(what)
        message = content if isinstance(content, dict | int) else {"role": "tool", "content": content}
        on_turn(Turn(0, [message, completion.message], completion))
        return StopReason.FINISHED


WRITER = "tests.test_host:Writer"


async def run_one(task: Task, path: Path | None, **fields: Any) -> tuple[list[RolloutRecord], Path | None]:
    config = make_config(agent=WRITER, **fields)
    run_dir = None
    run_id = "run"
    if path is not None:
        run = create_run(path / "run", config)
        run_dir, run_id = str(run.path), run.run_id
    async with talking(config, task, run_dir=run_dir, run_id=run_id) as talk:
        await talk.say(*specs(1, task))
        return await talk.until(1), Path(run_dir) if run_dir else None


async def test_big_turns_go_to_the_hosts_own_trace_file_where_it_sees_the_run(tmp_path: Path) -> None:
    (row,), run_dir = await run_one(task_of(prompt="100000"), tmp_path)
    assert run_dir is not None
    assert row.turns == []
    assert row.num_turns == 1
    assert row.trace_file is not None
    assert row.trace_offset is not None
    assert row.trace_sha256 is not None
    turns = read_trace(run_dir, row.trace_file, row.trace_offset, row.trace_sha256)
    assert [len(turn.messages[0]["content"]) for turn in turns] == [100_000]


async def test_small_turns_travel_inline(tmp_path: Path) -> None:
    (row,), _ = await run_one(task_of(prompt="1000"), tmp_path)
    assert row.trace_file is None
    assert [len(turn.messages[0]["content"]) for turn in row.turns] == [1000]


async def test_big_turns_travel_inline_where_the_host_does_not_see_the_run() -> None:
    (row,), _ = await run_one(task_of(prompt="100000"), None)
    assert row.trace_file is None
    assert len(row.turns[0].messages[0]["content"]) == 100_000


async def test_big_turns_travel_inline_where_the_disk_refuses_them(tmp_path: Path) -> None:
    config = make_config(agent=WRITER)
    run = create_run(tmp_path / "run", config)
    task = task_of(prompt="100000")
    run.layout.traces.rmdir()
    run.layout.traces.write_text("in the way")
    async with talking(config, task, run_dir=str(run.path), run_id=run.run_id) as talk:
        await talk.say(*specs(1, task))
        (row,) = await talk.until(1)
    assert row.trace_file is None
    assert len(row.turns[0].messages[0]["content"]) == 100_000


@pytest.mark.parametrize("inline_trace_bytes", [1, 65536])
@pytest.mark.parametrize("what", ["surrogate", "bytes", "circle", "no message"])
async def test_a_rollout_whose_turns_no_table_holds_fails_alone(
    what: str, inline_trace_bytes: int, tmp_path: Path
) -> None:
    odd, plain = task_of(prompt=what), task_of(prompt="10", task_id="plain")
    config = make_config(agent=WRITER, store={"inline_trace_bytes": inline_trace_bytes})
    run = create_run(tmp_path / "run", config)
    async with talking(config, odd, run_dir=str(run.path), run_id=run.run_id) as talk:
        talk.bodies[body_digest(task_body(plain))] = task_body(plain)
        await talk.say(spec_of(plain, key=0), spec_of(odd, key=1), spec_of(plain, key=2))
        rows = await talk.until(3)
    assert [row.status for row in rows] == ["completed", "failed", "completed"]
    assert (rows[1].failure_boundary, rows[1].retryable, rows[1].score) == ("agent", False, None)
    assert "no table holds its turns" in (rows[1].failure_message or "")


async def test_a_batch_is_in_the_schema_of_the_log() -> None:
    async with talking() as talk:
        await talk.say(*specs(1))
        reply = await talk.host.exchange(talk.request(wait_s=1.0))
    assert all(isinstance(batch, pa.RecordBatch) for _, batch in reply.batches)
