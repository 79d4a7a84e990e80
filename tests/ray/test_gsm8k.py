"""Real answers of four language models through Ray: the counts are known."""

from __future__ import annotations

import gzip
import importlib.util
import json
from collections import Counter
from pathlib import Path
from types import ModuleType

import pyarrow.compute as pc
import pytest

from rollout_engine.results import Run
from tests.ray.rays import SharedRay

ROOT = Path(__file__).parents[2]
DATA = ROOT.parent / "shared/data/gsm8k_model_solutions.jsonl.gz"
PASSES = {"175b_verification": 742, "6b_verification": 515, "175b_finetuning": 458, "6b_finetuning": 286}

pytestmark = [
    pytest.mark.ray,
    pytest.mark.data,
    pytest.mark.skipif(not DATA.exists(), reason=f"{DATA} is not there"),
]


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gsm8k", ROOT / "examples/gsm8k.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def run(shared_ray: SharedRay, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return example().score(DATA, tmp_path_factory.mktemp("gsm8k") / "run")


def test_the_passes_are_those_of_the_labels(run: Run) -> None:
    passed = Counter(run.rollouts.filter(run.rollouts["passed"])["model"].to_pylist())
    assert passed == PASSES


def test_each_verdict_is_that_of_its_label(run: Run) -> None:
    verdicts = {
        (task_id, model): passed
        for task_id, model, passed in zip(
            *(run.rollouts[name].to_pylist() for name in ("task_id", "model", "passed")), strict=True
        )
    }
    with gzip.open(DATA, "rt") as lines:
        for number, line in enumerate(lines):
            row = json.loads(line)
            for model in PASSES:
                assert verdicts[f"gsm8k-{number:04}", model] == row[model]["is_correct"], (number, model)


def test_each_rollout_has_one_row(run: Run) -> None:
    keys = zip(*(run.rollouts[name].to_pylist() for name in ("round", "task_id", "model", "attempt")), strict=True)
    assert run.rollouts.num_rows == len(set(keys)) == 1319 * 4
    assert set(run.rollouts["status"].to_pylist()) == {"completed"}


def test_an_answer_without_its_line_scores_zero_and_not_null(run: Run) -> None:
    missing = pc.invert(pc.match_substring_regex(run.rollouts["final_answer"], r"(?m)^A:"))
    scores = run.rollouts.filter(missing)["score"].to_pylist()
    assert scores
    assert set(scores) == {0.0}
    assert run.rollouts["score"].null_count == 0


def test_one_attempt_says_nothing_of_learnability(run: Run) -> None:
    assert run.groups.num_rows == 1319 * 4
    assert run.groups["learnability"].null_count == 1319 * 4
    assert run.rewards["learnability"].null_count == 1319


def test_the_paired_separation_is_the_difference_of_the_passes(run: Run) -> None:
    pair = next(
        each for each in run.summary.pairs if (each.first, each.second) == ("175b_verification", "6b_finetuning")
    )
    assert pair.separation.value == pytest.approx(456 / 1319, abs=1e-12)
    assert pair.separation.low < 456 / 1319 < pair.separation.high
