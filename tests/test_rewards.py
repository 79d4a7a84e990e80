"""Tables of groups and rewards, and the summary: null is never zero, and every figure says what it rests on.

.venv/bin/pytest tests/test_rewards.py
"""

from __future__ import annotations

import gzip
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout_engine import schema
from rollout_engine.config import RewardSpec
from rollout_engine.errors import InputError
from rollout_engine.rewards import (
    GROUPS,
    REWARDS,
    Kind,
    Scores,
    groups_table,
    kind_codes,
    rewards_table,
    scores_from_rollouts,
    summary,
)

PROPERTY = settings(max_examples=30, database=None, derandomize=True)
SPEC = RewardSpec()
KINDS = {"v": Kind.VERIFIER_ERROR, "f": Kind.FAILED, "c": Kind.CANCELLED, ".": Kind.NONE}
DATA = Path(__file__).parents[1] / ".." / "shared" / "data" / "gsm8k_model_solutions.jsonl.gz"

Cell = float | str


def make(*tasks: list[Any], models: tuple[str, ...] = (), rounds: list[int] | None = None) -> Scores:
    """Scores of tasks t0, t1, ...: one list of groups each, a group as text ("10vf.") or as a list of cells."""
    cells: list[list[list[Cell]]] = [
        [[float(c) if c in "01" else c for c in group] if isinstance(group, str) else list(group) for group in task]
        for task in tasks
    ]
    k = len(cells[0][0])
    kinds = np.array([[[KINDS[c] if isinstance(c, str) else Kind.VALID for c in g] for g in t] for t in cells])
    values = np.array([[[math.nan if isinstance(c, str) else c for c in g] for g in t] for t in cells])
    return Scores(
        models=models or tuple(f"m{j}" for j in range(len(cells[0]))),
        k=k,
        task_ids=pa.array([f"t{number}" for number in range(len(cells))]),
        rounds=np.array(rounds or [0] * len(cells), np.int32),
        values=values,
        passed=values >= 1,
        kinds=kinds.astype(np.uint8),
    )


def groups_of(scores: Scores, spec: RewardSpec = SPEC) -> list[dict[str, Any]]:
    return groups_table(scores, spec).to_pylist()


def reward_of(scores: Scores, spec: RewardSpec = SPEC, validity: np.ndarray | None = None) -> dict[str, Any]:
    (row,) = rewards_table(scores, spec, validity).to_pylist()
    return row


# ---- groups


def test_a_full_group_has_every_estimate() -> None:
    table = groups_table(make(["1101"], ["0000"]), SPEC)
    assert table.schema.equals(GROUPS, check_metadata=True)
    mixed, failing = table.to_pylist()
    assert mixed == {
        "group_id": schema.group_id(0, "t0", "m0"),
        "round": 0,
        "task_id": "t0",
        "model": "m0",
        **{"n_requested": 4, "n_valid": 4, "n_verifier_error": 0, "n_failed": 0, "n_cancelled": 0, "n_pending": 0},
        **{"coverage": 1.0, "mean_score": 0.75, "mean_score_low": 0.75, "mean_score_high": 0.75},
        **{"pass_rate": 0.75, "pass_at_k": 1.0, "pass_all_k": 0.0, "learnability": 0.25},
        "learnability_posterior": pytest.approx(0.175),
        "learnability_posterior_sd": pytest.approx(0.0673, abs=5e-5),
        "null_reason": None,
    }
    assert failing["learnability"] == 0.0
    assert failing["pass_at_k"] == 0.0
    assert failing["learnability_posterior"] == pytest.approx(0.075)


def test_rows_are_named_slot_by_slot_and_model_by_model() -> None:
    scores = make(["1", "0"], ["0", "1"], models=("big", "small"), rounds=[3, 4])
    ids = [row["group_id"] for row in groups_of(scores)]
    assert ids == ["3/big/t0", "3/small/t0", "4/big/t1", "4/small/t1"]


def test_every_planned_rollout_is_counted_once_by_kind() -> None:
    (row,) = groups_of(make(["10vfc.f1"]))
    counts = {name: row[name] for name in row if name.startswith("n_")}
    assert counts == {
        **{"n_requested": 8, "n_valid": 3, "n_verifier_error": 1, "n_failed": 2, "n_cancelled": 1, "n_pending": 1}
    }
    assert row["coverage"] == 3 / 8


def test_nulls_are_left_out_of_both_numerator_and_denominator_and_bounded() -> None:
    (row,) = groups_of(make(["11ff"]))
    assert (row["mean_score"], row["pass_rate"], row["learnability"]) == (1.0, 1.0, 0.0)
    assert (row["mean_score_low"], row["mean_score_high"]) == (0.5, 1.0)
    assert row["pass_at_k"] is None
    assert row["null_reason"] == "pass@4 needs 4 valid scores, there are 2"


def test_a_group_without_scores_is_null_and_not_zero() -> None:
    (row,) = groups_of(make(["ffff"]))
    estimates = ["mean_score", "pass_rate", "pass_at_k", "learnability", "learnability_posterior"]
    assert [row[name] for name in estimates] == [None] * 5
    assert (row["mean_score_low"], row["mean_score_high"], row["coverage"]) == (0.0, 1.0, 0.0)
    assert row["null_reason"].startswith("0 of 4 scores are valid, 2 needed")


def test_coverage_below_the_minimum_makes_estimates_null() -> None:
    (row,) = groups_of(make(["10ffff"]))
    assert row["mean_score"] is None
    assert row["null_reason"].startswith("2 of 6 scores are valid, 3 needed")
    (row,) = groups_of(make(["10ffff"]), RewardSpec(min_coverage=0.2))
    assert (row["mean_score"], row["learnability"]) == (0.5, 0.5)
    (row,) = groups_of(make(["1ffff"]), RewardSpec(min_coverage=0))
    assert (row["mean_score"], row["learnability"]) == (1.0, None)


def test_rounding_does_not_ask_for_one_score_more() -> None:
    (row,) = groups_of(make(["100" + "f" * 27]), RewardSpec(min_coverage=0.1))
    assert row["mean_score"] == pytest.approx(1 / 3)


def test_one_score_has_a_posterior_but_no_learnability() -> None:
    (row,) = groups_of(make(["1"]))
    assert row["learnability"] is None
    assert row["learnability_posterior"] == pytest.approx(0.125)
    assert row["null_reason"] == "a variance needs 2 valid scores, there is 1"


def test_verifier_errors_above_the_limit_make_rewards_null_and_count_as_zero_in_the_worst_case() -> None:
    (row,) = groups_of(make(["111v"]))
    assert (row["learnability"], row["learnability_posterior"]) == (None, None)
    assert (row["mean_score"], row["mean_score_low"], row["mean_score_high"]) == (1.0, 0.75, 1.0)
    assert row["null_reason"].startswith("1 of 4 verdicts are verifier errors, 0 allowed")
    (row,) = groups_of(make(["111v"]), RewardSpec(max_verifier_error_rate=0.25))
    assert row["learnability"] == 0.0


def test_the_verifier_error_rate_is_that_of_rollouts_that_reached_a_verifier() -> None:
    """Failures of the infrastructure must not dilute it: here half of the verdicts are missing, not a quarter."""
    (row,) = groups_of(make(["10vvffff"]), RewardSpec(max_verifier_error_rate=0.25, min_coverage=0.25))
    assert row["learnability"] is None
    assert row["null_reason"].startswith("2 of 4 verdicts are verifier errors, 0.25 allowed")


def test_graded_scores_take_the_sample_variance_and_their_pass_flags() -> None:
    values = [0.2, 0.4, 1.0, 0.9]
    (row,) = groups_of(make([values]))
    assert row["learnability"] == pytest.approx(np.var(values, ddof=1))
    assert (row["mean_score"], row["pass_rate"]) == (pytest.approx(0.625), 0.25)
    assert row["learnability_posterior"] == pytest.approx(0.175)


def test_scores_outside_the_unit_interval_have_no_bounds() -> None:
    (row,) = groups_of(make([[7.0, 9.0]]))
    assert (row["mean_score_low"], row["mean_score_high"], row["mean_score"]) == (None, None, 8.0)
    assert row["null_reason"] == "scores outside [0, 1] have no bounds"


# ---- rewards


def test_the_reward_is_the_weighted_sum_of_learnability_and_separation() -> None:
    table = rewards_table(make(["1110", "1000"]), SPEC)
    assert table.schema.equals(REWARDS, check_metadata=True)
    (row,) = table.to_pylist()
    assert row == {
        **{"round": 0, "task_id": "t0", "separation": 0.5, "superiority": 0.75, "validity": 1.0, "coverage": 1.0},
        "separation_low": pytest.approx(-0.135, abs=6e-4),
        "separation_high": pytest.approx(0.789, abs=6e-4),
        "between_model_variance": pytest.approx(0.125 - 0.25 / 4),
        "learnability": 0.25,
        "reward": pytest.approx(4 * 0.25 + 0.25 * 0.5),
        "null_reason": None,
    }


def test_separation_keeps_its_sign() -> None:
    row = reward_of(make(["0000", "1111"]))
    assert (row["separation"], row["superiority"], row["reward"]) == (-1.0, 0.0, -0.25)


def test_the_policy_may_be_any_model() -> None:
    scores = make(["1110", "1111"], models=("big", "small"))
    assert reward_of(scores)["learnability"] == 0.0
    assert reward_of(scores, RewardSpec(policy="big"))["learnability"] == 0.25
    with pytest.raises(InputError, match="'other' is none of the models"):
        reward_of(scores, RewardSpec(policy="other"))


def test_a_null_part_makes_a_null_reward_and_says_whose_it_is() -> None:
    row = reward_of(make(["ff1f", "1010"], models=("big", "small")))
    assert (row["separation"], row["separation_low"], row["superiority"], row["reward"]) == (None,) * 4
    assert row["between_model_variance"] is None
    assert row["learnability"] == pytest.approx(1 / 3)
    assert row["null_reason"] == "big: 1 of 4 scores are valid, 2 needed"
    row = reward_of(make(["1111", "101v"], models=("big", "small")))
    assert (row["separation"], row["learnability"], row["reward"]) == (None, None, None)
    assert row["null_reason"] == "small: 1 of 4 verdicts are verifier errors, 0 allowed"


def test_at_k_1_there_is_separation_but_no_learnability() -> None:
    row = reward_of(make(["1", "0"]))
    assert (row["separation"], row["superiority"]) == (1.0, 1.0)
    assert -1 <= row["separation_low"] < row["separation_high"] == 1.0
    assert (row["learnability"], row["between_model_variance"], row["reward"]) == (None, None, None)
    assert "m1: a variance needs 2 valid scores, there is 1" in row["null_reason"]
    assert reward_of(make(["1", "0"]), RewardSpec(w_learnability=0))["reward"] == 0.25


def test_one_model_has_no_separation_and_its_reward_is_learnability_alone() -> None:
    row = reward_of(make(["1100"]))
    assert (row["separation"], row["superiority"], row["between_model_variance"]) == (None, None, None)
    assert row["reward"] == pytest.approx(4 / 3)
    assert row["null_reason"] is None


def test_without_an_order_between_model_variance_takes_the_place_of_separation() -> None:
    row = reward_of(make(["1110", "1000"]), RewardSpec(ordered=False))
    assert (row["separation"], row["superiority"]) == (None, None)
    assert row["between_model_variance"] == pytest.approx(0.0625)
    assert row["reward"] == pytest.approx(1 + 0.25 * 0.0625)
    assert reward_of(make(["1100", "1100"]), RewardSpec(ordered=False))["between_model_variance"] < 0


def test_validity_scales_the_reward_and_an_invalid_task_earns_zero() -> None:
    scores = make(["1110", "1000"], ["1110", "1000"], ["ffff", "ffff"], ["1110", "1000"], ["ffff", "ffff"])
    table = rewards_table(scores, SPEC, np.array([1.0, 0.0, 0.0, math.nan, 1.0]))
    assert table["reward"].to_pylist() == [1.125, 0.0, 0.0, None, None]
    assert table["validity"].to_pylist() == [1.0, 0.0, 0.0, None, 1.0]
    assert table["null_reason"][3].as_py() == "validity is unknown"
    with pytest.raises(ValueError, match="validity has shape"):
        rewards_table(scores, SPEC, np.ones(2))


def test_three_models_separate_by_the_mean_over_all_ordered_pairs() -> None:
    row = reward_of(make(["1111", "1100", "0000"]))
    assert row["separation"] == pytest.approx((0.5 + 1 + 0.5) / 3)
    assert row["superiority"] == pytest.approx((0.75 + 1 + 0.75) / 3)
    assert row["separation_low"] < row["separation"] <= row["separation_high"] <= 2 / 3 + 1e-12


def test_graded_groups_take_bootstrap_or_welch_by_their_size() -> None:
    rng = np.random.default_rng(1)
    for k in (5, 12):
        row = reward_of(make([rng.uniform(0.5, 1, k).tolist(), rng.uniform(0, 0.5, k).tolist()]))
        assert row["separation_low"] < row["separation"] < row["separation_high"]
        assert row["superiority"] == 1.0


def test_unbounded_scores_that_do_not_vary_have_a_separation_but_no_interval() -> None:
    row = reward_of(make([[5.0, 5.0], [2.0, 2.0]]))
    assert (row["separation"], row["separation_low"], row["separation_high"]) == (3.0, None, None)
    assert row["null_reason"] == "scores that do not vary and lie outside [0, 1] give no interval"


def test_scores_too_large_for_their_squares_are_null_and_not_infinite() -> None:
    scores = make([[1e308, -1e308], [0.0, 1.0]])
    assert groups_of(scores)[0]["learnability"] is None
    assert rewards_table(scores, SPEC).num_rows == 1
    json.dumps(summary(scores, SPEC).to_dict(), allow_nan=False)


def test_tables_without_rows() -> None:
    empty = Scores(("a",), 2, pa.array([], pa.string()), *(np.zeros(s, t) for s, t in EMPTY))
    assert groups_table(empty, SPEC).num_rows == rewards_table(empty, SPEC).num_rows == 0
    assert summary(empty, SPEC).to_dict()["coverage"] is None


EMPTY = [(0, np.int32), ((0, 1, 2), np.float64), ((0, 1, 2), np.bool_), ((0, 1, 2), np.uint8)]


def test_scores_of_a_wrong_shape_or_without_their_numbers_are_refused() -> None:
    good = make(["10"])
    with pytest.raises(ValueError, match="not finite"):
        Scores(good.models, 2, good.task_ids, good.rounds, good.values * math.nan, good.passed, good.kinds)
    with pytest.raises(ValueError, match=r"values has shape \(1, 1, 2\), not \(1, 1, 3\)"):
        Scores(good.models, 3, good.task_ids, good.rounds, good.values, good.passed, good.kinds)


# ---- properties

cells = st.sampled_from([0.0, 1.0, "v", "f", "c", "."])
graded = st.sampled_from([0.0, 0.3, 0.5, 1.0, "f", "v"])
tasks = st.integers(1, 3).flatmap(
    lambda m: st.one_of(
        *(st.lists(st.lists(cell, min_size=6, max_size=6), min_size=m, max_size=m) for cell in (cells, graded))
    )
)


@PROPERTY
@given(tasks, st.randoms(use_true_random=False))
def test_the_order_of_attempts_does_not_matter(task: list[list[Cell]], random: Any) -> None:
    shuffled = [random.sample(group, len(group)) for group in task]
    for table in (groups_table, rewards_table):
        assert table(make(task), SPEC).equals(table(make(shuffled), SPEC))


@PROPERTY
@given(tasks, st.sampled_from([0.0, 0.5, 1.0]), st.sampled_from([0.0, 0.5]))
def test_estimates_are_bounded_and_null_exactly_where_there_is_too_little(
    task: list[list[Cell]], min_coverage: float, rate: float
) -> None:
    spec = RewardSpec(min_coverage=min_coverage, max_verifier_error_rate=rate)
    rows = groups_of(make(task), spec)
    for row in rows:
        valid, errors = row["n_valid"], row["n_verifier_error"]
        covered = valid >= max(1, math.ceil(min_coverage * 6))
        sound = covered and errors <= rate * (valid + errors)
        assert (row["mean_score"] is not None) == covered
        assert (row["learnability"] is not None) == (sound and valid >= 2)
        assert (row["null_reason"] is None) == (sound and valid == 6)
        assert row["n_requested"] == sum(row[name] for name in row if name.startswith("n_")) - 6
        if covered:
            assert row["mean_score_low"] - 1e-12 <= row["mean_score"] <= row["mean_score_high"] + 1e-12
        if row["learnability"] is not None:
            assert 0 <= row["learnability"] <= valid / (4 * (valid - 1)) + 1e-12
    row = reward_of(make(task), spec)
    if row["separation"] is not None:
        assert -1 <= row["separation_low"] <= row["separation"] + 1e-9
        assert row["separation"] - 1e-9 <= row["separation_high"] <= 1
        assert 0 <= row["superiority"] <= 1
    parts = [row["learnability"], row["separation"]] if len(task) > 1 else [row["learnability"]]
    assert (row["reward"] is None) == (None in parts)


@PROPERTY
@given(tasks)
def test_reversing_the_models_turns_the_sign(task: list[list[Cell]]) -> None:
    forward, backward = reward_of(make(task)), reward_of(make(task[::-1]))
    assert forward["between_model_variance"] == pytest.approx(backward["between_model_variance"], nan_ok=True)
    if forward["separation"] is not None:
        assert forward["separation"] == pytest.approx(-backward["separation"])
        assert forward["superiority"] == pytest.approx(1 - backward["superiority"])


@PROPERTY
@given(tasks)
def test_a_null_never_counts_as_a_zero(task: list[list[Cell]]) -> None:
    """Attempts without a score change nothing but counts, coverage, bounds and pass@k."""
    spec = RewardSpec(min_coverage=0, max_verifier_error_rate=1)
    more = [[*group, "f", "v", "."] for group in task]
    for before, after in zip(groups_of(make(task), spec), groups_of(make(more), spec), strict=True):
        same = ["mean_score", "pass_rate", "learnability", "learnability_posterior", "learnability_posterior_sd"]
        assert {name: before[name] for name in same} == pytest.approx({name: after[name] for name in same})
    before, after = reward_of(make(task), spec), reward_of(make(more), spec)
    same = ["separation", "superiority", "between_model_variance", "learnability", "reward"]
    assert {name: before[name] for name in same} == pytest.approx({name: after[name] for name in same})


# ---- contamination: what fake zeros would do


def simulated(
    rates: list[float], failing: list[float], n: int, k: int, kind: Kind = Kind.FAILED, seed: int = 0
) -> Scores:
    """n tasks of models with these pass rates, each losing this part of its rollouts to `kind`."""
    rng = np.random.default_rng(seed)
    shape = (n, len(rates), k)
    passed = rng.random(shape) < np.array(rates)[None, :, None]
    lost = rng.random(shape) < np.array(failing)[None, :, None]
    return Scores(
        tuple(f"m{j}" for j in range(len(rates))),
        k,
        pa.array([f"t{number}" for number in range(n)]),
        np.zeros(n, np.int32),
        np.where(lost, np.nan, passed.astype(float)),
        passed & ~lost,
        np.where(lost, kind, Kind.VALID).astype(np.uint8),
    )


def with_zeros(scores: Scores) -> Scores:
    """The same rollouts where every failure was booked as a score of 0."""
    lost = scores.kinds != Kind.VALID
    values = np.where(lost, 0.0, scores.values)
    kinds = np.full_like(scores.kinds, Kind.VALID)
    return Scores(scores.models, scores.k, scores.task_ids, scores.rounds, values, scores.passed, kinds)


def mean_and_error(column: pa.ChunkedArray) -> tuple[float, float]:
    values = column.drop_null().to_numpy()
    return float(values.mean()), float(values.std(ddof=1) / math.sqrt(len(values)))


@pytest.mark.parametrize(
    ("rate", "failing", "contaminated"),
    [(1, 0.05, 0.048), (1, 0.15, 0.128), (1, 0.23, 0.177), (0.9, 0.05, 0.124), (0.9, 0.15, 0.18), (0.9, 0.23, 0.213)],
)
def test_failures_do_not_make_solved_tasks_learnable(rate: float, failing: float, contaminated: float) -> None:
    scores = simulated([rate], [failing], n=4000, k=8)
    mean, error = mean_and_error(groups_table(scores, SPEC)["learnability"])
    assert mean == pytest.approx(rate * (1 - rate), abs=3.5 * error + 1e-12)
    fake, error = mean_and_error(groups_table(with_zeros(scores), SPEC)["learnability"])
    assert fake == pytest.approx(contaminated, abs=3.5 * error + 1e-3)


def test_failures_of_one_provider_do_not_shift_the_separation() -> None:
    scores = simulated([0.8, 0.3], [0.0, 0.2], n=4000, k=8)
    mean, error = mean_and_error(rewards_table(scores, SPEC)["separation"])
    assert mean == pytest.approx(0.5, abs=3.5 * error)
    fake, error = mean_and_error(rewards_table(with_zeros(scores), SPEC)["separation"])
    assert fake == pytest.approx(0.56, abs=3.5 * error)


def test_a_model_that_breaks_its_verifier_when_it_would_fail_gains_nothing() -> None:
    """Errors in place of every fail would leave a perfect score; rewards are null, and the worst case holds."""
    scores = simulated([0.9, 0.5], [0.0, 0.0], n=500, k=4)
    broken = (scores.values == 0) & (np.arange(2) == 1)[None, :, None]
    kinds = np.where(broken, Kind.VERIFIER_ERROR, scores.kinds).astype(np.uint8)
    values = np.where(broken, np.nan, scores.values)
    cheat = Scores(scores.models, 4, scores.task_ids, scores.rounds, values, scores.passed, kinds)
    rewards = rewards_table(cheat, SPEC)
    spared = (kinds[:, 1] == Kind.VALID).all(1)
    assert [value is not None for value in rewards["reward"].to_pylist()] == spared.tolist()
    weak = summary(cheat, SPEC).models[1]
    assert weak.mean_score.value == 1.0
    assert weak.mean_score_worst == pytest.approx(scores.values[:, 1].mean())


@pytest.mark.parametrize("k", [2, 4, 8])
def test_learnability_and_separation_are_unbiased_when_rollouts_are_lost(k: int) -> None:
    scores = simulated([0.7, 0.2], [0.1, 0.3], n=5000, k=k, seed=k)
    rewards = rewards_table(scores, SPEC)
    for column, truth in (("learnability", 0.16), ("separation", 0.5), ("between_model_variance", 0.125)):
        mean, error = mean_and_error(rewards[column])
        assert mean == pytest.approx(truth, abs=3.5 * error), column


# ---- from rollouts


def rollouts(*rows: dict[str, Any]) -> pa.Table:
    """Rows of the rollouts table; a row names what is special about it."""
    usual = {"round": 0, "task_id": "t0", "model": "m0", "attempt": 0, "status": "completed", "generation": 0}
    columns = ["passed", "score", "failure_boundary", *usual]
    kinds = [schema.ROLLOUTS.field(name) for name in columns]
    return pa.Table.from_pylist([{**usual, **row} for row in rows], schema=pa.schema(kinds))


def test_rows_are_classified_by_what_they_say() -> None:
    cases = [
        ("completed", None, 1.0, Kind.VALID),
        ("truncated", None, 0.0, Kind.VALID),
        ("completed", "verifier", None, Kind.VERIFIER_ERROR),
        ("truncated", "verifier", None, Kind.VERIFIER_ERROR),
        ("failed", "verifier", None, Kind.FAILED),
        ("failed", "sandbox", None, Kind.FAILED),
        ("completed", None, None, Kind.FAILED),
        ("completed", None, math.nan, Kind.FAILED),
        ("cancelled", "cancel", None, Kind.CANCELLED),
        (None, None, None, Kind.FAILED),
    ]
    status, boundary, score, kinds = zip(*cases, strict=True)
    columns = (pa.array(status, pa.string()), pa.array(boundary, pa.string()), pa.array(score, pa.float64()))
    assert kind_codes(*columns).tolist() == list(kinds)
    assert kind_codes(columns[0].dictionary_encode(), columns[1].dictionary_encode(), columns[2]).tolist() == list(
        kinds
    )
    assert kind_codes(pa.array(["failed"]), pa.nulls(1), pa.nulls(1, pa.float64())).tolist() == [Kind.FAILED]


def test_rows_land_in_their_cells_and_cells_without_a_row_are_pending() -> None:
    table = rollouts(
        {"round": 1, "task_id": "b", "model": "big", "attempt": 1, "score": 1.0, "passed": True},
        {"round": 0, "task_id": "b", "model": "small", "score": 0.5, "passed": False},
        {"round": 1, "task_id": "a", "model": "big", "status": "failed", "failure_boundary": "model"},
    )
    scores = scores_from_rollouts(table, ["big", "small"], 2)
    assert scores.task_ids.to_pylist() == ["b", "a", "b"]
    assert scores.rounds.tolist() == [0, 1, 1]
    assert scores.kinds.tolist() == [[[0, 0], [1, 0]], [[3, 0], [0, 0]], [[0, 1], [0, 0]]]
    assert scores.values[0, 1, 0] == 0.5
    assert scores.passed.sum() == 1
    shuffled = scores_from_rollouts(pa.concat_tables([table.slice(1), table.slice(0, 1)]), ["big", "small"], 2)
    assert np.array_equal(shuffled.values, scores.values, equal_nan=True)


def test_pass_flags_come_from_the_verifier_or_else_the_threshold() -> None:
    table = rollouts(
        {"attempt": 0, "score": 0.2, "passed": True},
        {"attempt": 1, "score": 0.8, "passed": None},
        {"attempt": 2, "score": 1.0, "passed": None},
        {"attempt": 3, "score": None, "passed": None, "status": "failed"},
    )
    assert scores_from_rollouts(table, ["m0"], 4).passed.tolist() == [[[True, False, True, False]]]
    assert scores_from_rollouts(table, ["m0"], 4, pass_threshold=0.8).passed.sum() == 3


def test_a_valid_row_supersedes_a_failed_one_and_never_the_reverse() -> None:
    failed = {"status": "failed", "failure_boundary": "host"}
    table = rollouts(
        {"attempt": 0, **failed},
        {"attempt": 0, "generation": 1, "score": 1.0},
        {"attempt": 1, "generation": 0, "score": 0.0},
        {"attempt": 1, "generation": 1, **failed},
        {"attempt": 1, "generation": 2, "score": 1.0},
        {"attempt": 2, "generation": 1, "failure_boundary": "verifier"},
        {"attempt": 2, "generation": 0, **failed},
    )
    scores = scores_from_rollouts(table, ["m0"], 3)
    assert scores.kinds.tolist() == [[[Kind.VALID, Kind.VALID, Kind.VERIFIER_ERROR]]]
    assert scores.values[0, 0, :2].tolist() == [1.0, 0.0]


@pytest.mark.parametrize("row", [{"model": "other"}, {"attempt": 2}])
def test_rows_that_no_plan_holds_are_refused(row: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="is not planned"):
        scores_from_rollouts(rollouts({"score": 1.0}, {"score": 1.0, **row}), ["m0"], 2)


def test_a_table_without_rows_has_no_slots() -> None:
    assert scores_from_rollouts(rollouts(), ["m0"], 2).values.shape == (0, 1, 2)


@pytest.fixture(scope="module")
def million() -> pa.Table:
    """125,000 tasks x 2 models x 4 attempts in random order, 3 % failed, scores of three decimals."""
    rng = np.random.default_rng(7)
    row, score = rng.permutation(1_000_000), rng.integers(0, 1001, 1_000_000) / 1000
    failed = rng.random(1_000_000) < 0.03
    names = pa.array([f"task-{number:06d}" for number in range(125_000)])
    return pa.table(
        {
            "round": pa.array(np.zeros(1_000_000, np.int32)),
            "task_id": names.take(pa.array(row // 8)),
            "model": pa.array(["big", "small"]).take(pa.array(row // 4 % 2)),
            "attempt": pa.array((row % 4).astype(np.int32)),
            "generation": pa.array(np.zeros(1_000_000, np.int32)),
            "status": pa.array(["completed", "failed"]).take(pa.array(failed.astype(int))),
            "failure_boundary": pa.array([None, "model"], pa.string()).take(pa.array(failed.astype(int))),
            "score": pa.array(score, mask=failed),
            "passed": pa.array(score >= 1, mask=failed),
        }
    )


@pytest.mark.parametrize("kind", ["graded", "binary"])
def test_a_million_rows_take_seconds(million: pa.Table, kind: str) -> None:
    table = million
    if kind == "binary":
        table = million.set_column(table.column_names.index("score"), "score", pc.round(million["score"]))
    started = time.process_time()
    scores = scores_from_rollouts(table, ["big", "small"], 4)
    groups, rewards = groups_table(scores, SPEC), rewards_table(scores, SPEC)
    figures = summary(scores, SPEC)
    assert time.process_time() - started < 10
    assert (groups.num_rows, rewards.num_rows, figures.requested) == (250_000, 125_000, 1_000_000)
    assert figures.valid == sum(groups["n_valid"].to_numpy())


# ---- summary


def test_the_summary_counts_everything_and_is_json() -> None:
    scores = make(["1110", "10v0"], ["11f1", "0000"], ["1111", "0c0."], models=("big", "small"))
    figures = summary(scores, SPEC)
    assert json.loads(json.dumps(figures.to_dict(), allow_nan=False)) == figures.to_dict()
    big, small = figures.models
    assert (big.requested, big.valid, big.failed, big.coverage) == (12, 11, 1, 11 / 12)
    assert (small.valid, small.verifier_errors, small.failed, small.cancelled, small.pending) == (9, 1, 0, 1, 1)
    assert (figures.tasks, figures.slots, figures.requested, figures.valid) == (3, 3, 24, 20)
    assert figures.coverage == 20 / 24
    assert big.mean_score.value == pytest.approx((0.75 + 1 + 1) / 3)
    assert (big.pass_at_k.n, big.pass_at_k.value, big.pass_all_k.value) == (2, 1.0, 0.5)
    assert small.mean_score_worst == pytest.approx((0.25 + 0 + 0) / 3)
    assert small.mean_score_best == pytest.approx((0.5 + 0 + 0.5) / 3)
    (pair,) = figures.pairs
    assert (pair.first, pair.second, pair.separation.n) == ("big", "small", 2)
    assert pair.separation.value == pytest.approx(1.0)
    assert figures.separation == pair.separation
    assert figures.reward.n == 2


def test_rounds_of_one_task_are_one_cluster() -> None:
    scores = make(["10"], ["11"], rounds=[0, 1])
    twice = Scores(scores.models, 2, pa.array(["t", "t"]), scores.rounds, scores.values, scores.passed, scores.kinds)
    assert summary(scores, SPEC).models[0].mean_score.n == 2
    estimate = summary(twice, SPEC).models[0].mean_score
    assert (estimate.value, estimate.se, estimate.n) == (0.75, None, 1)


def test_the_summary_of_unordered_models_has_pairs_but_no_separation_of_its_own() -> None:
    figures = summary(make(["1110", "1000"], ["1111", "0010"]), RewardSpec(ordered=False))
    assert figures.separation.value is None
    assert figures.pairs[0].separation.value == pytest.approx(0.625)
    assert figures.between_model_variance.n == 2
    assert summary(make(["1100"]), SPEC).pairs == []


def test_the_summary_of_a_ladder_is_the_mean_of_its_pairs() -> None:
    figures = summary(make(["1110", "1000", "1000"], ["1111", "0110", "0000"]), SPEC)
    assert figures.separation.value == pytest.approx(np.mean([pair.separation.value for pair in figures.pairs]))


# ---- real answers of real models


@pytest.fixture(scope="module")
def gsm8k() -> Scores:
    """1,319 questions x 4 models x 1 recorded answer, by their labels."""
    if not DATA.exists():
        pytest.skip(f"needs {DATA.resolve()}")
    models = ("175b_verification", "6b_verification", "175b_finetuning", "6b_finetuning")
    with gzip.open(DATA, "rt") as lines:
        labels = np.array([[row[model]["is_correct"] for model in models] for row in map(json.loads, lines)])
    passed = labels[:, :, None]
    kinds = np.full(passed.shape, Kind.VALID, np.uint8)
    ids = pa.array([f"gsm8k-{number}" for number in range(len(labels))])
    return Scores(models, 1, ids, np.zeros(len(labels), np.int32), passed.astype(float), passed, kinds)


def subset(scores: Scores, rows: np.ndarray, models: list[int]) -> Scores:
    cells = np.ix_(rows, models)
    names = tuple(scores.models[j] for j in models)
    ids = scores.task_ids.take(pa.array(rows))
    return Scores(names, scores.k, ids, scores.rounds[rows], *(a[cells] for a in arrays(scores)))


def arrays(scores: Scores) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return scores.values, scores.passed, scores.kinds


@pytest.mark.data
def test_real_labels_give_the_published_rates_and_the_exact_separation(gsm8k: Scores) -> None:
    figures = summary(gsm8k, SPEC)
    rates = {model.model: model.pass_at_1.value for model in figures.models}
    assert rates == {
        "175b_verification": 742 / 1319,
        "6b_verification": 515 / 1319,
        "175b_finetuning": 458 / 1319,
        "6b_finetuning": 286 / 1319,
    }
    pair = next(p for p in figures.pairs if (p.first, p.second) == ("175b_verification", "6b_finetuning"))
    assert pair.separation.value == 456 / 1319
    assert pair.separation.n == 1319


@pytest.mark.data
def test_real_labels_at_k_1_have_no_learnability(gsm8k: Scores) -> None:
    groups, rewards = groups_table(gsm8k, SPEC), rewards_table(gsm8k, SPEC)
    assert groups["learnability"].null_count == groups.num_rows == 4 * 1319
    assert rewards["learnability"].null_count == rewards["reward"].null_count == 1319
    assert rewards["separation"].null_count == 0
    assert summary(gsm8k, SPEC).models[0].learnability.value is None


@pytest.mark.data
def test_real_subsamples_cover_the_separation_of_all_tasks(gsm8k: Scores) -> None:
    rng = np.random.default_rng(8)
    hits = []
    for _ in range(400):
        rows = rng.choice(1319, 100, replace=False)
        estimate = summary(subset(gsm8k, rows, [0, 3]), SPEC).separation
        assert estimate.low is not None
        assert estimate.high is not None
        hits.append(estimate.low <= 456 / 1319 <= estimate.high)
    assert 0.92 <= np.mean(hits) <= 0.98
