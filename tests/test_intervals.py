"""Intervals and quantiles: published values, coverage by simulation, and no false certainty.

.venv/bin/pytest tests/test_intervals.py
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_engine import estimators as e
from rollout_engine import intervals as i

PROPERTY = settings(max_examples=60, database=None, derandomize=True)


def of_task(first: list[float], second: list[float], confidence: float = 0.95) -> tuple[float, float]:
    """The interval of one task's separation."""
    k = max(len(first), len(second))
    values = np.array([[[*sorted(group), *[np.nan] * (k - len(group))] for group in (first, second)]])
    low, high = of_tasks(values, np.array([[len(first), len(second)]]), confidence)
    return float(low[0]), float(high[0])


def of_tasks(values: np.ndarray, n: np.ndarray, confidence: float = 0.95) -> tuple[np.ndarray, np.ndarray]:
    means = np.nansum(values, -1) / n
    return i.separation_interval(values, means, e.sample_variance(values, n), n, confidence)


@pytest.mark.parametrize(
    ("first", "second", "n", "low", "high"),
    [(4, 0, 4, 0.307, 1.0), (3, 1, 4, -0.135, 0.789), (8, 0, 8, 0.541, 1.0), (0, 0, 4, -0.49, 0.49)],
)
def test_binary_scores_take_newcombes_interval(first: int, second: int, n: int, low: float, high: float) -> None:
    found = of_task([1.0] * first + [0.0] * (n - first), [1.0] * second + [0.0] * (n - second))
    assert found == pytest.approx((low, high), abs=6e-4)


def test_newcombes_own_example() -> None:
    """Newcombe 1998, table II, (a) 56/70 - 48/80 with method 10: 0.0524 to 0.3339."""
    low, high = i.newcombe(e.contrast(2), np.array([[56 / 70, 48 / 80]]), np.array([[70, 80]]), 0.95)
    assert (low[0], high[0]) == pytest.approx((0.0524, 0.3339), abs=5e-5)


@pytest.mark.parametrize(
    ("confidence", "df", "t"),
    [
        (0.95, 1, 12.7062),
        (0.95, 2, 4.30265),
        (0.95, 9, 2.26216),
        (0.95, 30, 2.04227),
        (0.95, 1e9, 1.95996),
        (0.99, 10, 3.16927),
        (0.90, 4, 2.13185),
        (0.999, 1, 636.619),
    ],
)
def test_student_quantile_has_the_printed_values(confidence: float, df: float, t: float) -> None:
    assert float(i.student_quantile(confidence, df)) == pytest.approx(t, rel=3e-6)


def test_welch_interval_has_the_textbook_form() -> None:
    rng = np.random.default_rng(2)
    x, y = rng.random(10), rng.random(12)
    a, b = x.var(ddof=1) / 10, y.var(ddof=1) / 12
    df = (a + b) ** 2 / (a**2 / 9 + b**2 / 11)
    half = float(i.student_quantile(0.95, df)) * np.sqrt(a + b)
    assert of_task(x.tolist(), y.tolist()) == pytest.approx((x.mean() - y.mean() - half, x.mean() - y.mean() + half))


GRADED = {
    "uniform": lambda rng, size: rng.random(size),
    "skewed": lambda rng, size: rng.beta(2, 8, size),
    "thirds": lambda rng, size: rng.integers(0, 4, size) / 3,
}


@pytest.mark.parametrize("name", GRADED)
@pytest.mark.parametrize(("n", "other"), [(3, 3), (4, 4), (4, 8), (8, 8), (9, 12), (12, 12)])
def test_graded_intervals_cover_the_truth(name: str, n: int, other: int) -> None:
    """1,200 tasks whose models do not differ: bootstrap below 10 scores, Welch's from 10 on."""
    rng = np.random.default_rng(n * 100 + other)
    values = np.full((1200, 2, other), np.nan)
    values[:, 0, :n], values[:, 1] = GRADED[name](rng, (1200, n)), GRADED[name](rng, (1200, other))
    low, high = of_tasks(values, np.tile([n, other], (1200, 1)))
    assert 0.925 <= np.mean((low <= 0) & (high >= 0)) <= 0.99


@pytest.mark.parametrize(("m", "n"), [(2, 8), (3, 8), (4, 5), (5, 16)])
def test_binary_intervals_cover_the_truth_for_any_number_of_models(m: int, n: int) -> None:
    """3,000 tasks, each with its own rates: Newcombe's interval holds its level on average, not at every rate."""
    rng = np.random.default_rng(3)
    rates = rng.random((3000, m))
    values = np.sort((rng.random((3000, m, n)) < rates[..., None]).astype(float), -1)
    low, high = of_tasks(values, np.full((3000, m), n))
    truth = rates @ e.contrast(m)
    assert 0.935 <= np.mean((low <= truth) & (truth <= high)) <= 0.98


def test_equal_graded_scores_are_no_certainty() -> None:
    low, high = of_task([0.5, 0.5, 0.5], [0.5, 0.5, 0.5])
    assert low < -0.3
    assert high > 0.3
    assert np.isnan(of_task([5.0, 5.0], [2.0, 3.0])).all()


@PROPERTY
@given(
    st.lists(st.sampled_from([0.0, 0.2, 0.5, 0.7, 1.0]), min_size=1, max_size=12),
    st.lists(st.sampled_from([0.0, 0.2, 0.5, 0.7, 1.0]), min_size=1, max_size=12),
    st.sampled_from([0.5, 0.9, 0.95, 0.99]),
)
def test_intervals_hold_their_estimate_within_reach(first: list[float], second: list[float], confidence: float) -> None:
    low, high = of_task(first, second, confidence)
    assert -1 <= low <= np.mean(first) - np.mean(second) + 1e-9
    assert np.mean(first) - np.mean(second) - 1e-9 <= high <= 1


def test_the_bootstrap_is_the_same_on_every_call_and_alone_as_in_company() -> None:
    values = np.sort(np.random.default_rng(4).random((700, 2, 5)), -1)
    n = np.full((700, 2), 5)
    low, high = of_tasks(values, n)
    again, _ = of_tasks(values, n)
    alone, alone_high = of_tasks(values[650:651], n[650:651])
    assert low.tolist() == again.tolist()
    assert (alone[0], alone_high[0]) == pytest.approx((low[650], high[650]), abs=1e-6)


def test_wilson_interval_stays_within_bounds() -> None:
    low, high = i.wilson(np.array([0.0, 1.0, 0.5]), np.array([10, 10, 10]), 1.959964)
    assert low == pytest.approx([0, 0.7225, 0.2366], abs=1e-4)
    assert high == pytest.approx([0.2775, 1, 0.7634], abs=1e-4)


def test_the_mean_over_tasks_counts_tasks_not_attempts() -> None:
    """Attempts that repeat each other add nothing: eight copies leave the standard error as it was."""
    tasks = np.arange(40)
    once = np.random.default_rng(5).integers(0, 2, 40).astype(float)
    copies = i.cluster_means(np.repeat(once, 8), np.repeat(tasks, 8), 40)
    estimate = i.estimate_mean(copies, 0.95)
    assert estimate == i.estimate_mean(once, 0.95)
    assert estimate.se == pytest.approx(once.std(ddof=1) / np.sqrt(40))


def test_the_mean_over_tasks_covers_the_truth() -> None:
    """25 tasks of 4 attempts whose rates differ; the attempts alone would promise far too much."""
    rng = np.random.default_rng(6)
    hits = []
    for _ in range(600):
        rates = rng.beta(0.6, 0.3, 25)
        estimate = i.estimate_mean(rng.binomial(4, rates) / 4, 0.95, unit=True)
        assert estimate.low is not None
        assert estimate.high is not None
        assert 0 <= estimate.low <= estimate.high <= 1
        hits.append(estimate.low <= 2 / 3 <= estimate.high)
    assert 0.925 <= np.mean(hits) <= 0.975


def test_the_mean_over_few_or_agreeing_tasks() -> None:
    assert i.estimate_mean(np.array([np.nan]), 0.95) == i.Estimate(None, None, None, None, 0)
    assert i.estimate_mean(np.array([0.5, np.nan]), 0.95) == i.Estimate(0.5, None, None, None, 1)
    assert i.estimate_mean(np.array([3.0, 3.0]), 0.95) == i.Estimate(3.0, 0.0, None, None, 2)
    agreed = i.estimate_mean(np.ones(20), 0.95, unit=True)
    assert agreed.low == pytest.approx(20 / (20 + 2.093024**2), abs=1e-5)


def test_paired_differences_take_t_and_fall_back_where_they_do_not_vary() -> None:
    first, second = np.array([1.0, 1, 0, 1, 0.5]), np.array([0.0, 1, 0, 0.5, 0.5])
    differences = first - second
    estimate = i.estimate_contrast(e.contrast(2), np.stack([first, second], 1), 0.95, unit=True)
    half = 2.776445 * differences.std(ddof=1) / np.sqrt(5)
    assert estimate.low == pytest.approx(differences.mean() - half, abs=1e-6)
    flat = i.estimate_contrast(e.contrast(2), np.ones((20, 2)), 0.95, unit=True)
    assert flat.value == 0
    assert flat.low == pytest.approx(-0.1611, abs=1e-4)
    assert i.estimate_contrast(e.contrast(2), np.full((20, 2), 7.0), 0.95).low is None
