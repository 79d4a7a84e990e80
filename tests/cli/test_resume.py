"""`rollout resume`: the rest of a run, and with --failed what failed.

One test: .venv/bin/pytest tests/cli/test_resume.py -k failed
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from rollout_engine import RolloutEngine
from tests.cli.inside import Inside
from tests.cli.rollout import FAST, Done, write_tasks
from tests.helpers import make_tasks


def test_a_finished_run_has_nothing_to_do(inside: Inside, finished: tuple[Path, Done]) -> None:
    inside.go(finished[0])
    done = inside("resume", "a")
    assert done.code == 0
    assert "nothing to do: every rollout has a row" in done.err
    assert "coverage   100 %" in done.out


def test_failed_runs_only_what_has_no_score_again(inside: Inside) -> None:
    write_tasks(inside.folder / "tasks.jsonl", 3)
    answers = inside.folder / "answers.jsonl"
    answers.write_text(json.dumps({"task_id": "sum-0", "content": "0"}) + "\n")
    assert inside("run", "tasks.jsonl", "-m", "old=replay:answers.jsonl", "-o", "a", "-q", *FAST).code == 1
    again = inside("resume", "a")
    assert again.code == 1
    assert "--failed runs 2 rollouts without score again" in again.err
    answers.write_text("".join(json.dumps({"task_id": f"sum-{n}", "content": str(2 * n)}) + "\n" for n in range(3)))
    done = inside("resume", "a", "--failed", "--json", "-q")
    assert (done.code, done.document["valid"], done.document["failures"]) == (0, 3, {})
    rows = inside("show", "a", "--model", "old", "--json").document["rollouts"]
    assert [row["generation"] for row in rows] == [0, 1, 1]


def test_a_tasks_file_that_was_moved_is_named_once(inside: Inside) -> None:
    write_tasks(inside.folder / "tasks.jsonl", 3)
    assert inside("run", "tasks.jsonl", "-m", "a=scripted:p_garbage=1", "-m", "a.call_retries=0",
                  "--config", _hasty(inside.folder), "-o", "a", "-q", *FAST).code == 1  # fmt: skip
    shutil.move(inside.folder / "tasks.jsonl", inside.folder / "moved.jsonl")
    lost = inside("resume", "a", "--failed", "-q")
    assert lost.code == 2
    assert "tasks.jsonl: cannot be read" in lost.err
    assert inside("resume", "a", "--failed", "-q", "--tasks-file", "moved.jsonl").code == 1
    assert inside("resume", "a", "--failed", "-q").code == 1


def _hasty(folder: Path) -> Path:
    path = folder / "run.toml"
    path.write_text("[retry]\nmax_retries = 0\n")
    return path


def test_what_does_not_mix_results_may_change(inside: Inside) -> None:
    write_tasks(inside.folder / "tasks.jsonl", 3)
    flaky = ("-m", "a=scripted:fail_first=1", "-m", "a.call_retries=0", "--config", str(_hasty(inside.folder)))
    assert inside("run", "tasks.jsonl", *flaky, "-o", "a", "-q", *FAST).code == 1
    done = inside("resume", "a", "--failed", "-m", "a.call_retries=2", "--slots", "2", "--json", "-q")
    assert (done.code, done.document["valid"]) == (0, 3)
    config = json.loads((inside.folder / "a" / "run.json").read_text())["config"]
    assert (config["host"]["slots"], config["models"][0]["call_retries"]) == (2, 2)


async def test_a_run_from_python_goes_on_with_what_was_planned(inside: Inside) -> None:
    """Its tasks came from a program: only those that were planned are known."""
    import asyncio

    model = {"name": "m", "kind": "scripted", "call_retries": 0, "options": {"fail_first": 1}}
    async with RolloutEngine([model], ray="off", run_dir="a", retry={"max_retries": 0}) as engine:
        for round in range(2):
            await engine.finish(list(make_tasks(2)), round=round)
    done = await asyncio.to_thread(_resume, inside.folder)
    assert (done.code, done.document["valid"], done.document["planned"]) == (0, 4, 4)
    assert "going on with the tasks planned so far" in done.err


def _resume(folder: Path) -> Done:
    from tests.cli.rollout import rollout

    return rollout("resume", "a", "--failed", "-m", "m.call_retries=2", "--json", cwd=folder)


def test_a_run_that_lacks_nothing_but_its_tables_gets_them(inside: Inside) -> None:
    write_tasks(inside.folder / "tasks.jsonl", 3)
    assert inside("run", "tasks.jsonl", "-m", "a=scripted:skill=1", "-o", "a", "-q", *FAST).code == 0
    run = inside.folder / "a" / "run.json"
    run.write_text(run.read_text().replace('"status": "finished"', '"status": "running"'))
    for name in ("rollouts", "turns"):
        shutil.rmtree(inside.folder / "a" / name)
    done = inside("resume", "a", "-q", "--json")
    assert (done.code, done.document["rows"], done.document["status"]) == (0, 3, "finished")
    assert (inside.folder / "a" / "rollouts" / "part-00000.parquet").exists()


def test_the_same_tasks_in_other_bytes_are_the_same_tasks(inside: Inside) -> None:
    """Only the very same bytes are believed without a look at the tasks."""
    tasks = inside.folder / "tasks.jsonl"
    write_tasks(tasks, 3)
    assert inside("run", "tasks.jsonl", "-m", "a=scripted:p_garbage=1", "-m", "a.call_retries=0",
                  "--config", _hasty(inside.folder), "-o", "a", "-q", *FAST).code == 1  # fmt: skip
    rows = [json.loads(line) for line in tasks.read_text().splitlines()]
    tasks.write_text("".join(json.dumps(row, separators=(" ,", " : ")) + "\n" for row in rows))
    assert inside("resume", "a", "--failed", "-q").code == 1
    rows[2]["prompt"] += " now"
    tasks.write_text("".join(json.dumps(row) + "\n" for row in rows))
    other = inside("resume", "a", "--failed", "-q")
    assert (other.code, "not the tasks that the run was started with" in other.err) == (2, True), other.err
