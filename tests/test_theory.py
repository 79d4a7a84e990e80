"""Estimates against what is known: scripted models of known skill, without and with failing infrastructure.

One test: .venv/bin/pytest tests/test_theory.py -k unbiased
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import rollout_engine
from rollout_engine.results import Run
from tests.helpers import make_tasks, scripted

STRONG, WEAK = 0.7, 0.4
INFRA = {"p_500": 0.08, "p_cut": 0.06, "p_garbage": 0.06}
"""A fifth of all calls."""
FAST: dict[str, Any] = {"ray": "off", "sandbox": "none", "host": {"slots": 2048, "max_batch_rows": 4096}}


def run(tasks: int, k: int, *, faults: dict[str, float] | None = None, retries: int = 0, seed: int = 0) -> Run:
    models = [
        {**scripted(name, skill=skill, **(faults or {})), "call_retries": 0}
        for name, skill in (("strong", STRONG), ("weak", WEAK))
    ]
    retry = {"max_retries": retries, "backoff_s": 0.0, "breaker_failures": 0}
    rewards = {"min_coverage": 0.0}
    return rollout_engine.run(make_tasks(tasks), models, k=k, retry=retry, rewards=rewards, seed=seed, **FAST)


def assert_mean_near(values: pa.ChunkedArray | pa.Array, expected: float, sigmas: float = 3.0) -> None:
    """The mean of what is not null lies within so many standard errors of what it should be."""
    numbers = values.drop_null().to_numpy()
    assert len(numbers) > 50
    error = float(np.std(numbers, ddof=1)) / math.sqrt(len(numbers))
    assert abs(float(np.mean(numbers)) - expected) < sigmas * error, (np.mean(numbers), expected, error)


def of_model(table: pa.Table, model: str, column: str) -> pa.ChunkedArray:
    return table.filter(pc.equal(table["model"], model))[column]


@pytest.mark.parametrize(("tasks", "k"), [(800, 2), (400, 4), (200, 16)])
def test_mean_learnability_is_p_times_one_minus_p_and_separation_the_difference(tasks: int, k: int) -> None:
    found = run(tasks, k)
    for model, skill in (("strong", STRONG), ("weak", WEAK)):
        assert_mean_near(of_model(found.groups, model, "learnability"), skill * (1 - skill))
        assert_mean_near(of_model(found.groups, model, "mean_score"), skill)
    assert_mean_near(found.rewards["separation"], STRONG - WEAK)
    assert_mean_near(found.rewards["learnability"], WEAK * (1 - WEAK))
    assert set(found.groups["n_valid"].to_pylist()) == {k}


def test_the_estimates_of_a_fifth_of_failing_calls_are_unbiased_and_the_failures_counted() -> None:
    tasks, k = 400, 8
    found = run(tasks, k, faults=INFRA)
    planned = tasks * k * 2
    failed = sum(found.groups["n_failed"].to_pylist())
    assert abs(failed / planned - 0.2) < 3 * math.sqrt(0.2 * 0.8 / planned)
    assert sum(found.groups["n_valid"].to_pylist()) + failed == planned == found.rollouts.num_rows
    kinds = found.rollouts["failure_type"].drop_null().value_counts().to_pylist()
    counted = {each["values"]: each["counts"] for each in kinds}
    for kind, chance in (("ModelServerError", 0.08), ("ModelConnectionError", 0.06), ("ModelBadResponse", 0.06)):
        assert abs(counted[kind] / planned - chance) < 3 * math.sqrt(chance * (1 - chance) / planned)
    assert found.rollouts["score"].null_count == failed
    for model, skill in (("strong", STRONG), ("weak", WEAK)):
        assert_mean_near(of_model(found.groups, model, "learnability"), skill * (1 - skill))
        assert_mean_near(of_model(found.rollouts, model, "score"), skill)
    assert_mean_near(found.rewards["separation"], STRONG - WEAK)


def test_with_retries_the_failures_are_few_and_the_estimates_still_unbiased() -> None:
    tasks, k = 400, 4
    found = run(tasks, k, faults=INFRA, retries=3)
    planned = tasks * k * 2
    failed = sum(found.groups["n_failed"].to_pylist())
    assert failed < planned * 0.2**4 + 3 * math.sqrt(planned * 0.2**4) + 1
    tries = sum(found.rollouts["retries"].to_pylist())
    assert abs(tries / planned - (0.2 + 0.2**2 + 0.2**3)) < 0.02
    for model, skill in (("strong", STRONG), ("weak", WEAK)):
        assert_mean_near(of_model(found.groups, model, "learnability"), skill * (1 - skill))
    assert_mean_near(found.rewards["separation"], STRONG - WEAK)


def test_a_retried_rollout_gets_the_answer_that_it_would_have_got() -> None:
    """So that a fault cannot change a score, only delay it."""
    plain, faulty = (run(60, 4, faults=faults, retries=9) for faults in (None, INFRA))

    def scores(found: Run) -> list[tuple[Any, ...]]:
        columns = ["task_id", "model", "attempt", "score"]
        return sorted(tuple(row.values()) for row in found.rollouts.select(columns).to_pylist())

    assert sum(faulty.rollouts["retries"].to_pylist()) > 50
    assert scores(plain) == scores(faulty)


def test_another_seed_is_another_sample_and_the_same_one_the_same() -> None:
    one, same, other = (run(50, 4, seed=seed).rollouts.sort_by([("rollout_id", "ascending")]) for seed in (1, 1, 2))
    assert one["score"] == same["score"]
    assert one["score"] != other["score"]


def test_all_at_one_attempt_has_no_learnability_but_separation() -> None:
    found = run(300, 1)
    assert found.groups["learnability"].null_count == found.groups.num_rows
    assert_mean_near(found.rewards["separation"], STRONG - WEAK)
