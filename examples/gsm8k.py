"""Scores the recorded answers of four language models to the 1,319 test questions of GSM8K.

    python examples/gsm8k.py [gsm8k_model_solutions.jsonl.gz] [RUN_DIR]

prints each model's pass rate and how far the best is ahead of the others. The answers become `replay` models, so
nothing is called; with k = 1 there is a separation of the models but no learnability.
"""

import gzip
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import rollout_engine
from rollout_engine import ModelSpec, Task
from rollout_engine.results import Run

DATA = Path(__file__).parents[2] / "shared/data/gsm8k_model_solutions.jsonl.gz"
MODELS = ("175b_verification", "6b_verification", "175b_finetuning", "6b_finetuning")
ANSWER = r"(?m)^A:(.*)"


def rows(data: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with gzip.open(data, "rt") as lines:
        yield from ((f"gsm8k-{number:04}", json.loads(line)) for number, line in enumerate(lines))


def tasks(data: Path) -> Iterator[Task]:
    for task_id, row in rows(data):
        expected = row["ground_truth"].rpartition("A:")[2].strip()
        verifier = {"type": "match", "pattern": ANSWER, "compare": "numeric", "expected": expected}
        yield Task(task_id=task_id, prompt=row["question"], verifier=verifier, solution=row["ground_truth"])


def score(data: Path, run_dir: Path | None = None, **options: Any) -> Run:
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as answers:
        for task_id, row in rows(data):
            for model in MODELS:
                answer = {"task_id": task_id, "model": model, "content": row[model]["solution"]}
                print(json.dumps(answer), file=answers)
        answers.flush()
        models = [ModelSpec(name=model, kind="replay", file=answers.name) for model in MODELS]
        return rollout_engine.run(tasks(data), models, run_dir=run_dir, **{"sandbox": "none", **options})


if __name__ == "__main__":
    summary = score(*map(Path, sys.argv[1:] or [DATA])).summary
    for model in summary.models:
        print(f"{model.model:18} passes {model.mean_score.value:.1%} of {summary.tasks} tasks")
    for pair in summary.pairs:
        if pair.first == MODELS[0]:
            low, high = pair.separation.low, pair.separation.high
            print(f"{pair.first} over {pair.second}: {pair.separation.value:+.3f} (95 %: {low:+.3f} to {high:+.3f})")
