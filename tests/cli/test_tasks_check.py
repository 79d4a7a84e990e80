"""`rollout tasks check`: wrong files, and verifiers that cannot be trusted.

One test: .venv/bin/pytest tests/cli/test_tasks_check.py -k passes
"""

from __future__ import annotations

from tests.cli.inside import Inside
from tests.cli.rollout import write_tasks


def test_good_tasks_are_told_so(inside: Inside) -> None:
    write_tasks(inside.folder / "tasks.jsonl")
    done = inside("tasks", "check", "tasks.jsonl")
    assert done.code == 0
    assert "6 tasks, every line is valid" in done.out
    assert "6 verifiers tried" in done.out


def test_a_verifier_that_passes_an_empty_answer_is_an_error(inside: Inside) -> None:
    write_tasks(inside.folder / "tasks.jsonl", 2, verifier={"type": "match", "expected": ""}, solution="")
    done = inside("tasks", "check", "tasks.jsonl")
    assert done.code == 1
    assert "passes an empty answer" in done.out
    assert "2 verifiers of 2 cannot be trusted" in done.out


def test_a_verifier_that_fails_its_own_solution_is_an_error_in_json(inside: Inside) -> None:
    write_tasks(inside.folder / "tasks.jsonl", 2, solution="I will not say")
    done = inside("tasks", "check", "tasks.jsonl", "--json")
    assert done.code == 1
    assert {finding["severity"] for finding in done.document["findings"]} == {"error"}
    assert done.document["errors"] == 2


def test_a_wrong_file_is_bad_input(inside: Inside) -> None:
    (inside.folder / "tasks.jsonl").write_text("{}\n")
    done = inside("tasks", "check", "tasks.jsonl")
    assert done.code == 2
    assert "tasks.jsonl:1" in done.err


def test_limit_tries_only_the_first_verifiers(inside: Inside) -> None:
    write_tasks(inside.folder / "tasks.jsonl", 6)
    assert "2 verifiers tried" in inside("tasks", "check", "tasks.jsonl", "--limit", "2").out


def test_a_dry_run_that_cannot_be_had_is_not_a_verifier_that_was_tried(inside: Inside) -> None:
    script = {"type": "script", "command": "test -e made"}
    root = {"directory": str(inside.folder / "nowhere")}
    write_tasks(inside.folder / "tasks.jsonl", 2, verifier=script, environment=root, solution=None)
    assert "2 verifiers not tried" in inside("tasks", "check", "tasks.jsonl").out
    done = inside("tasks", "check", "tasks.jsonl", "--dry-run")
    assert done.code == 1
    assert "nowhere is not there on this node" in " ".join(done.out.split())
    assert "2 verifiers not tried" in done.out
    assert "verifiers tried" not in done.out
