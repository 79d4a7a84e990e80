"""Point estimates over arrays of scores: variances, pass@k, separations. No tables, no task names.

Shapes: T tasks, m models, k attempts. NaN means "not defined", never zero. Sources and proofs: docs/rewards.md.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int64]
Bools: TypeAlias = npt.NDArray[np.bool_]
Numbers: TypeAlias = Floats | Ints


# ---- one group: s successes (or scores) of n valid


def learnability(s: Numbers, n: Ints) -> Floats:
    """Unbiased p(1-p) from s passes of n: s(n-s)/(n(n-1)); NaN below n = 2 (Rutherford et al. 2024, unbiased)."""
    s, n = np.asarray(s, np.float64), np.asarray(n)
    return ratio(s * (n - s), n * (n - 1), n >= 2)


def learnability_plugin(s: Numbers, n: Ints) -> Floats:
    """p(1-p) at p = s/n, the variance with ddof = 0: too low by (n-1)/n. Never used in a reward."""
    s, n = np.asarray(s, np.float64), np.asarray(n)
    return ratio(s * (n - s), n * n, n >= 1)


def learnability_posterior(s: Numbers, n: Ints) -> tuple[Floats, Floats]:
    """Mean and sd of p(1-p) where p ~ Beta(s + 1/2, n - s + 1/2), the posterior under Jeffreys' prior."""
    a = np.asarray(s, np.float64) + 0.5
    b = np.asarray(n, np.float64) - s + 0.5
    total = a + b
    mean = a * b / (total * (total + 1))
    second = mean * (a + 1) * (b + 1) / ((total + 2) * (total + 3))
    return mean, np.sqrt(np.maximum(second - mean * mean, 0.0))


def pass_all_k(n: Ints, c: Ints, k: int) -> Floats:
    """Unbiased probability that k attempts all pass, from c passes of n: C(c,k)/C(n,k); NaN where n < k."""
    n, c = np.broadcast_arrays(n, c)
    chance = np.ones(n.shape)
    for i in range(k):
        chance *= np.maximum(c - i, 0) / np.maximum(n - i, 1)
    return np.where(n >= k, chance, np.nan)


def pass_at_k(n: Ints, c: Ints, k: int) -> Floats:
    """Unbiased probability that one of k attempts passes: 1 - C(n-c,k)/C(n,k); NaN where n < k (Chen et al. 2021)."""
    return 1.0 - pass_all_k(n, np.asarray(n) - c, k)


def signal_probability(p: float, k: int) -> float:
    """Chance that k attempts at pass rate p hold a pass and a fail: 1/this is the cost of dynamic sampling."""
    return 1.0 - p**k - (1.0 - p) ** k


def sample_variance(values: Floats, n: Ints) -> Floats:
    """Variance with ddof = 1 over the last axis, NaN left out; exact for 0/1 scores and for constant groups."""
    valid = ~np.isnan(values)
    sums = np.where(valid, values, 0.0).sum(-1)
    deviations = np.where(valid, values - ratio(sums, n, n >= 1)[..., None], 0.0)
    binary = (~valid | (values == 0.0) | (values == 1.0)).all(-1)
    spread = np.where(constant(values), 0.0, ratio((deviations**2).sum(-1), n - 1, n >= 2))
    return np.where(n >= 2, np.where(binary, learnability(sums, n), spread), np.nan)


def constant(values: Floats) -> Bools:
    """Whether the scores along the last axis (NaN left out) do not differ by more than rounding."""
    top = np.where(np.isnan(values), -np.inf, values).max(-1, initial=-np.inf)
    bottom = np.where(np.isnan(values), np.inf, values).min(-1, initial=np.inf)
    return np.asarray(top - bottom <= 1e-12 * np.maximum(np.abs(top), np.abs(bottom)))


# ---- several models on one task: a separation is a contrast, a weighted sum of their means


def contrast(m: int) -> Floats:
    """[m] weights that turn means, strongest first, into the mean of all m(m-1)/2 differences strong - weak."""
    return (m - 1 - 2 * np.arange(m, dtype=np.float64)) / max(m * (m - 1) / 2, 1)


def between_model_variance(means: Floats, variances: Floats, n: Ints) -> Floats:
    """Unbiased variance of the true means of m models: Var_ddof1(means) - mean(s_j^2/n_j); signed, never clipped."""
    m = means.shape[-1]
    if m < 2:
        return np.full(means.shape[:-1], np.nan)
    return np.asarray(means.var(-1, ddof=1) - ratio(variances, n, n >= 1).mean(-1))


def superiority(first: Floats, second: Floats) -> Floats:
    """Mann-Whitney: P(x > y) + P(x = y)/2 of two [T, k] arrays, row by row, NaN left out; NaN where one is empty."""
    rows, ranks = len(first), np.unique(np.concatenate([first.ravel(), second.ravel()]))
    x_row, y_row = (np.nonzero(~np.isnan(values))[0] for values in (first, second))
    # One sorted axis for all rows: the row number leads, the rank of the score follows.
    x, y = (
        row * (len(ranks) + 1) + np.searchsorted(ranks, values[~np.isnan(values)])
        for row, values in ((x_row, first), (y_row, second))
    )
    y.sort()
    counts = np.bincount(y_row, minlength=rows)
    before = np.concatenate([[0], np.cumsum(counts)[:-1]]) if rows else counts
    wins = 0.5 * (np.searchsorted(y, x, "left") + np.searchsorted(y, x, "right")) - before[x_row]
    pairs = np.bincount(x_row, minlength=rows) * counts
    return ratio(np.bincount(x_row, wins, minlength=rows), pairs, pairs > 0)


def posterior_superiority(s1: int, n1: int, s2: int, n2: int) -> float:
    """P(p1 > p2) under Jeffreys' priors, by Gauss-Legendre quadrature over theta with p = sin^2(theta)."""
    nodes, weights = np.polynomial.legendre.leggauss(64 + n1 + n2)
    outer = (nodes + 1) * math.pi / 4
    inner = outer[:, None] * (nodes + 1) / 2
    below = outer / 2 * (_beta_angle(inner, s2, n2) @ weights)
    return float(weights * math.pi / 4 @ (_beta_angle(outer, s1, n1) * below))


def _beta_angle(theta: Floats, s: int, n: int) -> Floats:
    """Density of theta where sin^2(theta) ~ Beta(s + 1/2, n - s + 1/2): smooth, without poles at the ends."""
    log_beta = math.lgamma(s + 0.5) + math.lgamma(n - s + 0.5) - math.lgamma(n + 1)
    log_power = 2 * s * np.log(np.sin(theta)) + 2 * (n - s) * np.log(np.cos(theta))
    return np.asarray(2 * np.exp(log_power - log_beta))


def ratio(above: Numbers, below: Numbers, defined: Bools) -> Floats:
    """above / below where it is defined, else NaN; raises no warning."""
    return np.where(defined, above / np.where(defined, below, 1), np.nan)
