"""From scores to rewards: pure functions on tables, so that re-scoring never runs an agent again.

rollouts table -> scores_from_rollouts -> Scores -> groups_table    one row per round x task x model
                                                 -> rewards_table   one row per round x task
                                                 -> summary         one figure per model and pair, with its interval

A score that is not there is null (NaN in arrays), with a reason, and never zero. Formulas: docs/rewards.md.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rollout_engine import estimators, intervals
from rollout_engine.config import RewardSpec
from rollout_engine.errors import InputError
from rollout_engine.estimators import Bools, Floats
from rollout_engine.groups import GROUPS, Groups, arrow, causes, groups_table, measure, texts
from rollout_engine.intervals import Estimate
from rollout_engine.schema import METADATA
from rollout_engine.scores import Kind, Scores, kind_codes, scores_from_rollouts
from rollout_engine.summaries import ModelSummary, PairSummary, Summary, summarise

__all__ = [
    "GROUPS",
    "REWARDS",
    "Estimate",
    "Kind",
    "ModelSummary",
    "PairSummary",
    "Scores",
    "Summary",
    "groups_table",
    "kind_codes",
    "rewards_table",
    "scores_from_rollouts",
    "summary",
]

REWARDS = pa.schema(
    [
        ("round", pa.int32()),
        ("task_id", pa.string()),
        ("separation", pa.float64()),
        ("separation_low", pa.float64()),
        ("separation_high", pa.float64()),
        ("superiority", pa.float64()),
        ("between_model_variance", pa.float64()),
        ("learnability", pa.float64()),
        ("validity", pa.float64()),
        ("reward", pa.float64()),
        ("coverage", pa.float64()),
        ("null_reason", pa.string()),
    ],
    metadata=METADATA,
)
"""One row per round x task."""


@dataclass(frozen=True)
class _Parts:
    """The parts of every slot's reward; all arrays are [n]."""

    separation: Floats
    superiority: Floats
    between_model_variance: Floats
    learnability: Floats
    validity: Floats
    reward: Floats


def rewards_table(scores: Scores, spec: RewardSpec, validity: npt.NDArray[Any] | None = None) -> pa.Table:
    """One row per slot. Schema: REWARDS. `validity` [n] in [0, 1], NaN where unknown; None: all tasks are valid."""
    with np.errstate(over="ignore", invalid="ignore"):
        groups = measure(scores, spec)
        parts = _parts(scores, groups, spec, validity)
        low, high = _separation_limits(groups, parts.separation, spec)
    columns = {
        **{field.name: getattr(parts, field.name) for field in dataclasses.fields(parts)},
        "round": scores.rounds,
        "separation_low": low,
        "separation_high": high,
        "coverage": groups.valid.sum(1) / (len(scores.models) * scores.k),
        "null_reason": _slot_reasons(scores, groups, parts, np.isnan(low) & ~np.isnan(parts.separation), spec),
    }
    arrays = {"task_id": scores.task_ids}
    return pa.table([arrays.get(f.name, arrow(columns.get(f.name), f.type)) for f in REWARDS], schema=REWARDS)


def summary(scores: Scores, spec: RewardSpec, validity: npt.NDArray[Any] | None = None) -> Summary:
    """Means over tasks with standard errors clustered by task (rounds and attempts of one task are alike)."""
    with np.errstate(over="ignore", invalid="ignore"):
        groups = measure(scores, spec)
        parts = _parts(scores, groups, spec, validity)
        fit, between = ~np.isnan(parts.separation), parts.between_model_variance
        return summarise(scores, groups, spec, fit=fit, between=between, reward=parts.reward)


def _parts(scores: Scores, groups: Groups, spec: RewardSpec, validity: npt.NDArray[Any] | None) -> _Parts:
    n, m = len(scores.task_ids), len(scores.models)
    sound = groups.sound.all(1)
    ladder: Bools = sound & np.full(n, spec.ordered and m > 1)
    between = estimators.between_model_variance(groups.mean, groups.variance, groups.valid)
    separation = np.where(ladder, groups.mean @ estimators.contrast(m), math.nan)
    between = np.where(sound, between, math.nan)
    learnability = groups.learnability[:, _policy(scores.models, spec)]
    known = np.ones(n) if validity is None else np.asarray(validity, np.float64)
    if known.shape != (n,):
        raise ValueError(f"validity has shape {known.shape}, not {(n,)}")
    terms = [(spec.w_learnability, learnability)]
    if m > 1:
        terms.append((spec.alpha, separation if spec.ordered else between))
    return _Parts(separation, _superiority(groups, ladder), between, learnability, known, _reward(known, terms))


def _policy(models: Sequence[str], spec: RewardSpec) -> int:
    """Whose learnability counts: the named model's, else the last, which is the weakest."""
    if spec.policy is None:
        return len(models) - 1
    if spec.policy not in models:
        raise InputError(f"rewards.policy {spec.policy!r} is none of the models {list(models)}")
    return list(models).index(spec.policy)


def _reward(validity: Floats, terms: list[tuple[float, Floats]]) -> Floats:
    """validity x weighted sum. A term of weight 0 is absent; an invalid task earns 0 whatever its terms are."""
    present = [weight * values for weight, values in terms if weight != 0]
    total = np.sum(present, axis=0) if present else np.full(len(validity), math.nan)
    return np.where(validity == 0, 0.0, validity * total)


def _superiority(groups: Groups, rows: Bools) -> Floats:
    """[n] mean over all ordered pairs of models."""
    pairs = list(combinations(range(groups.mean.shape[1]), 2))
    each = [groups.superiority(first, second, rows) for first, second in pairs]
    return np.mean(each, axis=0) if each else np.full(len(rows), math.nan)


def _separation_limits(groups: Groups, separation: Floats, spec: RewardSpec) -> tuple[Floats, Floats]:
    low, high = np.full(len(separation), math.nan), np.full(len(separation), math.nan)
    rows = ~np.isnan(separation)
    if rows.any():
        arrays = (groups.values[rows], groups.mean[rows], groups.variance[rows], groups.valid[rows])
        low[rows], high[rows] = intervals.separation_interval(*arrays, spec.confidence)
    return low, high


def _slot_reasons(
    scores: Scores, groups: Groups, parts: _Parts, no_limits: Bools, spec: RewardSpec
) -> npt.NDArray[Any]:
    """[n] text or None for the table of rewards; columns that the run's design leaves empty are no reason."""

    def text(no_interval: int, unknown: int, *counts: int) -> str | None:
        found = [
            f"{model}: {cause}"
            for j, model in enumerate(scores.models)
            for cause in causes(counts[2 * j], counts[2 * j + 1], scores.k, spec)
        ]
        if no_interval:
            found.append("scores that do not vary and lie outside [0, 1] give no interval")
        if unknown:
            found.append("validity is unknown")
        return "; ".join(found) or None

    counts = np.stack([groups.valid, groups.verifier_errors], axis=-1).reshape(len(no_limits), 2 * len(scores.models))
    return texts(np.column_stack([no_limits, np.isnan(parts.validity), counts]), text)
