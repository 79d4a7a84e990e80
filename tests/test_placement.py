"""Which nodes get a host, how long a recovery takes, whose fault a missing sandbox is, and whose clock counts: pure.

One test: .venv/bin/pytest tests/test_placement.py -k given_up
"""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_engine.fitness import SUSPENDED_S, Fitness
from rollout_engine.hostclock import DriverClock, offset
from rollout_engine.placement import BACKOFF_S, HEALTHY_S, MAX_BACKOFF_S, MAX_FAILURES, Node, Placement
from rollout_engine.recoveries import Recoveries

A, B = Node("a"), Node("b", hosts=2)


def names(nodes: list[Node]) -> list[str]:
    return [node.node_id for node in nodes]


def test_each_node_gets_its_hosts_once() -> None:
    placement = Placement()
    assert names(placement.to_start([A, B], 0.0)) == ["a", "b", "b"]
    assert placement.to_start([A, B], 0.0) == []
    assert placement.starting == 3
    placement.started("a", "host-0", 0.0)
    assert placement.starting == 2
    assert names(placement.to_start([A, B, Node("c")], 1.0)) == ["c"]


def test_a_draining_node_gets_none() -> None:
    assert Placement().to_start([A._replace(leaving_in_s=30.0)], 0.0) == []


def test_a_lost_host_is_started_again_at_once_and_then_after_pauses_that_double_until_its_node_is_given_up() -> None:
    placement, now, pauses = Placement(), 0.0, []
    for failure in range(MAX_FAILURES):
        began = now
        while not placement.to_start([A], now):
            now += 0.25
            assert now < began + 2 * MAX_BACKOFF_S
        pauses.append(now - began)
        placement.started("a", f"host-{failure}", now)
        assert not placement.hopeless([A])
        assert placement.gone(f"host-{failure}", now) == (failure == MAX_FAILURES - 1)
    assert pauses[:2] == [0.0, 0.0]
    assert pauses[2:] == [min(BACKOFF_S * 2**number, MAX_BACKOFF_S) for number in range(MAX_FAILURES - 2)]
    assert placement.to_start([A], now + 1e6) == []
    assert placement.hopeless([A])
    assert not placement.hopeless([A, B])


def test_a_host_that_lived_long_makes_its_nodes_failures_forgotten() -> None:
    placement = Placement()
    for number in range(3 * MAX_FAILURES):
        now = number * 10 * HEALTHY_S
        assert names(placement.to_start([A], now)) == ["a"]
        placement.started("a", f"host-{number}", now)
        assert not placement.gone(f"host-{number}", now + HEALTHY_S)


def test_what_is_not_a_nodes_fault_is_not_held_against_it() -> None:
    placement = Placement()
    for number in range(3 * MAX_FAILURES):
        assert names(placement.to_start([A], float(number))) == ["a"]
        placement.started("a", f"host-{number}", float(number))
        assert not placement.gone(f"host-{number}", float(number), blame=False)


def test_a_node_that_failed_is_tried_with_one_host_first() -> None:
    placement = Placement()
    placement.to_start([B], 0.0)
    placement.failed("b", 0.0)
    placement.failed("b", 0.0)
    assert names(placement.to_start([B], BACKOFF_S)) == ["b"]
    placement.started("b", "host-0", BACKOFF_S)


@given(st.lists(st.tuples(st.sampled_from(["start", "up", "fail", "lose", "wait"]), st.integers(0, 3)), max_size=60))
def test_a_node_never_has_more_hosts_than_it_should(steps: list[tuple[str, int]]) -> None:
    placement, nodes, now = Placement(), [A, B], 0.0
    starting: list[str] = []
    hosts: dict[str, str] = {}
    made = 0
    for step, which in steps:
        if step == "start":
            starting += names(placement.to_start(nodes, now))
        elif step == "up" and starting:
            node, made = starting.pop(which % len(starting)), made + 1
            placement.started(node, f"host-{made}", now)
            hosts[f"host-{made}"] = node
        elif step == "fail" and starting:
            placement.failed(starting.pop(which % len(starting)), now)
        elif step == "lose" and hosts:
            host = sorted(hosts)[which % len(hosts)]
            del hosts[host]
            placement.gone(host, now)
        else:
            now += 10.0**which
        there = [*starting, *hosts.values()]
        assert there.count("a") <= 1
        assert there.count("b") <= 2
        assert placement.starting == len(starting)


def test_a_loss_is_made_good_once_the_last_of_its_rollouts_is_taken_up() -> None:
    recoveries = Recoveries()
    recoveries.lost("host-0", "a", [1, 2, 3], 10.0)
    recoveries.lost("host-1", "b", [4], 11.0)
    recoveries.lost("host-2", "c", [], 11.0)
    assert recoveries.taken([1, 3, 99], 12.0) == []
    assert recoveries.taken([4], 12.5) == [("host-1", "b", 1, 1.5)]
    assert recoveries.taken([2], 14.0) == [("host-0", "a", 3, 4.0)]
    assert recoveries.taken([1, 2, 3, 4], 15.0) == []


def test_what_one_node_refuses_and_another_runs_is_the_nodes_fault() -> None:
    fitness = Fitness()
    assert fitness.refused("a", 7, {"b"}, 0.0)
    assert fitness.suspended("a", 1.0)
    assert not fitness.suspended("b", 1.0)
    assert fitness.blamed(7) == {"a"}
    fitness.ended([7])
    assert not fitness.in_doubt
    assert not fitness.suspended("a", 1.0)


def test_what_all_nodes_refuse_is_the_tasks_fault() -> None:
    fitness = Fitness()
    assert fitness.refused("a", 7, {"b", "c"}, 0.0)
    assert fitness.refused("b", 7, {"a", "c"}, 1.0)
    assert not fitness.refused("c", 7, {"a", "b"}, 2.0)
    assert not any(fitness.suspended(node, 2.0) for node in "abc")
    assert fitness.blamed(7) == set()


def test_a_node_in_doubt_gets_something_again_after_a_while() -> None:
    fitness = Fitness()
    assert fitness.refused("a", 7, {"b"}, 0.0)
    assert not fitness.suspended("a", SUSPENDED_S)
    assert fitness.refused("a", 7, {"b"}, SUSPENDED_S), "it was never tried on the other one"


def test_the_only_node_has_nobody_to_compare_with() -> None:
    assert not Fitness().refused("a", 7, set(), 0.0)


@pytest.mark.parametrize("off", [-7200.0, 0.0, 7200.0])
def test_a_host_takes_the_drivers_time_from_the_request_that_came_fastest(off: float) -> None:
    clock = DriverClock()
    for delay in (3.0, 0.5, 9.0):
        clock.heard(time.time() + off - delay)
    assert clock.now() == pytest.approx(time.time() + off - 0.5, abs=1.0)


def test_a_clocks_offset_is_known_up_to_half_of_the_exchange() -> None:
    assert offset(100.0, 7301.0, 102.0) == (7200.0, 1.0)
