"""A host's share of a model's budgets: calls start in order, and never more than the lease allows.

One test: .venv/bin/pytest tests/test_permits.py -k random
"""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_engine.exchange import Lease
from rollout_engine.permits import UNLIMITED, Permits


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
    assert callers.permits.demand.waiting == 1
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
    assert (callers.permits.demand.held, callers.permits.demand.waiting) == (3, 2)
    callers.end()
    callers.end()
    await settle()
    assert (callers.order, callers.permits.demand.held) == ([0, 1, 2], 1)
    callers.end()
    await settle()
    assert callers.order == [0, 1, 2, 3]


async def test_tokens_bound_how_many_calls_start_and_those_unused_are_kept() -> None:
    callers = Callers(Permits())
    callers.permits.renew(Lease(-1, 2.0))
    for _ in range(4):
        callers.call()
    await settle()
    assert callers.order == [0, 1]
    callers.permits.renew(Lease(-1, 1.5))
    await settle()
    assert callers.order == [0, 1, 2]
    assert callers.permits.demand.tokens == 0.5
    callers.permits.renew(Lease(-1, 0.5))
    await settle()
    assert callers.order == [0, 1, 2, 3]


async def test_a_budget_of_zero_lets_nothing_start() -> None:
    callers = Callers(Permits())
    callers.permits.renew(Lease(0, 5.0))
    callers.call()
    await settle()
    assert callers.order == []


@pytest.mark.parametrize("lease", [Lease(1, -1.0), Lease(-1, 1.0), Lease(1, 1.0)])
async def test_a_cancelled_waiter_takes_nothing(lease: Lease) -> None:
    """Neither while it waits, nor once it has its permit and has not run yet."""
    callers = Callers(Permits())
    first, second, third = callers.call(), callers.call(), callers.call()
    await settle()
    second.cancel()
    await settle()
    assert callers.permits.demand.waiting == 2
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
    st.tuples(st.sampled_from(["call", "end", "cancel", "renew", "turn"]), st.integers(-1, 4), st.integers(-1, 3)),
    max_size=60,
)


@settings(max_examples=80, deadline=None)
@given(STEPS)
def test_random_events_keep_the_lease_the_order_and_the_books(steps: list[tuple[str, int, int]]) -> None:
    async def scenario() -> None:
        callers = Callers(Permits())
        permits = callers.permits
        tokens = 0.0
        unlimited_since = 0
        for name, number, other in steps:
            before = permits.in_use
            if name == "call":
                callers.call()
                await asyncio.sleep(0)  # it stands in line now: order is that of standing in line
            elif name == "end" and callers.holding:
                callers.end()
            elif name == "cancel" and callers.waiting:
                callers.tasks[callers.waiting[number % len(callers.waiting)]].cancel()
            elif name == "renew":
                if (tokens < 0) != (other < 0):
                    await settle()  # so that it is known which starts took a token
                    before = permits.in_use
                permits.renew(Lease(number, float(other)))
                if other < 0:
                    tokens = -1.0
                else:
                    unlimited_since = len(callers.order) if tokens < 0 else unlimited_since
                    tokens = max(tokens, 0.0) + other
            else:
                await asyncio.sleep(0)
            if permits.lease.permits >= 0:
                assert permits.in_use <= max(permits.lease.permits, before)
        await settle()
        assert permits.in_use == len(callers.holding)
        assert permits.demand.waiting == len(callers.waiting)
        assert max(callers.order, default=-1) < min(callers.waiting, default=10**9)  # nobody has overtaken
        if tokens >= 0:
            assert permits.demand.tokens == tokens - (len(callers.order) - unlimited_since)
        permits.renew(UNLIMITED)
        await settle()
        assert callers.waiting == []
        while callers.holding:
            callers.end()
        assert permits.in_use == 0

    asyncio.run(scenario())
