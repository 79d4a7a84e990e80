"""What k attempts say of one task and one model: the table of groups, and the measures that rewards build on."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rollout_engine import estimators
from rollout_engine.config import RewardSpec
from rollout_engine.estimators import Bools, Floats, Ints
from rollout_engine.schema import METADATA, group_ids
from rollout_engine.scores import Kind, Scores

GROUPS = pa.schema(
    [
        ("group_id", pa.string()),
        ("round", pa.int32()),
        ("task_id", pa.string()),
        ("model", pa.string()),
        ("n_requested", pa.int32()),
        ("n_valid", pa.int32()),
        ("n_verifier_error", pa.int32()),
        ("n_failed", pa.int32()),
        ("n_cancelled", pa.int32()),
        ("n_pending", pa.int32()),
        ("coverage", pa.float64()),
        ("mean_score", pa.float64()),
        ("mean_score_low", pa.float64()),
        ("mean_score_high", pa.float64()),
        ("pass_rate", pa.float64()),
        ("pass_at_k", pa.float64()),
        ("pass_all_k", pa.float64()),
        ("learnability", pa.float64()),
        ("learnability_posterior", pa.float64()),
        ("learnability_posterior_sd", pa.float64()),
        ("null_reason", pa.string()),
    ],
    metadata=METADATA,
)
"""One row per round x task x model. The five counts after n_requested add up to it."""

_ROUNDING = 1e-9  # 0.1 * 30 is 3.0000000000000004, and must not ask for a fourth score


@dataclass(frozen=True)
class Groups:
    """Counts and moments of every group; arrays are [n, m] where nothing else is said."""

    values: Floats
    """[n, m, k] scores in ascending order, NaN last: nothing depends on the order of attempts."""
    valid: Ints
    verifier_errors: Ints
    passes: Ints
    mean: Floats
    variance: Floats
    """ddof = 1; NaN below two valid scores."""
    covered: Bools
    """Enough valid scores for an estimate."""
    sound: Bools
    """Covered, and with no more verifier errors than allowed: fit for a reward."""
    unit: Bools
    """[n, 1] whether every score of the slot lies in [0, 1]."""

    @property
    def learnability(self) -> Floats:
        """Unbiased variance of the scores of groups that are fit for a reward."""
        return np.where(self.sound, self.variance, math.nan)

    @property
    def binary(self) -> Bools:
        """[n] whether every score of the slot is 0 or 1."""
        return np.asarray((np.isnan(self.values) | (self.values == 0) | (self.values == 1)).all((1, 2)))

    def superiority(self, first: int, second: int, rows: Bools) -> Floats:
        """[n] probability that the first model's score beats the second's, ties half; NaN outside `rows`."""
        out = 0.5 + (self.mean[:, first] - self.mean[:, second]) / 2  # what it comes to where scores are 0 or 1
        graded = rows & ~self.binary
        out[graded] = estimators.superiority(self.values[graded, first], self.values[graded, second])
        return np.where(rows, out, math.nan)


def _needed(k: int, spec: RewardSpec) -> int:
    """Valid scores below which a group has no estimate."""
    return max(1, math.ceil(spec.min_coverage * k - _ROUNDING))


def _excess(verifier_errors: Any, valid: Any, spec: RewardSpec) -> Any:
    """Whether verifier errors are too large a part of the rollouts that reached their verifier."""
    return verifier_errors > spec.max_verifier_error_rate * (valid + verifier_errors) + _ROUNDING


def measure(scores: Scores, spec: RewardSpec) -> Groups:
    """Counts and moments; scores of kinds other than VALID are not looked at."""
    there = scores.kinds == Kind.VALID
    values = np.sort(np.where(there, scores.values, math.nan), axis=-1)
    valid = there.sum(-1)
    verifier_errors = (scores.kinds == Kind.VERIFIER_ERROR).sum(-1)
    covered = valid >= _needed(scores.k, spec)
    return Groups(
        values=values,
        valid=valid,
        verifier_errors=verifier_errors,
        passes=(there & scores.passed).sum(-1),
        mean=estimators.ratio(np.nansum(values, -1), valid, valid > 0),
        variance=estimators.sample_variance(values, valid),
        covered=covered,
        sound=covered & ~_excess(verifier_errors, valid, spec),
        unit=(np.isnan(values) | ((values >= 0) & (values <= 1))).all((1, 2))[:, None],
    )


def groups_table(scores: Scores, spec: RewardSpec) -> pa.Table:
    """One row per slot and model, slot by slot, models in the order of the run. Schema: GROUPS."""
    with np.errstate(over="ignore", invalid="ignore"):
        columns = group_columns(scores, measure(scores, spec), spec)
    n, m = len(scores.task_ids), len(scores.models)
    names = {
        "round": pa.array(np.repeat(scores.rounds, m), pa.int32()),
        "task_id": scores.task_ids.take(pa.array(np.repeat(np.arange(n), m))),
        "model": pa.array(list(scores.models), pa.string()).take(pa.array(np.tile(np.arange(m), n))),
    }
    names["group_id"] = group_ids(pa.table(names))
    return pa.table([names.get(f.name, arrow(columns.get(f.name), f.type)) for f in GROUPS], schema=GROUPS)


def group_columns(scores: Scores, groups: Groups, spec: RewardSpec) -> dict[str, npt.NDArray[Any]]:
    """[n, m] arrays by column of GROUPS; NaN is null."""
    k, valid, passes = scores.k, groups.valid, groups.passes
    missing, total = k - valid, np.nansum(groups.values, -1)
    posterior, posterior_sd = estimators.learnability_posterior(passes, valid)
    return {
        "n_requested": np.full(valid.shape, k),
        "n_valid": valid,
        "n_verifier_error": groups.verifier_errors,
        **{f"n_{name}": count for name, count in _other_counts(scores).items()},
        "coverage": valid / k,
        "mean_score": np.where(groups.covered, groups.mean, math.nan),
        "mean_score_low": np.where(groups.unit, total / k, math.nan),
        "mean_score_high": np.where(groups.unit, (total + missing) / k, math.nan),
        "pass_rate": estimators.ratio(passes, valid, groups.covered),
        "pass_at_k": estimators.pass_at_k(valid, passes, k),
        "pass_all_k": estimators.pass_all_k(valid, passes, k),
        "learnability": groups.learnability,
        "learnability_posterior": np.where(groups.sound, posterior, math.nan),
        "learnability_posterior_sd": np.where(groups.sound, posterior_sd, math.nan),
        "null_reason": _group_reasons(groups, k, spec),
    }


def _other_counts(scores: Scores) -> dict[str, Ints]:
    kinds = {"failed": Kind.FAILED, "cancelled": Kind.CANCELLED, "pending": Kind.NONE}
    return {name: (scores.kinds == kind).sum(-1) for name, kind in kinds.items()}


def causes(valid: int, verifier_errors: int, k: int, spec: RewardSpec) -> list[str]:
    """Why a group is not fit for a reward, in plain words; empty if it is."""
    found = []
    if _excess(verifier_errors, valid, spec):
        allowed = spec.max_verifier_error_rate
        found.append(
            f"{verifier_errors} of {valid + verifier_errors} verdicts are verifier errors, {allowed:g} allowed"
        )
    if valid < _needed(k, spec):
        found.append(f"{valid} of {k} scores are valid, {_needed(k, spec)} needed")
    elif valid < 2:
        found.append("a variance needs 2 valid scores, there is 1")
    return found


def _group_reasons(groups: Groups, k: int, spec: RewardSpec) -> npt.NDArray[Any]:
    """[n, m] text or None for the table of groups."""

    def text(valid: int, verifier_errors: int, unit: int) -> str | None:
        found = causes(valid, verifier_errors, k, spec)
        if valid < k:
            found.append(f"pass@{k} needs {k} valid scores, there {'is' if valid == 1 else 'are'} {valid}")
        if not unit:
            found.append("scores outside [0, 1] have no bounds")
        return "; ".join(found) or None

    unit = np.broadcast_to(groups.unit, groups.valid.shape)
    return texts(np.stack([groups.valid, groups.verifier_errors, unit], axis=-1), text)


def texts(codes: npt.NDArray[Any], text: Callable[..., str | None]) -> npt.NDArray[Any]:
    """text(*code) for each code along the last axis, written once for each distinct one."""
    flat = codes.reshape(-1, codes.shape[-1]).astype(np.int64)
    key = np.zeros(len(flat), np.int64)
    for column in flat.T:  # numbered anew after each column, so that the key cannot overflow
        key = np.unique(key * (column.max(initial=0) + 1) + column, return_inverse=True)[1].reshape(-1)
    _, first, which = np.unique(key, return_index=True, return_inverse=True)
    words = np.array([text(*code) for code in flat[first].tolist()], dtype=object)
    return np.asarray(words[which.reshape(codes.shape[:-1])])


def arrow(values: npt.NDArray[Any] | None, kind: pa.DataType) -> pa.Array:
    """A column from an array of any shape; what is not finite becomes null."""
    if values is None:
        return None
    flat = values.reshape(-1)
    if pa.types.is_floating(kind):
        return pa.array(flat, kind, mask=~np.isfinite(flat))
    return pa.array(flat, kind)
