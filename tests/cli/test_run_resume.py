"""`rollout run --resume`: one command starts a run and goes on with it. Run: pytest tests/cli/test_run_resume.py"""

from __future__ import annotations

from tests.cli.inside import Inside
from tests.cli.rollout import FAST, write_tasks

COMMAND = ("run", "tasks.jsonl", "-m", "a=scripted:skill=1", "-k", "2", "-o", "a", "--resume", "-q", "--json", *FAST)


def test_the_same_command_starts_a_run_and_goes_on_with_it(inside: Inside) -> None:
    write_tasks(inside.folder / "tasks.jsonl", 3)
    first = inside(*COMMAND)
    assert (first.code, first.document["rows"]) == (0, 6), first.err
    again = inside(*COMMAND)
    assert (again.code, again.document["run_id"]) == (0, first.document["run_id"])
    assert "nothing to do" in again.err


def test_other_tasks_than_the_run_s_are_refused(inside: Inside) -> None:
    write_tasks(inside.folder / "tasks.jsonl", 3)
    inside(*COMMAND)
    write_tasks(inside.folder / "tasks.jsonl", 4)
    done = inside(*COMMAND)
    assert (done.code, "not the tasks that the run was started with" in done.err) == (2, True), done.err
