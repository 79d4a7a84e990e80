"""A model call at the gate: what waits there is queueing, and costs the agent no time.

One test: .venv/bin/pytest tests/test_gatedcall.py -k stands_still
"""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_engine.agentclock import AgentClock
from rollout_engine.errors import ModelRateLimited, ModelServerError
from rollout_engine.estimate import FIRST_ANSWER_TOKENS, TOKENS_PER_CHAR, TokenEstimate
from rollout_engine.exchange import Lease
from rollout_engine.gatedcall import GatedCall, NoClock
from rollout_engine.models.retry import MAX_REFUSALS, Failed, call_with_retries
from rollout_engine.permits import UNLIMITED, Permits
from rollout_engine.types import Usage
from tests.helpers import make_config, scripted
from tests.rig import bench, in_virtual_time, task_of


def call_of(permits: Permits) -> GatedCall:
    return GatedCall(permits, TokenEstimate(), NoClock(), 0, None)


def test_the_agent_s_time_stands_still_while_a_call_waits() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        clock = AgentClock(began + 10.0, began + 100.0)

        async def agent() -> None:
            async with clock.limit:
                clock.stop()
                clock.stop()  # two calls at once count once
                await asyncio.sleep(30.0)
                clock.go_on()
                await asyncio.sleep(5.0)
                clock.go_on()
                await asyncio.sleep(60.0)

        with pytest.raises(TimeoutError):
            await agent()
        assert loop.time() - began == pytest.approx(45.0)
        assert clock.waited_s == pytest.approx(35.0)
        assert not clock.at_deadline

    in_virtual_time(scenario())


def test_a_wait_ends_with_the_rollout_s_deadline() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        clock = AgentClock(began + 10.0, began + 20.0)

        async def agent() -> None:
            async with clock.limit:
                clock.stop()
                try:
                    await asyncio.sleep(1000.0)
                finally:
                    clock.go_on()

        with pytest.raises(TimeoutError):
            await agent()
        assert loop.time() - began == pytest.approx(20.0)
        assert clock.at_deadline

    in_virtual_time(scenario())


async def test_waiting_for_a_permit_is_queueing_in_the_row_and_no_agent_s_time() -> None:
    async with bench(make_config(scripted())) as rig:
        permits = rig.resources.models["m"].permits
        permits.renew(Lease(0))
        running = asyncio.create_task(rig.run(task_of(limits={"agent_s": 2.0})))
        while not permits.demand().waiting:
            await asyncio.sleep(0.01)
        await asyncio.sleep(2.5)
        permits.renew(UNLIMITED)
        record = await running
    assert record.status == "completed"
    assert record.queue_s >= 2.4
    assert record.agent_s < 2.0


async def test_a_call_that_may_never_begin_ends_with_the_deadline_and_says_so() -> None:
    async with bench(make_config(scripted())) as rig:
        rig.resources.models["m"].permits.renew(Lease(0))
        record = await rig.run(task_of(), deadline_s=0.3)
    assert (record.status, record.failure_type) == ("failed", "DeadlineError")


def test_a_refused_call_holds_no_permit_while_it_waits_and_comes_back() -> None:
    async def scenario() -> None:
        permits, loop = Permits(), asyncio.get_running_loop()
        permits.renew(Lease(1))
        call, other, tries = call_of(permits), call_of(permits), 0
        await call.enter()

        async def once(until: float) -> str | Failed:
            nonlocal tries
            tries += 1
            assert permits.in_use == 1
            return Failed(ModelRateLimited("429", 5.0), 5.0) if tries == 1 else "answer"

        began = loop.time()
        asking = asyncio.create_task(
            call_with_retries(once, retries=1, deadline=began + 2.0, call_timeout_s=60.0, gate=call)
        )
        await asyncio.sleep(1.0)
        assert permits.in_use == 0
        waiting = asyncio.create_task(other.enter())
        await asyncio.sleep(1.0)
        permits.renew(Lease(1, refusals_seen=1))
        assert await asking == "answer"  # the pause put its deadline off
        assert loop.time() - began == pytest.approx(5.0, abs=0.1)
        assert not waiting.done()
        call.leave()
        await waiting
        other.leave(ModelServerError("500"))
        assert permits.in_use == 0
        traffic = permits.demand().traffic
        assert (traffic.answered, traffic.refused) == (1, 1)

    in_virtual_time(scenario())


def test_refusals_do_not_use_up_the_tries_of_a_call_but_are_bounded() -> None:
    async def scenario() -> None:
        permits = Permits()
        permits.renew(UNLIMITED)
        call, tries = call_of(permits), 0
        await call.enter()

        async def once(until: float) -> str | Failed:
            nonlocal tries
            tries += 1
            return Failed(ModelRateLimited("429", 1.0), 1.0)

        with pytest.raises(ModelRateLimited):
            await call_with_retries(once, retries=2, deadline=1e9, call_timeout_s=60.0, gate=call)
        call.leave(ModelRateLimited("429"))
        assert tries == MAX_REFUSALS + 1
        assert permits.in_use == 0

    in_virtual_time(scenario())


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(1, 5000), st.integers(1, 400)), min_size=1, max_size=8))
def test_estimates_come_near_what_a_server_counts(calls: list[tuple[int, int]]) -> None:
    estimate = TokenEstimate()
    for chars, answer in calls:
        estimate.learn(chars, Usage(prompt_tokens=chars // 4, completion_tokens=answer))
    answers = [answer for _, answer in calls]
    found = estimate.tokens(1000, None)
    per_char = 250 if any(chars >= 4 for chars, _ in calls) else 1000 * TOKENS_PER_CHAR
    assert min(answers) <= found <= per_char + max(answers)
    assert estimate.tokens(1000, 1) <= per_char + 1


def test_before_the_first_answer_a_call_counts_with_all_that_it_may_take() -> None:
    estimate = TokenEstimate()
    chars = estimate.chars([{"role": "user", "content": "x" * 100}])
    assert 100 <= chars <= 130
    assert estimate.tokens(chars, 4000) == pytest.approx(chars * TOKENS_PER_CHAR + 4000)
    assert estimate.tokens(chars, None) == pytest.approx(chars * TOKENS_PER_CHAR + FIRST_ANSWER_TOKENS)
