"""Point estimates: the reference's test values, unbiasedness, and what null means.

.venv/bin/pytest tests/test_estimators.py
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_engine import estimators as e

PROPERTY = settings(max_examples=60, database=None, derandomize=True)
scores = st.lists(st.sampled_from([0.0, 0.1, 0.25, 0.5, 1.0]), min_size=2, max_size=9)


def binomial(n: int, p: float) -> np.ndarray:
    """[n + 1] chance of each number of passes."""
    return np.array([math.comb(n, s) * p**s * (1 - p) ** (n - s) for s in range(n + 1)])


def counts(n: int) -> tuple[np.ndarray, np.ndarray]:
    return np.arange(n + 1), np.full(n + 1, n)


@pytest.mark.parametrize("n", [2, 3, 4, 8])
@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9])
def test_learnability_is_unbiased(n: int, p: float) -> None:
    assert binomial(n, p) @ e.learnability(*counts(n)) == pytest.approx(p * (1 - p), abs=1e-12)


@pytest.mark.parametrize(("n", "factor"), [(2, 0.5), (4, 0.75), (8, 0.875)])
def test_plugin_learnability_is_too_low_by_a_factor_that_depends_on_n(n: int, factor: float) -> None:
    expected = binomial(n, 0.3) @ e.learnability_plugin(*counts(n))
    assert expected == pytest.approx(factor * 0.3 * 0.7)
    assert e.learnability_plugin(*counts(n)) == pytest.approx(factor * e.learnability(*counts(n)))


@pytest.mark.parametrize(("n", "highest", "sd"), [(4, 1 / 3, 0.102), (8, 2 / 7, 0.047)])
def test_range_and_spread_of_learnability(n: int, highest: float, sd: float) -> None:
    values, chance = e.learnability(*counts(n)), binomial(n, 0.5)
    assert values.max() == pytest.approx(highest)
    assert math.sqrt(chance @ values**2 - (chance @ values) ** 2) == pytest.approx(sd, abs=5e-4)


def test_learnability_is_null_below_two_scores() -> None:
    assert np.isnan(e.learnability(np.array([0, 0, 1]), np.array([0, 1, 1]))).all()
    assert np.isnan(e.sample_variance(np.array([[np.nan, np.nan], [1.0, np.nan]]), np.array([0, 1]))).all()


def test_posterior_learnability_has_the_reference_values() -> None:
    mean, sd = e.learnability_posterior(*counts(4))
    assert mean == pytest.approx([0.075, 0.175, 0.2083, 0.175, 0.075], abs=5e-5)
    assert sd == pytest.approx([0.0736, 0.0673, 0.0466, 0.0673, 0.0736], abs=5e-5)
    assert e.learnability_posterior(np.array([0, 1]), np.array([1, 1]))[0] == pytest.approx([0.125, 0.125])
    assert e.learnability_posterior(np.array([0]), np.array([8]))[0] == pytest.approx([0.0472], abs=5e-5)


@pytest.mark.parametrize(("k", "chance"), [(4, 0.344), (8, 0.570), (16, 0.815)])
def test_signal_probability_has_the_reference_values(k: int, chance: float) -> None:
    assert e.signal_probability(0.1, k) == pytest.approx(chance, abs=5e-4)


@pytest.mark.parametrize(("n", "k"), [(4, 1), (4, 4), (8, 3)])
def test_pass_at_k_and_pass_all_k_are_unbiased(n: int, k: int) -> None:
    chance, (c, sizes) = binomial(n, 0.3), counts(n)
    assert chance @ e.pass_at_k(sizes, c, k) == pytest.approx(1 - 0.7**k)
    assert chance @ e.pass_all_k(sizes, c, k) == pytest.approx(0.3**k)


def test_pass_at_k_of_exactly_k_attempts_and_of_fewer() -> None:
    c, n = counts(4)
    assert e.pass_at_k(n, c, 4).tolist() == [0, 1, 1, 1, 1]
    assert e.pass_all_k(n, c, 4).tolist() == [0, 0, 0, 0, 1]
    assert np.isnan(e.pass_at_k(np.array([3, 0]), np.array([3, 0]), 4)).all()


@PROPERTY
@given(scores)
def test_sample_variance_is_numpys_and_half_the_mean_squared_difference(values: list[float]) -> None:
    padded = np.array([[*values, np.nan, np.nan]])
    variance = e.sample_variance(padded, np.array([len(values)]))[0]
    pairs = [(x - y) ** 2 / 2 for x, y in itertools.permutations(values, 2)]
    assert variance == pytest.approx(np.var(values, ddof=1), abs=1e-12)
    assert variance == pytest.approx(np.mean(pairs), abs=1e-12)


def test_equal_scores_have_no_variance_at_all() -> None:
    assert e.sample_variance(np.full((1, 3), 0.1), np.array([3]))[0] == 0.0
    assert e.constant(np.array([[0.3, 0.1 + 0.2], [0.3, 0.4], [np.nan, np.nan]])).tolist() == [True, False, True]


def test_contrast_is_the_mean_of_all_ordered_differences() -> None:
    means = np.array([0.9, 0.4, 0.6, 0.1])
    differences = [means[i] - means[j] for i, j in itertools.combinations(range(4), 2)]
    assert means @ e.contrast(4) == pytest.approx(np.mean(differences))
    assert e.contrast(2).tolist() == [1, -1]


def _between(rates: list[float], n: int) -> tuple[float, float]:
    """Mean and standard error of the estimate over simulated tasks."""
    rng = np.random.default_rng(0)
    values = (rng.random((20_000, len(rates), n)) < np.array(rates)[None, :, None]).astype(float)
    sizes = np.full(values.shape[:2], n)
    estimates = e.between_model_variance(values.mean(-1), e.sample_variance(values, sizes), sizes)
    assert (estimates < 0).any()
    return float(estimates.mean()), float(estimates.std() / math.sqrt(len(estimates)))


@pytest.mark.parametrize("rates", [[0.5, 0.5, 0.5], [0.8, 0.5, 0.2], [0.9, 0.1]])
def test_between_model_variance_is_unbiased_and_signed(rates: list[float]) -> None:
    mean, error = _between(rates, 4)
    assert mean == pytest.approx(np.var(rates, ddof=1), abs=3.5 * error)


@pytest.mark.parametrize(("m", "spread"), [(2, 0.273), (3, 0.409), (5, 0.557)])
def test_why_max_minus_min_is_no_reward(m: int, spread: float) -> None:
    """Models that do not differ at all, k = 4: the spread of their rates grows with m, ours stays at 0."""
    below = np.cumsum(binomial(4, 0.5))
    expected = sum(1 - below[s] ** m - (1 - below[s]) ** m for s in range(4)) / 4
    assert expected == pytest.approx(spread, abs=3e-3)  # the reference simulated them
    mean, error = _between([0.5] * m, 4)
    assert abs(mean) < 3.5 * error


def test_between_model_variance_needs_two_models() -> None:
    assert np.isnan(e.between_model_variance(np.ones((3, 1)), np.zeros((3, 1)), np.full((3, 1), 4))).all()


@PROPERTY
@given(scores, scores, st.randoms(use_true_random=False))
def test_superiority_counts_pairs(first: list[float], second: list[float], random: object) -> None:
    pairs = [(x > y) + 0.5 * (x == y) for x in first for y in second]
    random.shuffle(first)  # type: ignore[attr-defined]
    x = np.array([[np.nan] * 9, [*first, *[np.nan] * (9 - len(first))]])
    y = np.array([[0.0] * 9, [*second, *[np.nan] * (9 - len(second))]])
    forward, backward = e.superiority(x, y), e.superiority(y, x)
    assert np.isnan(forward[0])
    assert forward[1] == pytest.approx(np.mean(pairs))
    assert forward[1] + backward[1] == pytest.approx(1.0)


def test_superiority_of_binary_scores_is_a_half_and_half_the_separation() -> None:
    rng = np.random.default_rng(1)
    x, y = (rng.integers(0, 2, (200, 5)).astype(float) for _ in range(2))
    assert e.superiority(x, y) == pytest.approx(0.5 + (x.mean(1) - y.mean(1)) / 2)


@pytest.mark.parametrize(
    ("case", "chance"),
    [
        ((4, 4, 0, 4), 0.999),
        ((3, 4, 1, 4), 0.922),
        ((2, 4, 2, 4), 0.5),
        ((4, 4, 3, 4), 0.839),
        ((1, 1, 0, 1), 0.905),
    ],
)
def test_posterior_superiority_has_the_reference_values(case: tuple[int, int, int, int], chance: float) -> None:
    s1, n1, s2, n2 = case
    assert e.posterior_superiority(*case) == pytest.approx(chance, abs=5.5e-4)
    assert e.posterior_superiority(s2, n2, s1, n1) == pytest.approx(1 - e.posterior_superiority(*case))
