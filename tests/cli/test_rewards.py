"""`rollout rewards`: the table of tasks, from a finished run and from one that goes on.

One test: .venv/bin/pytest tests/cli/test_rewards.py -k csv
"""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest

from tests.cli.inside import Inside
from tests.cli.rollout import FAST, Done, Running, write_tasks


def test_every_task_has_a_line_and_the_models_their_summary(inside: Inside, finished: tuple[Path, Done]) -> None:
    inside.go(finished[0])
    done = inside("rewards", "a")
    assert done.code == 0
    assert [line.split()[0] for line in done.out.splitlines() if line.startswith("sum-")] == [
        f"sum-{number}" for number in range(6)
    ]
    for text in (
        "of strong",
        "of weak",
        "95 % interval",
        "strong − weak",
        "4 · learnability of weak + 0.25 · separation",
    ):
        assert text in done.out


def test_json_holds_groups_rewards_and_summary(inside: Inside, finished: tuple[Path, Done]) -> None:
    inside.go(finished[0])
    found = inside("rewards", "a", "--json").document
    assert (len(found["groups"]), len(found["rewards"])) == (12, 6)
    for reward in found["rewards"]:
        expected = 4 * reward["learnability"] + 0.25 * reward["separation"]
        assert reward["reward"] == pytest.approx(expected)
    assert found["summary"]["reward"]["n"] == 6


def test_csv_has_a_line_per_task_and_columns_per_model(inside: Inside, finished: tuple[Path, Done]) -> None:
    inside.go(finished[0])
    rows = list(csv.DictReader(io.StringIO(inside("rewards", "a", "--csv").out)))
    groups = inside("rewards", "a", "--json").document["groups"]
    assert [row["task_id"] for row in rows] == [f"sum-{number}" for number in range(6)]
    for row, strong, weak in zip(rows, groups[::2], groups[1::2], strict=True):
        assert (strong["model"], weak["model"]) == ("strong", "weak")
        assert float(row["learnability_strong"]) == pytest.approx(strong["learnability"])
        assert float(row["mean_score_weak"]) == pytest.approx(weak["mean_score"])


def test_null_is_a_dash_with_its_reason_and_empty_in_csv(inside: Inside) -> None:
    write_tasks(inside.folder / "tasks.jsonl", 2)
    assert inside("run", "tasks.jsonl", "-m", "a=scripted:skill=1", "-o", "a", "-q", *FAST).code == 0
    done = inside("rewards", "a")
    assert "–" in done.out
    assert "2 tasks: a: a variance needs 2 valid scores, there is 1" in done.out
    [row, _] = csv.DictReader(io.StringIO(inside("rewards", "a", "--csv").out))
    assert (row["reward"], row["learnability_a"], row["mean_score_a"]) == ("", "", "1")


def test_a_long_table_is_cut_and_says_so(inside: Inside) -> None:
    write_tasks(inside.folder / "tasks.jsonl", 50)
    inside("run", "tasks.jsonl", "-m", "a=scripted:skill=1", "-o", "a", "-q", *FAST)
    assert "… and 10 more (--all shows them" in inside("rewards", "a").out
    assert "more (--all" not in inside("rewards", "a", "--all").out


def test_a_run_that_goes_on_shows_what_it_has(inside: Inside) -> None:
    write_tasks(inside.folder / "tasks.jsonl", 4)
    slow = ("-m", "a=scripted:skill=1", "-m", "b=scripted:latency_ms=600000", "-k", "2")
    with Running("run", "tasks.jsonl", *slow, "-o", "a", *FAST, cwd=inside.folder) as running:
        running.wait_for("8/16 done")
        done = inside("rewards", "a")
    assert done.code == 0
    assert "The run is running: 8/16 rollouts have a row" in done.out
