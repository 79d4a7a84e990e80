"""The scheduler under random events: one ending per key, limits never exceeded, nothing starves.

One test: .venv/bin/pytest tests/test_scheduler.py -k random
"""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_engine.breaker import Breaker, BreakerState
from rollout_engine.circuits import Outcome
from rollout_engine.config import RetrySpec
from rollout_engine.scheduler import OVERSUBSCRIPTION, Scheduler
from rollout_engine.tries import Try, Verdict
from rollout_engine.types import KeySpace

VALID = Outcome()
FAULT = Outcome(failed=True, retryable=True, kind="model:ModelServerError")


def planned(space: KeySpace, slots: int, retry: RetrySpec | None = None, **options: object) -> Scheduler:
    scheduler = Scheduler(space, retry or RetrySpec(backoff_s=0, breaker_failures=0), **options)  # type: ignore[arg-type]
    for slot in range(slots):
        for model in range(space.m):
            scheduler.add_group([Try(key) for key in space.group_keys(slot * space.m + model)])
    return scheduler


def test_groups_are_finished_before_new_ones_are_begun() -> None:
    space = KeySpace(m=2, k=4)
    scheduler = planned(space, 8)
    scheduler.join("a")
    first = scheduler.grant("a", 6, 0.0)
    assert [space.group(one.key) for one in first] == [0] * 4 + [1] * 2
    second = scheduler.grant("a", 4, 0.0)
    assert [space.group(one.key) for one in second] == [1] * 2 + [2] * 2


def test_a_group_stays_on_two_hosts_while_there_is_other_work() -> None:
    space = KeySpace(m=1, k=6)
    scheduler = planned(space, 3)
    for host in "abc":
        scheduler.join(host)
    hosts_of: dict[int, set[str]] = {}
    for _ in range(2):
        for host in "abc":
            for one in scheduler.grant(host, 2, 0.0):
                hosts_of.setdefault(space.group(one.key), set()).add(host)
    assert max(len(hosts) for hosts in hosts_of.values()) <= 2


def test_the_last_group_is_shared_by_all_hosts_that_are_free() -> None:
    scheduler = planned(KeySpace(m=1, k=6), 1)
    for host in "abc":
        scheduler.join(host)
    assert [len(scheduler.grant(host, 2, 0.0)) for host in "abc"] == [2, 2, 2]


def test_a_retryable_failure_is_tried_again_after_its_back_off_and_then_committed() -> None:
    scheduler = planned(KeySpace(1, 1), 1, RetrySpec(max_retries=2, backoff_s=8.0, breaker_failures=0))
    scheduler.join("a")
    now, retries = 0.0, []
    for _ in range(3):
        (one,) = scheduler.grant("a", 1, now)
        retries.append(one.retry)
        verdict = scheduler.finished("a", one.key, FAULT, now)
        if verdict is Verdict.COMMIT:
            break
        assert scheduler.grant("a", 1, now) == []
        wake = scheduler.next_wakeup()
        assert wake is not None
        assert 4.0 <= wake - now <= 16.0
        now = wake
    assert retries == [0, 1, 2]
    assert scheduler.pending == scheduler.held_count == 0


def test_a_lost_host_s_keys_are_planned_again_up_to_a_bound() -> None:
    scheduler = planned(KeySpace(1, 2), 1, RetrySpec(max_host_losses=1))
    for host in ("a", "b"):
        scheduler.join(host)
        assert len(scheduler.grant(host, 2, 0.0)) == 2
        lost = scheduler.lost(host)
        if host == "a":
            assert [one.retry for one in lost.planned_again] == [1, 1]
    assert [one.losses for one in lost.given_up] == [1, 1]
    assert scheduler.pending == scheduler.held_count == 0


def test_a_second_arrival_of_a_key_is_dropped() -> None:
    scheduler = planned(KeySpace(1, 1), 1)
    scheduler.join("a")
    (one,) = scheduler.grant("a", 1, 0.0)
    assert scheduler.finished("a", one.key, VALID, 0.0) is Verdict.COMMIT
    assert scheduler.finished("a", one.key, VALID, 0.0) is Verdict.DROP


def test_a_model_that_only_fails_is_paused_probed_and_given_up_while_the_other_goes_on() -> None:
    space = KeySpace(m=2, k=1)
    rules = RetrySpec(max_retries=0, breaker_failures=3, breaker_pause_s=10.0, breaker_trips=2)
    scheduler = planned(space, 20, rules)
    scheduler.join("a")
    now, committed = 0.0, Counter[int]()
    for _ in range(200):
        now += 1.0
        for one in scheduler.grant("a", 4, now):
            model = space.model(one.key)
            scheduler.finished("a", one.key, FAULT if model == 0 else VALID, now)
            committed[model] += 1
        if scheduler.dead_models():
            break
    assert committed[1] == 20
    assert committed[0] < 10
    dropped = scheduler.drop_all(0)
    assert committed[0] + len(dropped) == 20
    assert scheduler.pending == 0


def test_a_success_closes_the_breaker_again() -> None:
    breaker = Breaker(RetrySpec(breaker_failures=2, breaker_pause_s=1.0))
    for key in range(2):
        breaker.failed(key, "model:ModelTimeout", 0.0)
    assert breaker.allowance(0.5) == 0
    assert breaker.allowance(1.0) == 1
    breaker.started(9)
    assert breaker.allowance(1.0) == 0
    breaker.succeeded()
    assert breaker.state is BreakerState.CLOSED
    assert breaker.allowance(1.0) is None


def test_failures_of_different_kinds_do_not_open_the_breaker() -> None:
    breaker = Breaker(RetrySpec(breaker_failures=2))
    for key in range(10):
        breaker.failed(key, f"model:{key % 2}", 0.0)
    assert breaker.state is BreakerState.CLOSED


def test_cancelled_rollouts_end_wherever_they_are() -> None:
    space = KeySpace(m=1, k=6)
    scheduler = planned(space, 1, RetrySpec(backoff_s=100.0, breaker_failures=0))
    scheduler.join("a")
    granted = scheduler.grant("a", 4, 0.0)
    scheduler.finished("a", granted[0].key, FAULT, 0.0)  # waits for its back-off
    dropped, on_hosts = scheduler.cancel(space.group_keys(0))
    assert sorted(one.key for one in dropped) == [granted[0].key, 4, 5]
    assert on_hosts == {"a": [1, 2, 3]}
    for key in on_hosts["a"]:
        assert scheduler.finished("a", key, Outcome(cancelled=True), 1.0) is Verdict.COMMIT
    assert scheduler.pending == scheduler.held_count == 0


def test_a_cancelled_rollout_is_not_tried_again_when_it_fails_or_its_host_is_lost() -> None:
    scheduler = planned(KeySpace(1, 2), 1)
    scheduler.join("a")
    scheduler.grant("a", 2, 0.0)
    scheduler.cancel([0, 1])
    assert scheduler.finished("a", 0, FAULT, 0.0) is Verdict.COMMIT
    assert [one.key for one in scheduler.lost("a").cancelled] == [1]


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["grant", "valid", "fault", "deny", "lose", "join", "cancel", "wait", "drop", "missing"]),
        st.integers(0, 3),
        st.integers(0, 40),
    ),
    max_size=120,
)


@settings(max_examples=300)
@given(EVENTS, st.integers(1, 3), st.integers(1, 4), st.integers(1, 5), st.one_of(st.none(), st.integers(1, 3)))
def test_random_events_end_every_key_once_and_keep_every_limit(
    events: list[tuple[str, int, int]], m: int, k: int, slots: int, limit: int | None
) -> None:
    space = KeySpace(m, k)
    rules = RetrySpec(max_retries=2, max_host_losses=2, backoff_s=2.0, breaker_failures=4, breaker_trips=2)
    scheduler = planned(space, slots, rules, limits=[limit] * m)
    hosts, joined = ["h0", "h1"], 1
    for host in hosts:
        scheduler.join(host)
    ended: Counter[int] = Counter()
    now = 0.0

    def end(tries: list[Try]) -> None:
        ended.update(one.key for one in tries)

    def bury() -> None:
        for model in scheduler.dead_models():
            end(scheduler.drop_all(model))

    for name, which, number in events:
        host = hosts[which % len(hosts)]
        held = list(scheduler.held[host])
        if name == "grant":
            granted = scheduler.grant(host, number % 7, now)
            assert len(granted) <= number % 7
        elif name in ("valid", "fault", "deny") and held:
            outcome = {"valid": VALID, "fault": FAULT, "deny": Outcome(failed=True, kind="model:ModelAuthError")}[name]
            key = held[number % len(held)]
            if scheduler.finished(host, key, outcome, now) is Verdict.COMMIT:
                ended[key] += 1
        elif name == "lose" and len(hosts) > 1:
            hosts.remove(host)
            lost = scheduler.lost(host)
            end(lost.given_up + lost.cancelled)
        elif name == "join":
            joined += 1
            hosts.append(f"h{joined}")
            scheduler.join(hosts[-1])
        elif name == "cancel":
            end(scheduler.cancel([number % (slots * space.per_slot)])[0])
        elif name == "drop":
            end(scheduler.drop([number % (slots * space.per_slot)]))
        elif name == "missing" and held:
            lost = scheduler.missing(host, [held[number % len(held)]])
            end(lost.given_up + lost.cancelled)
        else:
            now += number
        bury()
        if limit is not None:
            assert all(count <= limit * OVERSUBSCRIPTION for count in scheduler.in_flight)
        held_now = [key for host in hosts for key in scheduler.held[host]]
        assert len(held_now) == len(set(held_now)) == scheduler.held_count
        assert scheduler.pending + scheduler.held_count + len(ended) == slots * space.per_slot

    # Nothing starves: with a host that answers, everything ends.
    for _ in range(10_000):
        if not scheduler.pending + scheduler.held_count:
            break
        now += 1.0
        for host in hosts:
            scheduler.grant(host, 3, now)
            for key in list(scheduler.held[host]):
                if scheduler.finished(host, key, VALID, now) is Verdict.COMMIT:
                    ended[key] += 1
        bury()
    assert sorted(ended) == list(range(slots * space.per_slot))
    assert set(ended.values()) <= {1}
