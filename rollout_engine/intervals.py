"""How sure an estimate is: intervals of separations on one task and of means over tasks, and their quantiles.

Shapes: T tasks, m models, k attempts. NaN means "not defined", never zero. Sources and coverage: docs/rewards.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from rollout_engine.estimators import Floats, Ints, Numbers, constant, contrast, ratio

SMALL = 10
"""Graded groups with fewer valid scores than this take the bootstrap, others Welch's interval."""
RESAMPLES = 999
"""With (RESAMPLES + 1) * 0.025 whole, the limits of a 95 % interval are order statistics."""
CHUNK_PRODUCTS = 250_000
"""Multiplications of one chunk of resamples: they fit the cache, and BLAS wakes no threads for them (2-9x the CPU)."""
Singles: TypeAlias = npt.NDArray[np.float32]
_SEED = 20_240_915
_MAX_DF = 1e6  # beyond it Student's t is the normal to six digits, and log-gamma differences lose theirs


# ---- one task


def separation_interval(
    values: Floats, means: Floats, variances: Floats, n: Ints, confidence: float
) -> tuple[Floats, Floats]:
    """Interval of each task's separation: [T, m, k] scores, valid ones first along k, at least one a group.

    Scores of 0 and 1 take Newcombe's interval, graded ones Welch's from SMALL scores a group on, else the
    bootstrap. A graded group whose scores are all equal shows no spread, yet has one: its task takes Newcombe's
    interval, which is conservative for any score in [0, 1], and has none (NaN) where scores lie outside.
    """
    weights = contrast(values.shape[1])
    used = weights != 0  # the model in the middle of an odd ladder has no say in the estimate
    weights, values = weights[used], values[:, used]
    means, variances, n = means[:, used], variances[:, used], n[:, used]
    missing = np.isnan(values)
    binary = (missing | (values == 0) | (values == 1)).all((1, 2))
    unit = (missing | ((values >= 0) & (values <= 1))).all((1, 2))
    flat = ~binary & constant(values).any(1)
    small = ~binary & ~flat & (n < SMALL).any(1)
    large = ~binary & ~flat & ~small
    like_binary = binary | (flat & unit)
    low, high = np.full(len(values), np.nan), np.full(len(values), np.nan)
    for rows, limits in (
        (like_binary, newcombe(weights, means[like_binary], n[like_binary], confidence)),
        (large, welch(weights, means[large], variances[large], n[large], confidence)),
        (small, bootstrap(weights, values[small], variances[small], n[small], confidence)),
    ):
        low[rows], high[rows] = limits
    reach = np.where(unit, weights[weights > 0].sum(), np.inf)
    return np.maximum(low, -reach), np.minimum(high, reach)


def wilson(mean: Floats, n: Numbers, z: float) -> tuple[Floats, Floats]:
    """Wilson's score interval of a mean of n scores in [0, 1]: exact in form for 0/1, wide for graded ones."""
    mean, n = np.asarray(mean, np.float64), np.asarray(n, np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        centre = (mean + z * z / (2 * n)) / (1 + z * z / n)
        half = z / (1 + z * z / n) * np.sqrt(np.maximum(mean * (1 - mean) / n + z * z / (4 * n * n), 0.0))
    # At means 0 and 1 the limit is the mean itself; rounding must not push it past.
    return np.clip(centre - half, 0.0, mean), np.clip(centre + half, mean, 1.0)


def newcombe(weights: Floats, means: Floats, n: Ints, confidence: float) -> tuple[Floats, Floats]:
    """Interval of a contrast of [T, m] proportions, by MOVER on Wilson limits (Zou & Donner 2008).

    With two models and weights (1, -1) it is Newcombe's hybrid score interval (1998, method 10).
    """
    low, high = wilson(means, n, normal_quantile(confidence))
    estimate = means @ weights
    down = np.where(weights > 0, means - low, high - means) * weights
    up = np.where(weights > 0, high - means, means - low) * weights
    return estimate - np.sqrt((down**2).sum(-1)), estimate + np.sqrt((up**2).sum(-1))


def welch(weights: Floats, means: Floats, variances: Floats, n: Ints, confidence: float) -> tuple[Floats, Floats]:
    """Interval of a contrast of [T, m] means with unequal variances: Welch's t, Satterthwaite's freedom."""
    estimate = means @ weights
    half = student_quantile(confidence, satterthwaite(weights, variances, n)) * _standard_error(weights, variances, n)
    return estimate - half, estimate + half


def bootstrap(weights: Floats, values: Floats, variances: Floats, n: Ints, confidence: float) -> tuple[Floats, Floats]:
    """Percentile bootstrap of a contrast of [T, m, k] scores, stretched for small n (Hesterberg 2015).

    `values` hold their n valid scores first along k. Tasks with the same n share one fixed matrix of multinomial
    weights, so that a chunk of them is one product of matrices. A resample of n scores has only (n-1)/n of their
    variance, and normal quantiles are too narrow: deviations are stretched by sqrt(n/(n-1)) and by Student's t
    over the normal's. A group of SMALL or more scores enters by its standard error and normal deviates.
    """
    means = ratio(np.nansum(values, -1), n, n >= 1)
    low, high = np.zeros(len(values)), np.zeros(len(values))
    sizes, which = np.unique(np.minimum(n, SMALL), axis=0, return_inverse=True)
    for case, size in enumerate(sizes.tolist()):
        rows = which.reshape(-1) == case
        centred, errors = values[rows] - means[rows, :, None], np.sqrt(variances[rows] / n[rows])
        parts = [
            weight * (errors[:, j : j + 1] if count >= SMALL else centred[:, j, :count] * _restore(count))
            for j, (weight, count) in enumerate(zip(weights, size, strict=True))
        ]
        shares = np.concatenate([_resampling(count, j) for j, count in enumerate(size)])
        low[rows], high[rows] = _limits(np.concatenate(parts, axis=1).astype(np.float32), shares, confidence)
    estimate = means @ weights
    stretch = student_quantile(confidence, satterthwaite(weights, variances, n)) / normal_quantile(confidence)
    return estimate + stretch * np.minimum(low, 0.0), estimate + stretch * np.maximum(high, 0.0)


def _restore(n: int) -> float:
    """What gives a resample of n scores the spread of a sample of n."""
    return math.sqrt(n / max(n - 1, 1))


def _limits(deviations: Singles, shares: Singles, confidence: float) -> tuple[Floats, Floats]:
    """Order statistics of [T, scores] x [scores, RESAMPLES] at both ends of the interval."""
    tail = max(int((RESAMPLES + 1) * (1 - confidence) / 2 + 1e-9), 1) - 1
    ends = np.empty((len(deviations), 2))
    step = max(CHUNK_PRODUCTS // shares.size, 1)
    for start in range(0, len(deviations), step):
        resampled = deviations[start : start + step] @ shares
        resampled.sort(axis=1)
        ends[start : start + step] = resampled[:, [tail, RESAMPLES - 1 - tail]]
    return ends[:, 0], ends[:, 1]


@lru_cache(maxsize=64)
def _resampling(n: int, model: int) -> Singles:
    """[n, RESAMPLES] shares of each score in each resample, or [1, RESAMPLES] normal deviates from SMALL on.

    Single precision is plenty, and models draw independently of each other.
    """
    random = np.random.default_rng((_SEED, model, n))
    if n >= SMALL:
        return random.standard_normal((1, RESAMPLES), np.float32)
    return np.ascontiguousarray(random.multinomial(n, [1 / n] * n, size=RESAMPLES).T / n, dtype=np.float32)


def _standard_error(weights: Floats, variances: Floats, n: Ints) -> Floats:
    return np.asarray(np.sqrt(ratio(weights**2 * variances, n, n >= 1).sum(-1)))


def satterthwaite(weights: Floats, variances: Floats, n: Ints) -> Floats:
    """Degrees of freedom of a contrast's variance estimate; 1 where there is no variance at all."""
    parts = ratio(weights**2 * variances, n, n >= 1)
    below = (parts**2 / np.maximum(n - 1, 1)).sum(-1)
    return np.where(below > 0, ratio(parts.sum(-1) ** 2, below, below > 0), 1.0)


# ---- many tasks: attempts of one task are alike, so tasks are the units (clusters)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over tasks; None where it is not defined."""

    value: float | None
    se: float | None
    """Standard error, clustered by task; None below two tasks."""
    low: float | None
    high: float | None
    n: int
    """Tasks that it rests on."""


def cluster_means(values: Floats, clusters: Ints, size: int) -> Floats:
    """[size] mean of the finite values of each cluster; NaN for a cluster without any."""
    there = np.isfinite(values)
    counts = np.bincount(clusters[there], minlength=size)
    return ratio(np.bincount(clusters[there], values[there], minlength=size), counts, counts > 0)


def estimate_mean(means: Floats, confidence: float, unit: bool = False) -> Estimate:
    """Mean of task means with its standard error sd/sqrt(T) and interval.

    The interval is Student's t; for means of scores in [0, 1] (`unit`) it is Wilson's with the effective number
    of scores mean(1-mean)/se^2, which stays within [0, 1] and keeps its width where every task agrees.
    """
    means = means[~np.isnan(means)]
    count = len(means)
    if count < 2:
        return Estimate(float(means[0]) if count else None, None, None, None, count)
    mean, se = float(means.mean()), _se(means)
    t = float(student_quantile(confidence, count - 1))
    if unit:
        effective = mean * (1 - mean) / se**2 if se > 0 else float(count)
        low, high = wilson(np.array([mean]), np.array([effective]), t)
        return Estimate(mean, se, float(low[0]), float(high[0]), count)
    if se == 0:
        return Estimate(mean, se, None, None, count)
    return Estimate(mean, se, mean - t * se, mean + t * se, count)


def estimate_contrast(weights: Floats, means: Floats, confidence: float, unit: bool = False) -> Estimate:
    """Mean of each task's contrast of its [T, m] means, paired by task; tasks with a NaN are left out.

    Where no task differs from another there is no spread to see: scores in [0, 1] (`unit`) then take Newcombe's
    interval with the tasks as n, as if they were not paired, which is conservative; others have none.
    """
    means = means[~np.isnan(means).any(1)]
    estimate = estimate_mean(means @ weights, confidence)
    if estimate.se != 0 or not unit:
        return estimate
    low, high = newcombe(weights, means.mean(0)[None], np.full((1, len(weights)), estimate.n), confidence)
    return Estimate(estimate.value, estimate.se, float(low[0]), float(high[0]), estimate.n)


def _se(means: Floats) -> float:
    return 0.0 if constant(means) else float(means.std(ddof=1) / math.sqrt(len(means)))


# ---- quantiles


def normal_quantile(confidence: float) -> float:
    """z of a two-sided interval: 1.96 at 0.95."""
    return NormalDist().inv_cdf((1 + confidence) / 2)


def student_quantile(confidence: float, df: Numbers | float) -> Floats:
    """t of a two-sided interval for each df >= 1 (need not be whole): 4.303 at 0.95 and df = 2."""
    log_t: Floats = _student_series(confidence)(1 / np.asarray(df, np.float64))
    return np.asarray(np.exp(log_t))


@lru_cache(maxsize=16)
def _student_series(confidence: float) -> np.polynomial.Chebyshev:
    """log t as a polynomial in 1/df over [0, 1]: right to 1e-7, and cheap for a million tasks."""
    return np.polynomial.Chebyshev.interpolate(
        lambda inverse: np.log(_student_exact(confidence, 1 / np.maximum(inverse, 1 / _MAX_DF))), 24, domain=[0, 1]
    )


def _student_exact(confidence: float, df: Floats) -> Floats:
    """Solves the distribution function of t for [D] degrees of freedom.

    With t = sqrt(df) tan(theta) the density is cos(theta)^(df-1) / B(1/2, df/2). Its integral from 0 is concave,
    so Newton's steps from the normal's quantile, which lies left of the root, rise to it and never pass it.
    """
    nodes, weights = np.polynomial.legendre.leggauss(48)
    log_beta = [math.lgamma(0.5) + math.lgamma(f / 2) - math.lgamma((f + 1) / 2) for f in df]
    target = confidence / 2 * np.exp(np.array(log_beta))
    theta = np.arctan(normal_quantile(confidence) / np.sqrt(df))
    for _ in range(40):
        points = theta[:, None] * (nodes + 1) / 2
        integral = theta / 2 * (np.cos(points) ** (df[:, None] - 1) @ weights)
        theta += (target - integral) / np.cos(theta) ** (df - 1)
    return np.asarray(np.sqrt(df) * np.tan(theta))
