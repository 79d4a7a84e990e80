"""What a generated task is worth: valid or not and why, its scores by model, and its reward. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from rollout_engine.config import RunConfig
from rollout_engine.probe import TASKS_OWN, Finding, Probe
from rollout_engine.results import Group
from rollout_engine.rewards import groups_table, rewards_table
from rollout_engine.scores import Scores, kind_codes


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One task by all models. A number that cannot be known is None, and `reasons` or `null_reason` say why."""

    task_id: str
    validity: float | None
    """1.0 valid, 0.0 not valid, None: it could not be checked."""
    reasons: tuple[str, ...] = ()
    """Why it is not valid, or could not be checked."""
    scores: Mapping[str, list[float | None]] = field(default_factory=dict)
    """Model -> one score per attempt; an empty list for each model where nothing was run."""
    failures: Mapping[str, int] = field(default_factory=dict)
    """`boundary:type` -> rollouts without a score."""
    learnability: Mapping[str, float | None] = field(default_factory=dict)
    separation: float | None = None
    separation_low: float | None = None
    separation_high: float | None = None
    superiority: float | None = None
    reward: float | None = None
    coverage: float | None = None
    null_reason: str | None = None

    @property
    def valid(self) -> bool:
        return self.validity == 1.0

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON."""
        return asdict(self)


def judge(probe: Probe) -> tuple[float | None, tuple[str, ...]]:
    """(validity, reasons) of a dry run: the untouched sandbox must not pass, the solution must."""
    reasons: list[str] = []
    unknown: list[str] = []
    for finding, what in ((probe.untouched, "the untouched sandbox"), (probe.solved, "the solution")):
        if finding is None:
            continue
        if finding.is_verdict:
            wrong = finding.passed if finding is probe.untouched else not finding.passed
            if wrong:
                verb = "passes" if finding.passed else "does not pass"
                reasons.append(f"{what} {verb} (score {finding.score:g})")
        else:
            (reasons if finding.boundary in TASKS_OWN else unknown).append(f"{what}: {_failure(finding)}")
    if reasons:
        return 0.0, tuple(reasons)
    if unknown:
        return None, tuple(f"could not be checked: {reason}" for reason in unknown)
    return 1.0, ()


def _failure(finding: Finding) -> str:
    return f"{finding.boundary}: {finding.message}"


def not_run(task_id: str, config: RunConfig, validity: float | None, reasons: Sequence[str]) -> Evaluation:
    """The result of a task that is not worth its rollouts: reward 0 where it is not valid, else None."""
    return Evaluation(
        task_id=task_id,
        validity=validity,
        reasons=tuple(reasons),
        scores={name: [] for name in config.model_names},
        learnability=dict.fromkeys(config.model_names),
        reward=0.0 if validity == 0.0 else None,
        null_reason=None if validity == 0.0 else "validity is not known",
    )


def assess(task_id: str, groups: Sequence[Group], config: RunConfig) -> Evaluation:
    """The result of a valid task from its groups, one per model."""
    by_model = {group.model: group for group in groups}
    ordered = [by_model[name] for name in config.model_names]
    scores = _scores(task_id, ordered, config)
    learnability = groups_table(scores, config.rewards).column("learnability").to_pylist()
    (reward,) = rewards_table(scores, config.rewards).to_pylist()
    failures: dict[str, int] = {}
    for group in ordered:
        for record in group.rollouts:
            if record.failure_type is not None:
                kind = f"{record.failure_boundary}:{record.failure_type}"
                failures[kind] = failures.get(kind, 0) + 1
    return Evaluation(
        task_id=task_id,
        validity=1.0,
        scores={group.model: group.scores for group in ordered},
        failures=failures,
        learnability=dict(zip(config.model_names, learnability, strict=True)),
        **{name: reward[name] for name in ("separation", "separation_low", "separation_high", "superiority")},
        reward=reward["reward"],
        coverage=reward["coverage"],
        null_reason=reward["null_reason"],
    )


def _scores(task_id: str, groups: Sequence[Group], config: RunConfig) -> Scores:
    shape = (1, len(groups), config.k)
    records = [record for group in groups for record in group.rollouts]
    values = np.array([np.nan if record.score is None else record.score for record in records], np.float64)
    columns = [
        pa.array([getattr(record, name) for record in records], kind)
        for name, kind in (("status", pa.string()), ("failure_boundary", pa.string()), ("score", pa.float64()))
    ]
    return Scores(
        models=config.model_names,
        k=config.k,
        task_ids=pa.array([task_id], pa.string()),
        rounds=np.zeros(1, np.int32),
        values=values.reshape(shape),
        passed=np.array([bool(record.passed) for record in records]).reshape(shape),
        kinds=kind_codes(*columns).reshape(shape),
    )
