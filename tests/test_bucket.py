"""A bucket's rate holds over every stretch of time, and nobody waits longer than that takes.

One test: .venv/bin/pytest tests/test_bucket.py -k stretch
"""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_engine.bucket import Bucket

RATES = st.floats(0.1, 1000.0)
BURSTS = st.floats(0.5, 100.0)


@given(RATES, BURSTS, st.lists(st.tuples(st.floats(0.01, 300.0), st.floats(0.0, 5.0)), min_size=1, max_size=60))
def test_no_stretch_of_time_sees_more_than_the_rate_allows(
    rate: float, burst: float, calls: list[tuple[float, float]]
) -> None:
    bucket, now = Bucket(rate, burst), 100.0
    taken: list[tuple[float, float]] = []
    for amount, idle in calls:
        now += idle
        now += bucket.wait_s(amount, now)
        assert bucket.wait_s(amount, now) <= 1e-6
        bucket.take(amount, now)
        taken.append((now, amount))
    for first, (began, _) in enumerate(taken):
        total = 0.0
        for at, amount in taken[first:]:
            # What is larger than the burst is let through when the bucket is full, and paid for afterwards.
            assert total + min(amount, burst) <= rate * (at - began) + burst + 1e-3
            total += amount


@given(RATES, BURSTS, st.floats(0.01, 300.0))
def test_the_wait_is_no_longer_than_the_rate_needs(rate: float, burst: float, amount: float) -> None:
    bucket = Bucket(rate, burst)
    assert bucket.wait_s(amount, 0.0) == 0.0
    bucket.take(amount, 0.0)
    wait = bucket.wait_s(amount, 0.0)
    assert wait == pytest.approx(max(0.0, amount + min(amount, burst) - burst) / rate, abs=1e-6)


def test_it_saves_up_no_more_than_its_burst() -> None:
    bucket = Bucket(rate=10.0, burst=2.0)
    for _ in range(2):
        assert bucket.wait_s(1.0, 1000.0) == 0.0
        bucket.take(1.0, 1000.0)
    assert bucket.wait_s(1.0, 1000.0) == pytest.approx(0.1)


def test_what_was_not_needed_comes_back_and_what_was_taken_too_much_is_owed() -> None:
    bucket = Bucket(rate=1.0, burst=10.0)
    bucket.take(10.0, 0.0)
    bucket.give_back(4.0, 0.0)
    assert bucket.wait_s(5.0, 0.0) == pytest.approx(1.0)
    bucket.take(5.0, 1.0)
    bucket.take(6.0, 1.0)  # the usage was larger than its estimate
    assert bucket.wait_s(1.0, 1.0) == pytest.approx(7.0)


def test_another_rate_counts_from_its_moment_on() -> None:
    bucket = Bucket(rate=1.0, burst=1.0)
    bucket.take(1.0, 0.0)
    bucket.change(0.5, rate=5.0)
    assert bucket.wait_s(1.0, 0.5) == pytest.approx(0.1)
    bucket.change(0.5, rate=0.0)
    assert bucket.wait_s(1.0, 99.0) == math.inf


def test_a_clock_that_goes_back_gives_nothing_away() -> None:
    bucket = Bucket(1.0)
    bucket.take(1.0, 100.0)
    assert bucket.wait_s(1.0, 50.0) == pytest.approx(1.0)
