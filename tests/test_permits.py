"""A host's share of a model's budgets: calls start in order, and never more than the lease allows.

One test: .venv/bin/pytest tests/test_permits.py -k random
"""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_engine.exchange import Lease
from rollout_engine.permits import RAMP_S, TOKENS_BURST_S, UNLIMITED, Permits
from tests.rig import in_virtual_time


class Callers:
    """Calls that wait for their permit, and how they fared."""

    def __init__(self, permits: Permits) -> None:
        self.permits = permits
        self.order: list[int] = []
        """Calls in the order in which they started."""
        self.holding: list[int] = []
        self.tasks: list[asyncio.Task[None]] = []

    def call(self) -> asyncio.Task[None]:
        self.tasks.append(asyncio.create_task(self._call(len(self.tasks))))
        return self.tasks[-1]

    async def _call(self, number: int) -> None:
        await self.permits.acquire()
        self.order.append(number)
        self.holding.append(number)

    def end(self) -> None:
        self.holding.pop(0)
        self.permits.release()

    @property
    def waiting(self) -> list[int]:
        return [number for number, task in enumerate(self.tasks) if not task.done()]


async def settle() -> None:
    for _ in range(4):
        await asyncio.sleep(0)


async def test_nothing_starts_before_the_first_lease() -> None:
    callers = Callers(Permits())
    callers.call()
    await settle()
    assert callers.order == []
    assert callers.permits.demand().waiting == 1
    callers.permits.renew(UNLIMITED)
    await settle()
    assert callers.order == [0]


async def test_calls_start_in_the_order_of_their_arrival() -> None:
    callers = Callers(Permits())
    for _ in range(5):
        callers.call()
    await settle()
    callers.permits.renew(Lease(2, -1.0))
    await settle()
    assert callers.order == [0, 1]
    callers.call()
    callers.end()
    await settle()
    assert callers.order == [0, 1, 2]
    callers.permits.renew(Lease(9, -1.0))
    await settle()
    assert callers.order == [0, 1, 2, 3, 4, 5]


async def test_a_late_comer_does_not_overtake_those_who_wait() -> None:
    callers = Callers(Permits())
    callers.permits.renew(Lease(1, -1.0))
    callers.call()
    callers.call()
    await settle()
    callers.end()  # the permit is the second one's now, although it has not run yet
    callers.call()
    await settle()
    assert callers.order == [0, 1]


async def test_a_lower_lease_takes_effect_as_calls_end_and_is_told_as_held_until_then() -> None:
    callers = Callers(Permits())
    callers.permits.renew(Lease(3, -1.0))
    for _ in range(5):
        callers.call()
    await settle()
    callers.permits.renew(Lease(1, -1.0))
    assert (callers.permits.demand().held, callers.permits.demand().waiting) == (3, 2)
    callers.end()
    callers.end()
    await settle()
    assert (callers.order, callers.permits.demand().held) == ([0, 1, 2], 1)
    callers.end()
    await settle()
    assert callers.order == [0, 1, 2, 3]


def test_calls_begin_at_the_rate_of_the_lease() -> None:
    async def scenario() -> None:
        callers = Callers(Permits())
        callers.permits.renew(Lease(calls_s=10.0))
        began = asyncio.get_running_loop().time()
        for _ in range(21):
            callers.call()
        while callers.waiting:
            await asyncio.sleep(0.01)
        took = asyncio.get_running_loop().time() - began
        assert 1.9 <= took <= 2.05
        assert callers.order == list(range(21))
        assert callers.permits.demand().wants_calls
        assert not callers.permits.demand().wants_permits

    in_virtual_time(scenario())


def test_tokens_are_paid_by_estimate_and_settled_by_use() -> None:
    async def scenario() -> None:
        permits, loop = Permits(), asyncio.get_running_loop()
        permits.renew(Lease(tokens_s=100.0))
        began = loop.time()
        await permits.acquire(400.0)
        first = loop.time() - began
        permits.settle(400.0, 900.0)
        await permits.acquire(100.0)
        second = loop.time() - began
        permits.settle(100.0, 0.0)
        await permits.acquire(100.0)
        assert first == pytest.approx(4.0, abs=0.1)  # 400 at 100 a second
        assert second == pytest.approx(10.0, abs=0.1)  # what the first took beyond its estimate was owed
        assert loop.time() - began == pytest.approx(second)  # and the second took nothing
        assert permits.demand().traffic.tokens == 900.0

    in_virtual_time(scenario())


def test_a_call_larger_than_all_that_is_saved_up_goes_once_and_is_paid_for() -> None:
    async def scenario() -> None:
        permits, loop = Permits(), asyncio.get_running_loop()
        permits.renew(Lease(tokens_s=10.0))
        began = loop.time()
        await permits.acquire(1000.0)
        assert loop.time() - began == pytest.approx(TOKENS_BURST_S, abs=0.2)
        await permits.acquire(1.0)
        assert loop.time() - began == pytest.approx(100.0, abs=1.0)

    in_virtual_time(scenario())


def test_a_pause_holds_all_calls_and_lets_them_go_one_after_the_other() -> None:
    async def scenario() -> None:
        callers, loop = Callers(Permits()), asyncio.get_running_loop()
        callers.permits.renew(Lease(10))
        callers.call()
        await settle()
        callers.permits.refused(3.0)
        callers.end()
        callers.permits.renew(Lease(10, refusals_seen=1))
        began = loop.time()
        for _ in range(5):
            callers.call()
        await asyncio.sleep(2.9)
        assert len(callers.waiting) == 5
        assert callers.permits.demand().pause_s == pytest.approx(0.1)
        await asyncio.sleep(0.2)
        assert 1 <= len(callers.order) - 1 <= 3
        while callers.waiting:
            await asyncio.sleep(0.01)
        assert loop.time() - began == pytest.approx(3.0 + 4 * RAMP_S / 10, abs=0.05)

    in_virtual_time(scenario())


def test_a_pause_that_the_driver_tells_of_is_kept_and_not_told_back() -> None:
    """Told back and forth, it would never end."""

    async def scenario() -> None:
        permits, loop = Permits(), asyncio.get_running_loop()
        permits.renew(Lease(pause_s=2.0))
        assert permits.demand().pause_s == 0.0
        began = loop.time()
        await permits.acquire()
        assert loop.time() - began == pytest.approx(2.0)

    in_virtual_time(scenario())


async def test_a_refused_call_s_permit_rests_until_the_driver_has_heard_of_it() -> None:
    heard = asyncio.Event()
    callers = Callers(Permits(heard.set))
    callers.permits.renew(Lease(2))
    for _ in range(3):
        callers.call()
    await settle()
    callers.permits.refused(None)
    callers.end()
    await settle()
    assert heard.is_set()
    assert callers.order == [0, 1]
    traffic = callers.permits.demand().traffic
    assert (traffic.refused, traffic.level) == (1, 2)
    callers.permits.renew(Lease(2, refusals_seen=1))
    await settle()
    assert callers.order == [0, 1, 2]


async def test_who_was_refused_goes_in_front() -> None:
    callers = Callers(Permits())
    callers.permits.renew(Lease(0))
    callers.call()
    await settle()
    first = asyncio.create_task(callers.permits.acquire(first=True))
    await settle()
    callers.permits.renew(Lease(1))
    await settle()
    assert first.done()
    assert callers.order == []
    callers.tasks[0].cancel()
    await settle()


async def test_a_budget_of_zero_lets_nothing_start() -> None:
    callers = Callers(Permits())
    callers.permits.renew(Lease(0, 5.0))
    callers.call()
    await settle()
    assert callers.order == []


@pytest.mark.parametrize("lease", [Lease(1, -1.0), Lease(-1, 0.001), Lease(1, 0.001)])
async def test_a_cancelled_waiter_takes_nothing(lease: Lease) -> None:
    """Neither while it waits, nor once it has its permit and has not run yet."""
    callers = Callers(Permits())
    first, second, third = callers.call(), callers.call(), callers.call()
    await settle()
    second.cancel()
    await settle()
    assert callers.permits.demand().waiting == 2
    callers.permits.renew(lease)
    first.cancel()
    await settle()
    assert first.cancelled()
    assert callers.order == [2]
    assert third.done()
    assert callers.permits.in_use == 1


async def test_a_waiter_that_is_cancelled_as_the_lease_arrives_is_cancelled_and_nothing_else() -> None:
    callers = Callers(Permits())
    first = callers.call()
    await settle()
    first.cancel()
    callers.permits.renew(Lease(1, -1.0))
    callers.call()
    await settle()
    assert first.cancelled()
    assert callers.order == [1]


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["call", "end", "cancel", "renew", "refuse", "turn"]),
        st.integers(-1, 4),
        st.sampled_from([-1.0, 0.0, 2.0, 50.0]),
    ),
    max_size=60,
)


@settings(max_examples=80)
@given(STEPS)
def test_random_events_keep_the_lease_the_order_and_the_books(steps: list[tuple[str, int, float]]) -> None:
    async def scenario() -> None:
        callers = Callers(Permits())
        permits = callers.permits
        refused = 0
        for name, number, other in steps:
            before = permits.in_use
            if name == "call":
                callers.call()
                await asyncio.sleep(0)  # it stands in line now: order is that of standing in line
            elif name == "end" and callers.holding:
                callers.end()
            elif name == "refuse" and callers.holding:
                permits.refused(None if other < 1 else other / 10)
                callers.end()
                refused += 1
            elif name == "cancel" and callers.waiting:
                callers.tasks[callers.waiting[number % len(callers.waiting)]].cancel()
            elif name == "renew":
                permits.renew(Lease(number, other, refusals_seen=min(refused, abs(number))))
            else:
                await asyncio.sleep(abs(other) / 10)
            if permits.lease.permits >= 0:
                assert permits.in_use <= max(permits.lease.permits, before)
        await settle()
        assert permits.in_use == len(callers.holding)
        assert permits.demand().waiting == len(callers.waiting)
        assert permits.demand().traffic.refused == refused
        assert max(callers.order, default=-1) < min(callers.waiting, default=10**9)  # nobody has overtaken
        permits.renew(Lease(refusals_seen=refused))
        await asyncio.sleep(60)
        assert callers.waiting == []
        while callers.holding:
            callers.end()
        assert permits.in_use == 0

    in_virtual_time(scenario())
