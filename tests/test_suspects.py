"""Attempts that may be what ended their host are run apart, so that they take no other with them."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_engine.circuits import Outcome
from rollout_engine.config import RetrySpec
from rollout_engine.scheduler import Scheduler
from rollout_engine.suspects import SUSPECTS_TOGETHER
from rollout_engine.tries import Try, Verdict
from rollout_engine.types import KeySpace

RULES = RetrySpec(max_host_losses=3, breaker_failures=0)


def planned(keys: int, rules: RetrySpec = RULES) -> Scheduler:
    scheduler = Scheduler(KeySpace(1, keys), rules)
    scheduler.add_group([Try(key) for key in range(keys)])
    return scheduler


def lose(scheduler: Scheduler, *hosts: str) -> list[list[int]]:
    """Each host takes all that it gets, and is lost with it."""
    granted = []
    for host in hosts:
        scheduler.join(host)
        granted.append([one.key for one in scheduler.grant(host, 100, 0.0)])
        scheduler.lost(host)
    return granted


def test_the_first_losses_are_taken_for_bad_luck() -> None:
    assert [len(keys) for keys in lose(planned(40), "a", "b")] == [40, 40]


def test_after_two_lost_hosts_a_few_run_together_and_after_three_each_alone() -> None:
    scheduler = planned(40)
    lose(scheduler, "a", "b")
    (together,) = lose(scheduler, "c")
    assert len(together) == SUSPECTS_TOGETHER
    scheduler.join("d")
    seen = []
    for _ in range(24 // SUSPECTS_TOGETHER + 1):
        seen += end_all(scheduler, "d")
    for _ in together:
        alone = end_all(scheduler, "d")
        assert len(alone) == 1
        seen += alone
    assert sorted(seen) == list(range(40))


def end_all(scheduler: Scheduler, host: str) -> list[int]:
    granted = [one.key for one in scheduler.grant(host, 100, 0.0)]
    assert scheduler.grant(host, 100, 0.0) == [], "something came beside suspects"
    for key in granted:
        assert scheduler.finished(host, key, Outcome(), 0.0) is Verdict.COMMIT
    return granted


def test_other_hosts_go_on_with_other_work() -> None:
    scheduler = planned(4)
    lose(scheduler, "a", "b")
    scheduler.add_group([Try(key) for key in range(4, 8)])
    scheduler.join("c")
    scheduler.join("d")
    assert [one.losses for one in scheduler.grant("c", 8, 0.0)] == [2] * 4
    assert [one.losses for one in scheduler.grant("d", 8, 0.0)] == [0] * 4


def test_as_many_hosts_run_suspects_as_they_fill_and_half_of_all_goes_on_with_other_work() -> None:
    keys = 3 * SUSPECTS_TOGETHER
    scheduler = planned(keys)
    lose(scheduler, "a", "b")
    scheduler.add_group([Try(key) for key in range(keys, 2 * keys)])
    for host in "cdefg":
        scheduler.join(host)
    granted = [scheduler.grant(host, SUSPECTS_TOGETHER + 1, 0.0) for host in "cdefg"]
    assert [{one.losses for one in each} for each in granted] == [{2}, {2}, {2}, {0}, {0}]
    assert [len(each) for each in granted] == [SUSPECTS_TOGETHER] * 3 + [SUSPECTS_TOGETHER + 1] * 2


def test_suspects_wait_until_a_host_has_ended_what_it_holds() -> None:
    scheduler = planned(1)
    lose(scheduler, "a")
    scheduler.join("b")
    scheduler.grant("b", 8, 0.0)
    scheduler.add_group([Try(1)])
    scheduler.join("c")
    (other,) = scheduler.grant("c", 8, 0.0)
    assert other.key == 1
    scheduler.lost("b")
    assert scheduler.grant("c", 8, 0.0) == []
    scheduler.finished("c", other.key, Outcome(), 0.0)
    assert [one.losses for one in scheduler.grant("c", 8, 0.0)] == [2]


@pytest.mark.parametrize("how", ["drop", "drop_all", "cancel"])
def test_suspects_can_be_given_up(how: str) -> None:
    scheduler = planned(4)
    lose(scheduler, "a", "b")
    dropped = {
        "drop": lambda: scheduler.drop(range(4)),
        "drop_all": scheduler.drop_all,
        "cancel": lambda: scheduler.cancel(range(4))[0],
    }[how]()
    assert len(dropped) == 4
    assert scheduler.pending == scheduler.held_count == 0


@settings(max_examples=200)
@given(st.integers(1, 120), st.sets(st.integers(0, 119), max_size=4), st.integers(1, 64), st.integers(1, 3))
def test_only_those_that_end_their_host_are_given_up(keys: int, deadly: set[int], slots: int, hosts: int) -> None:
    """Deadly attempts end their host as soon as they run; hosts are replaced at once."""
    scheduler = planned(keys)
    names = [f"h{number}" for number in range(hosts)]
    for name in names:
        scheduler.join(name)
    ended: Counter[str] = Counter()
    given_up: list[int] = []
    losses = 0
    for turn in range(100_000):
        if not scheduler.pending + scheduler.held_count:
            break
        host = names[turn % hosts]
        scheduler.grant(host, slots - len(scheduler.held[host]), 0.0)
        if deadly & scheduler.held[host].keys():
            given_up += [one.key for one in scheduler.lost(host).given_up]
            losses += 1
            names[turn % hosts] = f"{host.partition('-')[0]}-{turn}"
            scheduler.join(names[turn % hosts])
        else:
            for key in list(scheduler.held[host]):
                assert scheduler.finished(host, key, Outcome(), 0.0) is Verdict.COMMIT
                ended["completed"] += 1
    assert sorted(given_up) == sorted(deadly & set(range(keys)))
    assert ended["completed"] + len(given_up) == keys
    assert losses <= 4 * len(deadly)
