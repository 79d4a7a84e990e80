"""What a whole run says of its models: means over tasks, with the tasks as the units of uncertainty."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from rollout_engine import intervals
from rollout_engine.config import RewardSpec
from rollout_engine.estimators import Bools, Floats, Ints, contrast
from rollout_engine.groups import Groups, group_columns
from rollout_engine.intervals import Estimate
from rollout_engine.scores import Scores, to_numpy


@dataclass(frozen=True, slots=True)
class ModelSummary:
    """One model over all tasks. Each task counts once, however many of its attempts are valid."""

    model: str
    requested: int
    valid: int
    verifier_errors: int
    failed: int
    cancelled: int
    pending: int
    coverage: float | None
    mean_score: Estimate
    mean_score_worst: float | None
    """Every rollout without a score counted as 0."""
    mean_score_best: float | None
    """Every rollout without a score counted as 1."""
    pass_at_1: Estimate
    k: int
    pass_at_k: Estimate
    pass_all_k: Estimate
    learnability: Estimate


@dataclass(frozen=True, slots=True)
class PairSummary:
    """Two models over the tasks on which both are fit for a reward, paired by task."""

    first: str
    second: str
    separation: Estimate
    """Mean score of the first minus that of the second."""
    superiority: Estimate


@dataclass(frozen=True, slots=True)
class Summary:
    """A run in figures. The values of `separation` are None where models are not ordered or there is one."""

    tasks: int
    slots: int
    k: int
    ordered: bool
    confidence: float
    requested: int
    valid: int
    coverage: float | None
    models: list[ModelSummary]
    pairs: list[PairSummary]
    separation: Estimate
    between_model_variance: Estimate
    reward: Estimate

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, dicts, numbers and None, fit for JSON."""
        return dataclasses.asdict(self)


def summarise(
    scores: Scores, groups: Groups, spec: RewardSpec, *, fit: Bools, between: Floats, reward: Floats
) -> Summary:
    """The summary of a run. `fit` [n]: slots with a separation; between, reward [n]: NaN where null."""
    over = _OverTasks(scores, spec.confidence, unit=bool(groups.unit.all()))
    everyone = list(range(len(scores.models)))
    columns = group_columns(scores, groups, spec)
    valid = int(groups.valid.sum())
    return Summary(
        tasks=over.size,
        slots=len(scores.task_ids),
        k=scores.k,
        ordered=spec.ordered,
        confidence=spec.confidence,
        requested=scores.kinds.size,
        valid=valid,
        coverage=_part(valid, scores.kinds.size),
        models=[_model_summary(name, j, scores.k, columns, over) for j, name in enumerate(scores.models)],
        pairs=[_pair_summary(i, j, scores, groups, over) for i, j in combinations(everyone, 2)],
        separation=over.separation(groups.mean, everyone, fit),
        between_model_variance=over.mean(between),
        reward=over.mean(reward),
    )


class _OverTasks:
    """Means over tasks of arrays over slots. `unit`: all scores of the run lie in [0, 1]."""

    def __init__(self, scores: Scores, confidence: float, unit: bool) -> None:
        encoded = pc.dictionary_encode(scores.task_ids)
        self.tasks: Ints = to_numpy(encoded.indices).astype(np.int64)
        self.size = len(encoded.dictionary)
        self.confidence, self.unit = confidence, unit

    def mean(self, values: Floats, unit: bool = False) -> Estimate:
        """Of [n] values, each task once; `unit` where the values are means of numbers in [0, 1]."""
        means = intervals.cluster_means(values, self.tasks, self.size)
        return intervals.estimate_mean(means, self.confidence, unit)

    def separation(self, means: Floats, models: list[int], fit: Bools) -> Estimate:
        """Mean of all ordered differences between these models over the slots that are fit."""
        columns = [np.where(fit, means[:, j], math.nan) for j in models]
        by_task = [intervals.cluster_means(column, self.tasks, self.size) for column in columns]
        return intervals.estimate_contrast(contrast(len(models)), np.stack(by_task, 1), self.confidence, self.unit)


def _model_summary(name: str, j: int, k: int, columns: dict[str, npt.NDArray[Any]], over: _OverTasks) -> ModelSummary:
    column = {key: values[:, j] for key, values in columns.items()}
    counts = {key: int(values.sum()) for key, values in column.items() if key.startswith("n_")}
    return ModelSummary(
        model=name,
        requested=counts["n_requested"],
        valid=counts["n_valid"],
        verifier_errors=counts["n_verifier_error"],
        failed=counts["n_failed"],
        cancelled=counts["n_cancelled"],
        pending=counts["n_pending"],
        coverage=_part(counts["n_valid"], counts["n_requested"]),
        mean_score=over.mean(column["mean_score"], over.unit),
        mean_score_worst=over.mean(column["mean_score_low"]).value if over.unit else None,
        mean_score_best=over.mean(column["mean_score_high"]).value if over.unit else None,
        pass_at_1=over.mean(column["pass_rate"], unit=True),
        k=k,
        pass_at_k=over.mean(column["pass_at_k"], unit=True),
        pass_all_k=over.mean(column["pass_all_k"], unit=True),
        learnability=over.mean(column["learnability"]),
    )


def _pair_summary(i: int, j: int, scores: Scores, groups: Groups, over: _OverTasks) -> PairSummary:
    both = groups.sound[:, i] & groups.sound[:, j]
    return PairSummary(
        first=scores.models[i],
        second=scores.models[j],
        separation=over.separation(groups.mean, [i, j], both),
        superiority=over.mean(groups.superiority(i, j, both), unit=True),
    )


def _part(count: int, whole: int) -> float | None:
    return count / whole if whole else None
