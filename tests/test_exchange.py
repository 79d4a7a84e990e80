"""The exchange between a real host and the driver's side of it, with every message lost, doubled or late.

One test: .venv/bin/pytest tests/test_exchange.py -k lost
"""

from __future__ import annotations

import asyncio
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_engine.circuits import Outcome
from rollout_engine.config import RetrySpec
from rollout_engine.exchange import HostLimits, Lease, Reply, Request
from rollout_engine.host import Host
from rollout_engine.link import Link
from rollout_engine.scheduler import Scheduler
from rollout_engine.specs import Task, body_digest, task_body
from rollout_engine.tries import Try, Verdict
from rollout_engine.types import KeySpace, RolloutSpec
from tests.helpers import make_config, make_plan, make_tasks

FAST = HostLimits(leases={"m": Lease(-1, -1.0)}, linger_s=0.0, wait_s=0.002)
FATES = ["arrives", "request lost", "reply lost", "doubled", "old one again"]


class Wire:
    """Carries requests to a host and replies back, with the fates that a test draws."""

    def __init__(self, host: Host, fates: list[str]) -> None:
        self._host, self._fates = host, iter(fates)
        self._old: list[Request] = []

    async def exchange(self, request: Request) -> Reply | None:
        fate = next(self._fates, "arrives")
        self._old.append(request)
        if fate == "request lost":
            return None
        if fate == "doubled":
            await self._host.exchange(request)
        if fate == "old one again":
            await self._host.exchange(self._old[len(self._old) // 2])
        reply = await self._host.exchange(request)
        return None if fate == "reply lost" else reply


class Side:
    """A driver with one host and nothing else: scheduler, link, and what was committed."""

    def __init__(self, tasks: list[Task], k: int) -> None:
        self.space = KeySpace(1, k)
        self.tasks = [(task.task_id, body_digest(task_body(task)), task_body(task)) for task in tasks]
        self.scheduler = Scheduler(self.space, RetrySpec(backoff_s=0.0, breaker_failures=0))
        self.link = Link("host-0", epoch=1)
        self.committed: Counter[int] = Counter()
        self.dropped = 0
        self.scheduler.join("host-0")
        for slot in range(len(tasks)):
            self.scheduler.add_group([Try(key) for key in self.space.group_keys(slot)])

    def request(self) -> Request:
        for one in self.scheduler.grant("host-0", max(self.link.free_slots, 0), 0.0):
            task_id, digest, body = self.tasks[self.space.slot(one.key)]
            if self.link.lacks(digest):
                self.link.bring(digest, body)
            attempt = self.space.attempt(one.key)
            self.link.grant(RolloutSpec(one.key, 0, task_id, digest, "m", attempt, one.retry, 0, 0.0))
        return self.link.request(FAST)

    def take_in(self, reply: Reply) -> None:
        news = self.link.take_in(reply)
        assert not news.missing
        assert not news.strange
        for seq, batch in news.batches:
            for key in batch.column("key").to_pylist():
                verdict = self.scheduler.finished("host-0", key, Outcome(), 0.0)
                self.link.done(key, self.tasks[self.space.slot(key)][1])
                self.committed[key] += verdict is Verdict.COMMIT
                self.dropped += verdict is Verdict.DROP
            self.link.acked_seq = seq
        for digest in news.bodies:
            self.link.bring(digest, next(body for _, known, body in self.tasks if known == digest))

    @property
    def open(self) -> int:
        return self.scheduler.pending + self.scheduler.held_count


@settings(max_examples=60)
@given(st.lists(st.sampled_from(FATES), max_size=60), st.integers(1, 6), st.integers(1, 4), st.integers(1, 5))
def test_every_key_is_committed_once_whatever_is_lost_doubled_or_late(
    fates: list[str], n: int, k: int, slots: int
) -> None:
    async def scenario() -> None:
        host = Host(make_plan(make_config(k=k, host={"slots": slots})))
        await host.open()
        side, wire = Side(list(make_tasks(n)), k), Wire(host, fates)
        async with asyncio.timeout(120):
            while side.open:
                reply = await wire.exchange(side.request())
                if reply is not None:
                    side.take_in(reply)
        assert side.committed == Counter(dict.fromkeys(range(n * k), 1))
        assert side.dropped == 0
        assert (await host.exchange(side.link.request(FAST))).held_count == 0
        await host.close()

    asyncio.run(scenario())


async def test_a_key_that_the_host_does_not_hold_is_noticed_and_named() -> None:
    host = Host(make_plan(make_config(k=2)))
    await host.open()
    side = Side(list(make_tasks(1)), 2)
    side.take_in(await host.exchange(side.request()))
    side.request()  # grants are numbered and counted as sent ...
    while side.link.has_more_to_say:
        reply = await host.exchange(side.link.request(HostLimits(FAST.leases, 0.0, 0.002, paused=True)))
        side.link.take_in(reply)
    held = host._held
    held._queue.clear()
    for entry in list(held.entries.values()):
        held._finish_unrun(entry, held._unstarted(entry.spec))
    host._outbox.take(0)
    host._outbox.acknowledge(99)  # ... and the host has forgotten them: a bug, or its memory was lost
    first = side.link.take_in(await host.exchange(side.link.request(FAST)))
    assert first.missing == []
    second = side.link.take_in(await host.exchange(side.link.request(FAST)))
    assert second.missing == [0, 1]
    await host.close()


async def test_a_host_without_its_driver_cancels_its_rollouts_when_its_lease_ends() -> None:
    gone = asyncio.Event()
    config = make_config({"name": "m", "kind": "scripted", "options": {"latency_ms": 60_000}}, host={"lease_s": 2.0})
    host = Host(make_plan(config), on_expired=gone.set)
    await host.open()
    side = Side(list(make_tasks(1)), 1)
    side.take_in(await host.exchange(side.request()))
    side.take_in(await host.exchange(side.request()))
    async with asyncio.timeout(60):
        await gone.wait()
    assert all(entry.task is not None and entry.task.done() for entry in host._held.entries.values())
