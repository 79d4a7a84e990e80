"""Limits that adapt find what a server takes, keep to it, and notice when it changes.

The searches run budgets, permits of hosts and a server together in virtual time (tests/paced.py).
One test: .venv/bin/pytest tests/test_aimd.py -k bounds
"""

from __future__ import annotations

import asyncio
import math
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollout_engine.aimd import COOLDOWN_S, MIN_RATE, Controller, Seen
from rollout_engine.config import AdaptiveSpec
from rollout_engine.models.server_limits import Admission, ServerLimits
from tests.paced import Rig, Server
from tests.rig import in_virtual_time

MOST_PER_S = 400.0
"""Calls per second of a server in a search: virtual time costs real time by the call."""

SEEN = st.builds(
    Seen,
    answered=st.integers(0, 500),
    refused=st.sampled_from([0, 0, 0, 1, 5, 200]),
    level=st.integers(0, 300),
    in_flight=st.integers(0, 300),
    wants_permits=st.booleans(),
    wants_rate=st.booleans(),
    latency_s=st.none() | st.floats(1e-3, 600.0),
    pause_s=st.sampled_from([0.0, 0.0, 0.5, 300.0]),
)


@settings(max_examples=150)
@given(
    st.integers(1, 20),
    st.integers(0, 200),
    st.integers(1, 64),
    st.lists(st.tuples(SEEN, st.floats(0.01, 40.0)), max_size=80),
)
def test_the_bounds_hold_whatever_is_seen(floor: int, more: int, start: int, story: list[tuple[Seen, float]]) -> None:
    controller, now = Controller(AdaptiveSpec(floor=floor, ceiling=floor + more, start=start)), 0.0
    for seen, later in story:
        now += later
        controller.observe(seen, now)
        assert floor <= controller.cap <= floor + more
        assert controller.rate is None or MIN_RATE <= controller.rate < math.inf


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 15)), max_size=60))
def test_nothing_grows_that_does_not_bind(story: list[tuple[int, int]]) -> None:
    controller = Controller(AdaptiveSpec(start=20))
    for number, (answered, in_flight) in enumerate(story):
        controller.observe(Seen(answered, in_flight=in_flight, wants_permits=in_flight % 2 == 0), number * 0.5)
    assert controller.cap == 20


def test_one_episode_of_refusals_is_one_cut() -> None:
    controller = Controller(AdaptiveSpec(start=100))
    controller.observe(Seen(10, 1, 100, 100, True), 0.0)
    assert controller.cap == 99
    for step in range(1, 10):
        controller.observe(Seen(0, 20, 99 - step, 90, True), step * COOLDOWN_S / 10)
        assert controller.cap == 99 - step - 1  # no lower than what the refused calls say themselves


def test_errors_that_are_no_429_change_nothing() -> None:
    controller = Controller(AdaptiveSpec(start=10))
    for step in range(100):
        controller.observe(Seen(answered=0, in_flight=10), step * 0.25)
    assert controller.cap == 10


# -- in virtual time against servers ------------------------------------------------------------------------------


def search(
    hosts: int = 1,
    seconds: float = 110.0,
    steady: float = 50.0,
    *,
    tells: bool = True,
    spread: float = 0.0,
    **limits: Any,
) -> tuple[Rig, float, float]:
    """(the rig, calls answered per second, part of the calls refused) once it has settled."""
    found: list[tuple[Rig, float, float]] = []

    async def scenario() -> None:
        server = Server(Admission(ServerLimits(**limits)), tells=tells, spread=spread)
        rig = Rig(server, hosts, callers=160 // hosts, max_concurrency="auto")
        begin = asyncio.get_running_loop().time()
        await rig.run(seconds)
        until = begin + seconds
        found.append((rig, server.per_second(until - steady, until), server.refused_share(until - steady, until)))
        await rig.end()

    in_virtual_time(scenario())
    return found[0]


class Crowd(NamedTuple):
    """A server that hides how many calls it takes at once, and who calls it."""

    limit: int
    latency_s: float
    hosts: int = 1
    tells: bool = True
    """Its 429s have a Retry-After: of a second, for all calls."""
    spread: float = 0.0
    then: float = 1.0
    """After a while it takes so many times as many."""

    @property
    def unit_s(self) -> float:
        """What its time is counted in: nothing is learned faster than calls end."""
        return max(1.0, self.latency_s)

    def search(self) -> list[tuple[float, float]]:
        """(part of the limit that is in use, part of the calls refused) in each third of the last 60 units."""
        thirds: list[tuple[float, float]] = []
        limits = [self.limit, max(1, round(self.limit * self.then))]

        async def scenario() -> None:
            server = Server(
                Admission(ServerLimits(concurrency=self.limit)), self.latency_s, tells=self.tells, spread=self.spread
            )
            rig = Rig(server, self.hosts, callers=math.ceil(2.5 * max(limits) / self.hosts), max_concurrency="auto")
            begin, unit = asyncio.get_running_loop().time(), self.unit_s
            change = {begin + 60 * unit: lambda: server.limit(concurrency=limits[1])} if self.then != 1.0 else {}
            end = begin + (210 if change else 130) * unit
            await rig.run(end - begin, change)
            await asyncio.sleep(2 * self.latency_s)  # the calls that were in flight at the end, end
            for third in range(3):
                since = end - (60 - 20 * third) * unit
                used = server.in_use(since, since + 20 * unit) / limits[1]
                thirds.append((used, server.refused_share(since, since + 20 * unit)))
            await rig.end()

        in_virtual_time(scenario())
        return thirds


def judge(crowd: Crowd) -> None:
    """Nine tenths of the limit are in use and 2 % are refused at most; no third of that time is much worse.

    A refusal is one call of the few that a small or slow server takes meanwhile, and its pause of a second is a
    twentieth of the time where calls are short: that is what a third may have more of.
    """
    thirds = crowd.search()
    used, refused = (sum(each) / 3 for each in zip(*thirds, strict=True))
    assert used >= 0.9, (crowd, thirds)
    assert refused < 0.02, (crowd, thirds)
    assert min(used for used, _ in thirds) >= 0.8, (crowd, thirds)
    assert max(refused for _, refused in thirds) < 0.04, (crowd, thirds)


@pytest.mark.parametrize("tells", [True, False], ids=["retry-after", "silent"])
@pytest.mark.parametrize(("limit", "latency_s", "hosts"), [(4, 0.1, 1), (4, 1.0, 3), (16, 0.3, 3), (64, 1.0, 1)])
def test_it_finds_how_many_calls_a_server_takes_at_once(limit: int, latency_s: float, hosts: int, tells: bool) -> None:
    judge(Crowd(limit, latency_s, hosts, tells, spread=0.3))


CROWDS = st.builds(
    Crowd,
    limit=st.integers(4, 256),
    latency_s=st.sampled_from([0.01, 0.05, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0]),
    hosts=st.integers(1, 4),
    tells=st.booleans(),
    spread=st.sampled_from([0.0, 0.3, 0.6]),
    then=st.sampled_from([1.0, 1.0, 0.5, 2.0]),
).filter(lambda crowd: crowd.limit * max(1.0, crowd.then) <= 256 and crowd.limit / crowd.latency_s <= MOST_PER_S)


@pytest.mark.slow
@settings(max_examples=25, derandomize=True, suppress_health_check=list(HealthCheck))
@given(CROWDS)
def test_it_uses_nine_tenths_of_any_limit_and_goes_with_it(crowd: Crowd) -> None:
    judge(crowd)


@pytest.mark.parametrize("hosts", [1, 4])
@pytest.mark.parametrize("tells", [True, False], ids=["retry-after", "silent"])
def test_it_finds_how_many_calls_a_server_takes_per_second(hosts: int, tells: bool) -> None:
    _, per_second, refused = search(hosts, tells=tells, per_second=200, burst=20)
    assert per_second >= 0.9 * 200
    assert refused < 0.02


@pytest.mark.parametrize("hosts", [1, 4])
def test_it_keeps_a_server_whose_calls_take_turns_busy_and_no_busier(hosts: int) -> None:
    """Sixteen at full speed: more calls at once make each take longer, and none more is answered."""
    rig, per_second, refused = search(hosts, slots=16)
    assert per_second >= 0.95 * 160
    assert refused == 0
    in_flight = rig.server.in_flight
    assert in_flight <= 16 * 4


def test_it_goes_up_again_after_a_limit_was_raised() -> None:
    async def scenario() -> None:
        server = Server(Admission(ServerLimits(concurrency=10)))
        rig = Rig(server, 2, callers=64, max_concurrency="auto")
        begin = asyncio.get_running_loop().time()
        await rig.run(140, {begin + 60: lambda: server.limit(concurrency=40)})
        assert server.per_second(begin + 40, begin + 60) >= 0.85 * 100
        assert server.per_second(begin + 120, begin + 140) >= 0.85 * 400
        await rig.end()

    in_virtual_time(scenario())


def test_it_goes_down_after_a_limit_was_lowered() -> None:
    async def scenario() -> None:
        server = Server(Admission(ServerLimits(concurrency=40)))
        rig = Rig(server, 2, callers=64, max_concurrency="auto")
        begin = asyncio.get_running_loop().time()
        await rig.run(140, {begin + 60: lambda: server.limit(concurrency=10)})
        assert server.refused_share(begin + 100, begin + 140) < 0.02
        assert server.per_second(begin + 100, begin + 140) >= 0.8 * 100
        await rig.end()

    in_virtual_time(scenario())


def test_a_pause_that_one_host_was_asked_for_holds_on_all_of_them() -> None:
    async def scenario() -> None:
        server = Server(Admission(ServerLimits()))
        rig = Rig(server, 4, callers=4)
        loop = asyncio.get_running_loop()
        await rig.run(5)
        rig.permits["h0"].in_use += 1  # a call of its own that the server refuses
        rig.permits["h0"].refused(3.0)
        rig.permits["h0"].release()
        told = loop.time()
        await rig.run(5)
        inside = [at for at in rig.began if told + 0.02 < at < told + 2.98]
        assert inside == []
        assert any(at > told + 3.0 for at in rig.began)
        await rig.end()

    in_virtual_time(scenario())


@pytest.mark.parametrize("hosts", [1, 4])
def test_requests_per_minute_hold_over_the_cluster_and_are_used(hosts: int) -> None:
    async def scenario() -> None:
        server = Server(Admission(ServerLimits()))
        rig = Rig(server, hosts, callers=32, requests_per_minute=600.0)
        begin = asyncio.get_running_loop().time()
        await rig.run(60)
        for since in range(0, 50, 5):
            calls = sum(begin + since <= at < begin + since + 10 for at in rig.began)
            assert calls <= 100 + hosts * 2
        assert len(rig.began) >= 0.95 * 600
        await rig.end()

    in_virtual_time(scenario())
