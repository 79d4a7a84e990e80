"""The driver over hosts that are lost, fall silent or forget, models that break, budgets, cancellation and draining.

One test: .venv/bin/pytest tests/test_driver.py -k lost
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from itertools import islice

import pyarrow as pa
import pytest

from rollout_engine.breaker import BreakerState
from rollout_engine.clusters import HostHandle, LocalHandle, MakePlan
from rollout_engine.config import ModelSpec, RunConfig
from rollout_engine.driver import Driver
from rollout_engine.errors import HostLost, InputError, RunError
from rollout_engine.exchange import Reply, Request, scramble
from rollout_engine.host import Host
from rollout_engine.hostplan import HostPlan
from rollout_engine.models.server import ModelServer
from rollout_engine.placement import Node
from rollout_engine.schema import batch_to_records
from rollout_engine.specs import Task
from rollout_engine.spending import Used
from rollout_engine.stream import Stream
from rollout_engine.submission import Submission
from rollout_engine.types import RolloutRecord
from tests.helpers import MemoryStore, make_config, make_tasks, scripted
from tests.rig import Gate, gated, gated_verifier, served, task_of


class ReplyLost(OSError):
    """The host heard the request, and its answer was lost."""


class Handle(LocalHandle):
    """A real host whose exchange can be made to fail."""

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self.host = host
        self.on_kill: Callable[[], None] = lambda: None
        self.faults: list[BaseException] = []
        """Raised one after the other, instead of asking the host; a HostLost stays."""
        self.exchanges = 0

    async def exchange(self, request: Request) -> Reply:
        self.exchanges += 1
        await asyncio.sleep(0)
        if self.faults:
            fault = self.faults[0] if isinstance(self.faults[0], HostLost) else self.faults.pop(0)
            if isinstance(fault, ReplyLost):
                await super().exchange(request)
            raise fault
        return await super().exchange(request)

    async def die(self) -> None:
        """As if its process was killed: what it had done and not yet said is gone."""
        self.faults = [HostLost("killed by the test", process_gone=True)]
        await self.host.close()

    def kill(self) -> None:
        """It may have been silent only."""
        self.faults = [HostLost("killed by the driver", process_gone=True)]
        super().kill()
        self.on_kill()


class Hosts:
    """A cluster in this process: a node for each host, which is gone with it; so many others join in their place."""

    def __init__(self, count: int = 2, replacements: int = 0) -> None:
        self._count, self._replacements = count, replacements
        self.handles: list[Handle] = []
        self.there = [Node(f"node-{number}") for number in range(count)]
        self._joined = count

    async def open(self, make_plan: MakePlan, keys: Mapping[str, str]) -> None:
        self._make_plan = make_plan

    async def nodes(self) -> list[Node]:
        return list(self.there)

    async def start(self, node_id: str) -> HostHandle:
        host = Host(self._make_plan(f"host-{len(self.handles)}", node_id))
        self.handles.append(handle := Handle(host))
        handle.on_kill = lambda: self.leave(node_id)
        await host.open()
        return handle

    def leave(self, node_id: str) -> None:
        self.there = [node for node in self.there if node.node_id != node_id]
        if self._replacements:
            self._replacements -= 1
            self.join()

    def join(self) -> None:
        self.there.append(Node(f"node-{self._joined}"))
        self._joined += 1

    async def close(self) -> None:
        return None


class ListFeed:
    """Tasks from a list, some at a time, and how many were taken."""

    def __init__(self, tasks: Iterable[Task], chunk: int = 8) -> None:
        self._tasks, self._chunk = iter(tasks), chunk
        self.taken = 0

    async def take(self) -> list[Task]:
        await asyncio.sleep(0)
        found = list(islice(self._tasks, self._chunk))
        self.taken += len(found)
        return found

    async def close(self) -> None:
        return None


class Drive:
    """A driver on this loop, its store in memory, and what was submitted to it."""

    def __init__(self, config: RunConfig, hosts: Hosts, store: MemoryStore) -> None:
        self.hosts, self.store = hosts, store
        self.driver = Driver(config, store, hosts, {}, self._plan, epoch=1)
        self._config = config

    def _plan(self, host_id: str, node_id: str) -> HostPlan:
        return HostPlan("run", 1, host_id, node_id, self._config)

    def submit(self, tasks: Iterable[Task], round: int = 0, *, read: bool = False) -> Submission:
        stream: Stream[pa.RecordBatch] | None = Stream() if read else None
        submission = Submission(round, ListFeed(tasks), stream)
        self.driver.submit(submission)
        return submission

    async def done(self, submission: Submission) -> list[RolloutRecord]:
        """All rows, once the submission is done."""
        async with asyncio.timeout(120):
            await submission.done.wait()
        if submission.error is not None:
            raise submission.error
        return self.rows

    async def run(self, tasks: Iterable[Task], round: int = 0) -> list[RolloutRecord]:
        return await self.done(self.submit(tasks, round))

    @property
    def rows(self) -> list[RolloutRecord]:
        return [record for batch in self.store.batches for record in batch_to_records(batch)]

    @property
    def quiet(self) -> bool:
        """Whether no host holds anything and all rows are committed."""
        return self.driver.board.scheduler.held_count == 0 and self.driver.board.commits.waiting_bytes == 0

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not holds():
                await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def driving(
    config: RunConfig | None = None, *, hosts: Hosts | None = None, store: MemoryStore | None = None
) -> AsyncIterator[Drive]:
    """A driver that is closed at the end, and leaves no task behind."""
    before = asyncio.all_tasks()
    drive = Drive(config or make_config(), hosts or Hosts(1), store or MemoryStore())
    await drive.driver.open()
    try:
        yield drive
    finally:
        await drive.driver.close()
        assert asyncio.all_tasks() == before


def assert_each_key_once(rows: list[RolloutRecord], keys: int) -> None:
    assert Counter(row.key for row in rows) == Counter(dict.fromkeys(range(keys), 1))


async def read_to_the_end(stream: Stream[pa.RecordBatch]) -> tuple[int, BaseException | None]:
    """(rows, what was raised after them)."""
    seen = 0
    try:
        async for batch in stream:
            seen += batch.num_rows
    except Exception as error:
        return seen, error
    return seen, None


FAST_RETRY = {"backoff_s": 0.0, "breaker_failures": 0}
SLOWER_THAN_COMMITS = {"latency_ms": 100}
"""Rows count once they are committed: how many more are begun until then says how busy the machine is."""


# -- the main path ----------------------------------------------------------------------------------------------------


async def test_every_attempt_of_every_model_has_one_row_with_its_own_identity() -> None:
    config = make_config(scripted("a"), scripted("b"), k=3)
    async with driving(config, hosts=Hosts(3)) as drive:
        rows = await drive.run(make_tasks(7))
    assert_each_key_once(rows, 7 * 2 * 3)
    space = drive.driver.space
    for row in rows:
        assert (row.model, row.attempt) == ("ab"[space.model(row.key)], space.attempt(row.key))
        assert (row.task_id, row.score, row.retries, row.generation) == (f"t{space.slot(row.key)}", 1.0, 0, 0)


async def test_the_same_task_may_come_again_in_another_round() -> None:
    async with driving(make_config(k=2)) as drive:
        for round in range(3):
            await drive.run(make_tasks(2), round)
        assert Counter((row.round, row.task_id) for row in drive.rows) == Counter(
            {(round, f"t{task}"): 2 for round in range(3) for task in range(2)}
        )


@pytest.mark.parametrize("finished", [False, True])
async def test_the_same_task_twice_in_a_round_is_refused_also_once_the_first_has_ended(finished: bool) -> None:
    gate = Gate()
    async with driving(make_config(**gated(gate))) as drive:
        first = drive.submit(make_tasks(2))
        if finished:
            gate.open()
            await drive.done(first)
        second = drive.submit(make_tasks(2))
        with pytest.raises(InputError, match="twice in round 0"):
            await drive.done(second)
        gate.open()
        await drive.done(first)
        assert_each_key_once(drive.rows, 2)


async def test_two_submissions_at_once_get_their_own_rows() -> None:
    async with driving(make_config(k=2), hosts=Hosts(2)) as drive:
        one = drive.submit(make_tasks(5), 0, read=True)
        two = drive.submit(make_tasks(9), 1, read=True)
        for submission, count in ((one, 5), (two, 9)):
            assert submission.stream is not None
            batches = [batch async for batch in submission.stream]
            rows = [record for batch in batches for record in batch_to_records(batch)]
            assert {row.round for row in rows} == {submission.round}
            assert len(rows) == count * 2


async def test_a_submission_without_tasks_is_done_at_once() -> None:
    async with driving() as drive:
        assert await drive.run([]) == []


async def test_an_endless_source_is_planned_no_further_than_plan_ahead() -> None:
    def endless() -> Iterable[Task]:
        number = 0
        while True:
            yield task_of(task_id=f"t{number}")
            number += 1

    gate = Gate()
    config = make_config(k=5, plan_ahead=100, host={"slots": 4, "prefetch": 0.5}, **gated(gate))
    async with driving(config) as drive:
        submission = drive.submit(endless())
        await gate.reached(4)
        await drive.until(lambda: drive.driver.board.scheduler.pending >= 100)
        await drive.until(lambda: drive.driver.board.scheduler.held_count == 6)
        await drive.until(lambda: drive.driver.board.scheduler.pending >= 100)
        await asyncio.sleep(0.05)
        assert 100 <= drive.driver.board.scheduler.pending < 105
        assert drive.driver.board.scheduler.held_count == 6
        gate.let(4)
        await gate.reached(8)
        await drive.until(lambda: drive.driver.board.scheduler.pending >= 100)
        drive.driver.leave(submission)
        await drive.done(submission)
        assert Counter(row.status for row in drive.rows)["cancelled"] >= 100


# -- consumers --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_nothing_is_granted_while_a_consumer_is_behind_and_it_goes_on_once_it_reads() -> None:
    config = make_config(
        scripted(**SLOWER_THAN_COMMITS),
        host={"slots": 4, "prefetch": 0.0},
        store={"max_unread_rows": 10},
        plan_ahead=20,
    )
    async with driving(config) as drive:
        submission = drive.submit(make_tasks(40), read=True)
        stream = submission.stream
        assert stream is not None
        await drive.until(lambda: stream.unread_rows > 10)
        handle = drive.hosts.handles[0]
        await drive.until(lambda: drive.quiet)
        before, heartbeat = stream.unread_rows, handle.exchanges
        await drive.until(lambda: handle.exchanges > heartbeat + 1)
        assert stream.unread_rows == before <= 10 + 2 * 4 + 4
        seen = 0
        async for batch in stream:
            seen += batch.num_rows
        assert seen == 40


async def test_unread_bytes_bound_a_consumer_too() -> None:
    tasks = [task_of(task_id=f"t{number}", prompt="x" * 50_000) for number in range(16)]
    config = make_config(host={"slots": 4, "prefetch": 0.0}, store={"max_unread_bytes": 400_000})
    async with driving(config) as drive:
        stream = drive.submit(tasks, read=True).stream
        assert stream is not None
        await drive.until(lambda: stream.unread_bytes > 400_000)
        await drive.until(lambda: drive.quiet)
        assert stream.unread_bytes < 2_000_000
        assert sum([batch.num_rows async for batch in stream]) == 16


async def test_one_who_leaves_cancels_what_has_not_ended_and_holds_nobody_up() -> None:
    gate = Gate()
    config = make_config(host={"slots": 4}, store={"max_unread_rows": 3}, **gated(gate))
    async with driving(config) as drive:
        left = drive.submit(make_tasks(30), 0, read=True)
        stream = left.stream
        assert stream is not None
        await gate.reached(4)
        gate.let(4)
        await drive.until(lambda: stream.unread_rows >= 4)
        drive.driver.leave(left)
        gate.open()
        await drive.done(left)
        assert Counter(row.status for row in drive.rows).keys() == {"completed", "cancelled"}
        assert_each_key_once(drive.rows, len(drive.rows))
        rows = await drive.run(make_tasks(5), 1)
        assert sum(row.round == 1 and row.status == "completed" for row in rows) == 5


async def test_one_who_leaves_with_rows_unread_after_the_end_holds_nobody_up() -> None:
    async with driving(make_config(store={"max_unread_rows": 2})) as drive:
        left = drive.submit(make_tasks(8), 0, read=True)
        stream = left.stream
        assert stream is not None
        await drive.until(lambda: stream.unread_rows > 2)
        drive.driver.leave(left)
        await drive.done(left)
        assert len(await drive.run(make_tasks(5), 1)) >= 7


async def test_tasks_that_arrive_after_their_reader_has_left_are_not_planned() -> None:
    arrive = asyncio.Event()

    class Late(ListFeed):
        async def take(self) -> list[Task]:
            await arrive.wait()
            return await super().take()

    async with driving() as drive:
        submission = Submission(0, Late(make_tasks(5)), Stream())
        drive.driver.submit(submission)
        await asyncio.sleep(0)
        drive.driver.leave(submission)
        arrive.set()
        await drive.done(submission)
        await asyncio.sleep(0.01)
        assert drive.rows == []
        assert drive.driver.board.planner.planned == 0


# -- cancellation by key ----------------------------------------------------------------------------------------------


async def test_rollouts_are_cancelled_by_key_wherever_they_are() -> None:
    running, verifying = Gate(), Gate()
    tasks = [task_of(task_id=f"t{number}", verifier=gated_verifier(verifying)) for number in range(6)]
    config = make_config(host={"slots": 1, "prefetch": 1.0}, **gated(running))
    async with driving(config) as drive:
        submission = drive.submit(tasks)
        await running.reached(1)
        running.let(1)
        await verifying.reached(1)
        await running.reached(2)
        await drive.until(lambda: drive.driver.board.scheduler.held_count >= 3)
        drive.driver.cancel(range(5))  # one verifies, one is with its agent, one in the host's queue, others planned
        await drive.until(lambda: drive.driver.progress.cancelled == 5)
        running.open()
        verifying.open()
        rows = await drive.done(submission)
    assert_each_key_once(rows, 6)
    assert {row.key: row.status for row in rows} == {**dict.fromkeys(range(5), "cancelled"), 5: "completed"}
    assert all(row.score is None for row in rows if row.key < 5)


async def test_a_rollout_that_waits_for_its_next_try_can_be_cancelled() -> None:
    config = make_config({**scripted(p_500=1.0), "call_retries": 0}, retry={"backoff_s": 60.0})
    async with driving(config) as drive:
        submission = drive.submit(make_tasks(1))
        await drive.until(lambda: drive.driver.progress.retries == 1)
        drive.driver.cancel([0])
        (row,) = await drive.done(submission)
    assert (row.status, row.retries) == ("cancelled", 1)


# -- hosts ------------------------------------------------------------------------------------------------------------


async def test_a_lost_hosts_rollouts_are_run_by_the_others() -> None:
    gate = Gate()
    config = make_config(k=4, host={"slots": 8, "prefetch": 0.5}, **gated(gate))
    async with driving(config, hosts=Hosts(2)) as drive:
        submission = drive.submit(make_tasks(6))
        await gate.reached(16)
        await drive.hosts.handles[0].die()
        await drive.until(lambda: drive.driver.progress.hosts == 1)
        gate.open()
        rows = await drive.done(submission)
        assert any("host-0 is lost: killed by the test" in note for note in drive.driver.progress.notes)
    assert_each_key_once(rows, 24)
    assert {row.status for row in rows} == {"completed"}
    assert 8 <= sum(row.retries == 1 for row in rows) <= 12
    assert {row.host_id for row in rows if row.retries} == {"host-1"}


async def test_a_lost_host_is_replaced() -> None:
    gate = Gate()
    async with driving(make_config(**gated(gate)), hosts=Hosts(1, replacements=1)) as drive:
        submission = drive.submit(make_tasks(5))
        await gate.reached(5)
        await drive.hosts.handles[0].die()
        gate.open()
        rows = await drive.done(submission)
    assert_each_key_once(rows, 5)
    assert {row.host_id for row in rows} == {"host-1"}


async def test_the_last_host_lost_for_good_ends_the_run_with_a_clear_error(no_patience: None) -> None:
    gate = Gate()
    async with driving(make_config(**gated(gate))) as drive:
        submission = drive.submit(make_tasks(5))
        await gate.reached(5)
        await drive.hosts.handles[0].die()
        with pytest.raises(RunError, match=r"no host is left \(the last one was host-0: killed by the test\); resume"):
            await drive.done(submission)
        with pytest.raises(RunError, match="no host is left"):
            await drive.run(make_tasks(1), 1)


async def test_a_rollout_whose_host_is_lost_again_and_again_is_given_up() -> None:
    gate = Gate()
    config = make_config(retry={"max_host_losses": 2}, **gated(gate))
    async with driving(config, hosts=Hosts(1, replacements=9)) as drive:
        submission = drive.submit(make_tasks(3))
        for started in (3, 6, 7, 8, 9):  # the last time each runs alone, in case it is to blame
            await gate.reached(started)
            await drive.hosts.handles[-1].die()
        rows = await drive.done(submission)
    assert_each_key_once(rows, 3)
    found = {(row.status, row.failure_boundary, row.failure_type, row.retryable, row.retries) for row in rows}
    assert found == {("failed", "host", "HostLost", True, 2)}


async def test_rows_that_a_lost_host_had_committed_are_not_run_again() -> None:
    gate = Gate()
    async with driving(make_config(**gated(gate)), hosts=Hosts(1, replacements=1)) as drive:
        submission = drive.submit(make_tasks(6))
        await gate.reached(6)
        gate.let(3)
        await drive.until(lambda: drive.driver.progress.done == 3)
        await drive.hosts.handles[0].die()
        gate.open()
        rows = await drive.done(submission)
    assert_each_key_once(rows, 6)
    assert Counter(row.retries for row in rows) == {0: 3, 1: 3}


async def test_a_host_that_fails_for_a_while_is_asked_again_and_loses_nothing() -> None:
    async with driving(make_config(k=4), hosts=Hosts(2)) as drive:
        for handle in drive.hosts.handles:
            handle.faults = [OSError("network"), TimeoutError(), ValueError("odd")]
        rows = await drive.run(make_tasks(10))
        assert drive.driver.progress.hosts == 2
    assert_each_key_once(rows, 40)
    assert {row.retries for row in rows} == {0}


@pytest.mark.slow
async def test_a_host_that_stays_silent_for_longer_than_its_lease_is_lost() -> None:
    gate = Gate()
    config = make_config(host={"lease_s": 3.0}, **gated(gate))
    async with driving(config, hosts=Hosts(2)) as drive:
        submission = drive.submit(make_tasks(4))
        await gate.reached(4)
        drive.hosts.handles[0].faults = [OSError("no route to host")] * 1000
        await drive.until(lambda: drive.driver.progress.hosts == 1)
        gate.open()
        rows = await drive.done(submission)
        assert any("silent for" in note and "no route" in note for note in drive.driver.progress.notes)
    assert_each_key_once(rows, 4)
    assert {row.host_id for row in rows} == {"host-1"}


async def test_keys_that_a_host_has_forgotten_are_planned_again() -> None:
    gate = Gate()
    async with driving(make_config(host={"lease_s": 8.0}, **gated(gate))) as drive:
        submission = drive.submit(make_tasks(4))
        await gate.reached(4)
        host = drive.hosts.handles[0].host
        for key in (1, 2):  # as if its memory was damaged
            entry = host._held.entries.pop(key)
            host._held.hash ^= scramble(key)
            assert entry.task is not None
            entry.task.cancel()
        host.nudge()
        await gate.reached(6)
        gate.open()
        rows = await drive.done(submission)
    assert_each_key_once(rows, 4)
    assert {row.key for row in rows if row.retries == 1} == {1, 2}


class Broken(Hosts):
    """Its nodes stay where their hosts die, and break where they should have another one, or take their time."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.slow: dict[str, asyncio.Event] = {}

    async def start(self, node_id: str) -> HostHandle:
        if len(self.handles) >= self._count:
            if node_id not in self.slow:
                raise OSError("the cluster is gone")
            await self.slow[node_id].wait()
        return await super().start(node_id)

    def leave(self, node_id: str) -> None:
        return None


@pytest.fixture
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes minutes elsewhere takes no time."""
    monkeypatch.setattr("rollout_engine.placement.BACKOFF_S", 0.0)
    monkeypatch.setattr("rollout_engine.fleet.NO_HOST_S", 0.0)
    monkeypatch.setattr("rollout_engine.fleet.LOOK_S", 0.02)


@pytest.mark.parametrize("count", [1, 2])
async def test_a_cluster_that_breaks_ends_the_run_once_no_host_is_left(count: int, no_patience: None) -> None:
    gate = Gate()
    async with driving(make_config(host={"slots": 2}, **gated(gate)), hosts=Broken(count)) as drive:
        submission = drive.submit(make_tasks(6))
        await gate.reached(2 * count)
        await drive.hosts.handles[0].die()
        if count == 1:
            with pytest.raises(RunError, match=r"no host is left .*: the cluster is gone"):
                await drive.done(submission)
            assert any("node-0 gets no further host" in note for note in drive.driver.progress.notes)
        else:
            gate.open()
            assert_each_key_once(await drive.done(submission), 6)


async def test_a_run_waits_for_the_host_that_is_being_replaced_although_another_cannot_be(no_patience: None) -> None:
    gate, hosts = Gate(), Broken(2)
    hosts.slow["node-0"] = asyncio.Event()
    async with driving(make_config(**gated(gate)), hosts=hosts) as drive:
        submission = drive.submit(make_tasks(2))
        await gate.reached(2)
        for handle in list(hosts.handles):
            await handle.die()
        await drive.until(lambda: any("node-1 gets no further host" in note for note in drive.driver.progress.notes))
        hosts.slow["node-0"].set()
        gate.open()
        assert_each_key_once(await drive.done(submission), 2)


async def test_a_host_that_comes_up_as_the_run_closes_is_stopped_too() -> None:
    gate, hosts = Gate(), Broken(1)
    hosts.slow["node-0"] = asyncio.Event()
    async with driving(make_config(**gated(gate)), hosts=hosts) as drive:
        drive.submit(make_tasks(2))
        await gate.reached(2)
        await hosts.handles[0].die()
        await drive.until(lambda: drive.driver.progress.hosts == 0)
        hosts.slow["node-0"].set()
        await drive.until(lambda: len(hosts.handles) == 2)
    assert hosts.handles[1].host._closing


# -- budgets ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_calls_at_a_server_never_exceed_the_limit_also_while_a_host_is_lost() -> None:
    options = {"skill": 1.0, "latency_ms": 15}
    solutions = {f"t{number}": str(number) for number in range(40)}
    async with ModelServer({"m": ModelSpec(name="m", kind="scripted", options=options)}, solutions=solutions) as server:
        model = served(server.url, seed_header=True, max_concurrency=5)
        config = make_config(model, k=2, host={"lease_s": 3.0})
        async with driving(config, hosts=Hosts(3, replacements=1)) as drive:
            submission = drive.submit(make_tasks(40))
            await drive.until(lambda: drive.driver.progress.done >= 10)
            drive.hosts.handles[0].faults = [HostLost("node gone, process unknown")]
            rows = await drive.done(submission)
            await drive.hosts.handles[0].host.close()
        assert_each_key_once(rows, 80)
        assert server.stats()["max_in_flight"] <= 5
        assert {row.score for row in rows} == {1.0}


async def test_a_request_rate_is_kept_over_all_hosts() -> None:
    config = make_config({**scripted(), "requests_per_minute": 1200.0})
    async with driving(config, hosts=Hosts(2)) as drive:
        began = time.monotonic()
        rows = await drive.run(make_tasks(12))
        took = time.monotonic() - began
    assert_each_key_once(rows, 12)
    assert took >= (12 - 1) / 20


PRICED = {"price_completion": 1e6}
"""A dollar a token."""


async def test_a_spent_budget_ends_the_run_cleanly_with_every_rollout_accounted_for() -> None:
    config = make_config(
        {**scripted(tokens=1, **SLOWER_THAN_COMMITS), **PRICED},
        k=2,
        max_cost_usd=5.0,
        host={"slots": 2, "prefetch": 0.0},
        plan_ahead=10,
    )
    async with driving(config) as drive:
        rows = await drive.run(make_tasks(40))
        progress = drive.driver.progress
        assert any("budget of $5 is spent" in note for note in progress.notes)
        assert progress.cost_usd == progress.valid
        assert (progress.done, progress.cancelled) == (80, 80 - progress.valid)
    assert_each_key_once(rows, 80)
    statuses = Counter(row.status for row in rows)
    assert statuses.keys() == {"completed", "cancelled"}
    assert 5 <= statuses["completed"] <= 5 + 3 * 2
    spent = next(row for row in rows if row.status == "cancelled")
    assert (spent.failure_boundary, spent.failure_type, spent.score) == ("cancel", "BudgetSpent", None)


@pytest.mark.parametrize(("cost", "limit"), [(100.0, 5.0), (0.0, 0.0)])
async def test_what_earlier_epochs_cost_counts(cost: float, limit: float) -> None:
    """A resumed run that has spent its budget starts nothing; neither does one that has none."""
    store = MemoryStore()
    store.used = Used(cost_usd=cost)
    config = make_config({**scripted(tokens=1), **PRICED}, max_cost_usd=limit, host={"slots": 1, "prefetch": 0.0})
    async with driving(config, store=store) as drive:
        rows = await drive.run(make_tasks(10))
    assert Counter(row.status for row in rows) == {"cancelled": 10}


async def test_once_the_budget_is_spent_nothing_is_tried_again() -> None:
    """Neither after a failure, nor after the loss of a host."""
    gate = Gate()
    models = [{**scripted("paid", tokens=1), **PRICED}, {**scripted("broken", p_500=1.0), "call_retries": 0}]
    config = make_config(*models, max_cost_usd=1.0, retry=FAST_RETRY, host={"slots": 4, "prefetch": 0.0}, **gated(gate))
    async with driving(config, hosts=Hosts(2)) as drive:
        submission = drive.submit(make_tasks(4))
        await gate.reached(8)
        (paid,) = [handle for handle in drive.hosts.handles if 0 in handle.host._held.entries]
        gate.let(1)
        await drive.until(lambda: drive.driver.board.spent)
        lost = next(handle for handle in drive.hosts.handles if handle is not paid)
        await lost.die()
        gate.open()
        rows = await drive.done(submission)
    assert_each_key_once(rows, 8)
    assert gate.arrived == 8
    assert {row.failure_type for row in rows if row.status == "cancelled"} == {"BudgetSpent"}


# -- models that break ------------------------------------------------------------------------------------------------

FAULTS = {
    "p_500": "ModelServerError",
    "p_cut": "ModelConnectionError",
    "p_hang": "ModelTimeout",
    "p_garbage": "ModelBadResponse",
    "p_429": "ModelRateLimited",
}


@pytest.mark.parametrize("fault", FAULTS)
async def test_a_model_that_only_breaks_is_given_up_and_the_other_untouched(fault: str) -> None:
    limit = {"call_timeout_s": 0.02} if fault == "p_hang" else {}  # which a busy machine takes for a call of the others
    bad = {**scripted("bad", retry_after_s=0.0, **{fault: 1.0}), "call_retries": 0, **limit}
    rules = {"max_retries": 1, "backoff_s": 0.0, "breaker_failures": 6, "breaker_pause_s": 0.02, "breaker_trips": 2}
    config = make_config(scripted("good"), bad, k=2, retry=rules, host={"slots": 8, "prefetch": 0.0})
    async with driving(config) as drive:
        rows = await drive.run(make_tasks(30))
        notes = drive.driver.progress.notes
    assert_each_key_once(rows, 120)
    by_model = {name: [row for row in rows if row.model == name] for name in ("good", "bad")}
    assert {(row.status, row.score, row.retries) for row in by_model["good"]} == {("completed", 1.0, 0)}
    kinds = Counter(row.failure_type for row in by_model["bad"])
    assert kinds.keys() == {FAULTS[fault], "CircuitOpen"}
    assert kinds["CircuitOpen"] > 30
    assert {(row.status, row.failure_boundary, row.score) for row in by_model["bad"]} == {("failed", "model", None)}
    assert any(f"model bad is paused (pause 1): it keeps failing with model:{FAULTS[fault]}" in note for note in notes)
    assert any("model bad was given up after 2 pauses" in note for note in notes)


async def test_a_model_that_recovers_goes_on_after_its_pause() -> None:
    """Each rollout's first two tries fail: enough to open the breaker, and then no more."""
    shaky = {**scripted(fail_first=2), "call_retries": 0}
    rules = {"max_retries": 5, "backoff_s": 0.0, "breaker_failures": 4, "breaker_pause_s": 0.01, "breaker_trips": 50}
    async with driving(make_config(shaky, retry=rules, host={"slots": 4, "prefetch": 0.0})) as drive:
        rows = await drive.run(make_tasks(8))
        assert any("is paused" in note for note in drive.driver.progress.notes)
    assert_each_key_once(rows, 8)
    assert {(row.status, row.score) for row in rows} == {("completed", 1.0)}
    assert {row.retries for row in rows} == {2}


async def test_a_host_lost_after_its_model_was_given_up_leaves_no_rollout_without_a_row() -> None:
    """What is planned again belongs to a dead model: nobody would ever start it."""
    gate = Gate()
    broken = {**scripted(p_500=1.0), "call_retries": 0}
    rules = {"max_retries": 0, "breaker_failures": 2, "breaker_pause_s": 0.0, "breaker_trips": 1}
    config = make_config(broken, retry=rules, host={"slots": 4, "prefetch": 0.0}, **gated(gate))
    async with driving(config, hosts=Hosts(2)) as drive:
        submission = drive.submit(make_tasks(8))
        await gate.reached(8)
        drive.driver.board.scheduler.breakers[0].state = BreakerState.DEAD
        await drive.hosts.handles[1].die()
        gate.open()
        rows = await drive.done(submission)
    assert_each_key_once(rows, 8)
    assert Counter(row.failure_type for row in rows) == {"CircuitOpen": 4, "ModelServerError": 4}


async def test_only_infrastructure_failures_are_tried_again_and_so_often() -> None:
    failing = {**scripted("failing", p_500=1.0), "call_retries": 0}
    config = make_config(scripted("wrong", skill=0.0), failing, retry={**FAST_RETRY, "max_retries": 3})
    async with driving(config) as drive:
        rows = await drive.run(make_tasks(3))
        assert drive.driver.progress.retries == 9
    found = {(row.model, row.status, row.score, row.retries) for row in rows}
    assert found == {("wrong", "completed", 0.0, 0), ("failing", "failed", None, 3)}


# -- the end ----------------------------------------------------------------------------------------------------------


async def test_draining_lets_run_what_runs_commits_it_and_starts_nothing() -> None:
    gate = Gate()
    config = make_config(host={"slots": 3, "prefetch": 1.0}, **gated(gate))
    async with driving(config, hosts=Hosts(2)) as drive:
        drive.submit(make_tasks(40))
        await gate.reached(6)
        draining = asyncio.create_task(drive.driver.drain())
        await drive.until(lambda: all(handle.host._held.paused for handle in drive.hosts.handles))
        assert not draining.done()
        gate.open()
        async with asyncio.timeout(60):
            await draining
    assert len({row.key for row in drive.rows}) == len(drive.rows) == gate.arrived == 6


async def test_draining_at_the_very_beginning_and_with_nothing_to_do_ends() -> None:
    async with driving(hosts=Hosts(2)) as drive:
        async with asyncio.timeout(60):
            await drive.driver.drain()
    async with driving(hosts=Hosts(2)) as drive:
        drive.submit(make_tasks(500))
        async with asyncio.timeout(60):
            await drive.driver.drain()
        running = sum(handle.host._held.active for handle in drive.hosts.handles)
        assert running == 0


async def test_draining_ends_when_the_last_host_is_lost() -> None:
    gate = Gate()
    async with driving(make_config(**gated(gate))) as drive:
        drive.submit(make_tasks(2))
        await gate.reached(2)
        draining = asyncio.create_task(drive.driver.drain())
        await asyncio.sleep(0)
        await drive.hosts.handles[0].die()
        async with asyncio.timeout(60):
            await draining


async def test_closing_commits_what_has_arrived_and_tells_who_waits() -> None:
    gate = Gate()
    store = MemoryStore()
    async with driving(make_config(**gated(gate)), store=store) as drive:
        submission = drive.submit(make_tasks(4), read=True)
        await gate.reached(4)
        gate.let(2)
        await drive.until(lambda: drive.driver.progress.done == 2)
    assert submission.done.is_set()
    assert isinstance(submission.error, RunError)
    assert submission.stream is not None
    with pytest.raises(RunError, match="closed before this submission was done"):
        [batch async for batch in submission.stream]
    assert len(drive.rows) == 2


async def test_work_that_is_cancelled_before_its_first_step_is_closed_and_not_warned_of() -> None:
    async with driving() as drive:
        drive.driver.board.spawn(asyncio.sleep(1.0), "never begun").cancel()
        await asyncio.sleep(0)


async def test_a_disk_that_refuses_ends_the_run_and_acknowledges_nothing() -> None:
    class Full(MemoryStore):
        def write(self, batches: list[pa.RecordBatch]) -> None:
            if len(self.batches) >= 1:
                raise RunError("log/1-0.arrows: no space left on device")
            super().write(batches)

    store = Full()
    gate = Gate()
    async with driving(make_config(k=4, **gated(gate)), store=store) as drive:
        submission = drive.submit(make_tasks(2), read=True)
        await gate.reached(8)
        gate.let(4)
        await drive.until(lambda: drive.driver.progress.done > 0)
        gate.open()
        with pytest.raises(RunError, match="no space left"):
            await drive.done(submission)
        assert drive.driver.fatal is not None
        assert submission.stream is not None
        seen, error = await read_to_the_end(submission.stream)
        assert isinstance(error, RunError)
        assert seen == drive.driver.progress.done == len(drive.rows)


@pytest.mark.slow
async def test_a_run_in_which_nothing_ends_is_ended_and_says_what_everything_waits_for() -> None:
    gate = Gate()
    tasks = [task_of(task_id="verifies", verifier=gated_verifier(gate)), task_of(task_id="runs")]
    config = make_config(no_progress_s=2.0, host={"slots": 1, "prefetch": 0.0}, **gated(gate))
    async with driving(config) as drive:
        submission = drive.submit(tasks)
        await gate.reached(1)
        gate.let(1)
        await gate.reached(3)
        with pytest.raises(RunError, match=r"nothing has gone forward for 2 s") as caught:
            await drive.done(submission)
    text = str(caught.value)
    assert "0 rollouts wait for a host" in text
    assert "host-0: m/0/verifies: verify, waits for its verifier" in text
    assert "host-0: m/0/runs: agent, waits for its agent" in text


async def test_a_consumer_that_does_not_read_is_not_taken_for_a_run_that_is_stuck() -> None:
    config = make_config(no_progress_s=1.0, store={"max_unread_rows": 2}, host={"slots": 2, "prefetch": 0.0})
    async with driving(config) as drive:
        stream = drive.submit(make_tasks(12), read=True).stream
        assert stream is not None
        await drive.until(lambda: stream.unread_rows > 2)
        await asyncio.sleep(1.5)
        assert drive.driver.fatal is None
        assert sum([batch.num_rows async for batch in stream]) == 12


async def test_a_source_that_raises_ends_its_submission_with_that_after_what_came_before() -> None:
    class Broken(ListFeed):
        async def take(self) -> list[Task]:
            found = await super().take()
            if not found:
                raise OSError("the task file went away")
            return found

    async with driving(make_config(k=2)) as drive:
        submission = Submission(0, Broken(make_tasks(20)))
        drive.driver.submit(submission)
        with pytest.raises(OSError, match="went away"):
            await drive.done(submission)
        assert_each_key_once(drive.rows, 40)
        assert len(await drive.run(make_tasks(1), 1)) == 42


# -- everything at once -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
async def test_whatever_happens_together_every_key_has_one_row(seed: int) -> None:
    """Hosts die and fall silent, replies are lost, keys are cancelled, models fail, a reader is slow."""
    random_ = random.Random(seed)
    print(f"seed {seed}")
    models = [
        {**scripted("a", p_500=0.2, latency_ms=2), "call_retries": 0, "max_concurrency": 7},
        {**scripted("b", p_garbage=0.1, latency_ms=1), "call_retries": 0},
    ]
    retry = {"max_retries": 2, "backoff_s": 0.01, "max_host_losses": 4, "breaker_failures": 8, "breaker_pause_s": 0.01}
    host = {"slots": random_.choice([2, 5, 16]), "prefetch": 0.5, "lease_s": 8.0, "max_batch_rows": 3}
    config = make_config(*models, k=3, retry=retry, host=host, store={"max_unread_rows": 40}, plan_ahead=50)
    async with driving(config, hosts=Hosts(3, replacements=99)) as drive:
        submission = drive.submit(make_tasks(30), read=True)
        stream = submission.stream
        assert stream is not None
        reading = asyncio.create_task(read_to_the_end(stream))
        while not submission.done.is_set():
            handle = random_.choice(drive.hosts.handles)
            event = random_.random()
            if event < 0.03:
                await handle.die()
            elif event < 0.10:
                handle.faults += [OSError("lost on the way"), ReplyLost("lost on the way back")]
            elif event < 0.15:
                drive.driver.cancel(random_.sample(range(180), 3))
            elif event < 0.3:
                handle.nudge()
            await asyncio.sleep(random_.random() * 0.01)
        seen, error = await reading
        assert error is None
        rows = drive.rows
        assert (seen, drive.driver.progress.done) == (180, 180)
        assert drive.driver.board.scheduler.pending == drive.driver.board.scheduler.held_count == 0
        assert drive.driver.board.planner.open == {}
    assert_each_key_once(rows, 180)
    for row in rows:
        assert (row.score is not None) == (row.status == "completed")
