"""What bad input gets: one clear error, exit code 2, and nothing written.

One test: .venv/bin/pytest tests/cli/test_bad_input.py -k duplicate
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.cli.inside import Inside
from tests.cli.rollout import FAST, Done, Running, rollout, write_tasks

GOOD = ("-m", "a=scripted:skill=1")
TASK = {"task_id": "t", "prompt": "?", "verifier": {"type": "match", "expected": "1"}}


def refused(done: Done, *texts: str) -> None:
    """An error in the one form, that says these things; exit code 2 and an empty stdout."""
    assert done.code == 2, done.err
    assert done.out == ""
    lines = done.err.splitlines()
    assert lines[0].startswith("error: ")
    assert "Traceback" not in done.err
    for text in texts:
        assert text in done.err, done.err


def without(field: str) -> dict[str, object]:
    return {name: value for name, value in TASK.items() if name != field}


BAD_TASKS: dict[str, tuple[str, tuple[str, ...]]] = {
    "no task": ("", ("tasks.jsonl", "holds no task")),
    "no JSON": ('{"task_id": "a",\n', ("tasks.jsonl:1", "no JSON")),
    "unknown field": (json.dumps({**TASK, "promt": "x"}), ("tasks.jsonl:1", "'promt'", "unknown field", "'prompt'")),
    "wrong type": (json.dumps({**TASK, "files": 7}), ("tasks.jsonl:1", "'files'", "an object")),
    "duplicate id": (f"{json.dumps(TASK)}\n{json.dumps(TASK)}", ("tasks.jsonl:2", "'task_id'", "tasks.jsonl:1")),
    "missing verifier": (json.dumps(without("verifier")), ("tasks.jsonl:1", "needs a verifier")),
    "bad verifier": (json.dumps({**TASK, "verifier": {"type": "mach"}}), ("tasks.jsonl:1", "'mach'", "match")),
    "unknown env_key": (json.dumps({**TASK, "env_key": "web"}), ("tasks.jsonl:1", "'web'", "environments.web")),
}


@pytest.mark.parametrize("case", BAD_TASKS)
def test_a_wrong_task_file(case: str, inside: Inside) -> None:
    text, texts = BAD_TASKS[case]
    (inside.folder / "tasks.jsonl").write_text(text + "\n" if text else "")
    refused(inside("run", "tasks.jsonl", *GOOD, "-o", "new/a", *FAST), *texts)
    assert os.listdir(inside.folder) == ["tasks.jsonl"]


BAD_FLAGS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "no tasks file": (("nope.jsonl", *GOOD), ("nope.jsonl", "No such file")),
    "no tasks": (GOOD, ("there are no tasks", "rollout run tasks.jsonl")),
    "no model": (("tasks.jsonl",), ("at least one model", "-m NAME=KIND")),
    "unknown kind": (("tasks.jsonl", "-m", "a=opanai:x"), ("'opanai'", "'openai'")),
    "unknown option": (("tasks.jsonl", "-m", "a=scripted:skil=1"), ("options.skil", "skill")),
    "no server": (("tasks.jsonl", "-m", "a=openai:gpt"), ("models.a.base_url", "openai:MODEL@")),
    "no recording": (("tasks.jsonl", "-m", "a=replay:nope.jsonl"), ("nope.jsonl", "models.a.file")),
    "no key": (
        ("tasks.jsonl", "-m", "a=openai:g@http://h/v1", "-m", "a.api_key_env=NOPE_KEY"),
        ("NOPE_KEY is not set", "export NOPE_KEY"),
    ),
    "no price for a budget": (
        ("tasks.jsonl", "-m", "a=openai:g@http://h/v1", "--max-cost", "5"),
        ("no price", "a.price_prompt"),
    ),
    "no such task": (("tasks.jsonl", *GOOD, "--tasks", "web-*"), ("'web-*'",)),
    "no such agent": (("tasks.jsonl", *GOOD, "--agent", "nope"), ("unknown agent 'nope'", "single_turn")),
    "no such sandbox": (("tasks.jsonl", *GOOD, "--sandbox", "nope"), ("sandbox", "'nope'")),
    "no config": (("tasks.jsonl", *GOOD, "--config", "nope.toml"), ("nope.toml",)),
    "no number": (("tasks.jsonl", *GOOD, "-k", "many"), ("-k", "rollout run --help")),
    "no attempt": (("tasks.jsonl", *GOOD, "-k", "0"), ("'k'", "greater than 0")),
    "no such flag": (("tasks.jsonl", *GOOD, "--sanbox", "none"), ("--sanbox", "--sandbox")),
    "unreachable Ray": (("tasks.jsonl", *GOOD, "--ray", "127.0.0.1:1"), ("127.0.0.1:1", "--ray local")),
}


@pytest.mark.parametrize("case", BAD_FLAGS)
def test_wrong_flags(case: str, inside: Inside) -> None:
    write_tasks(inside.folder / "tasks.jsonl", 2)
    arguments, texts = BAD_FLAGS[case]
    ray = () if "--ray" in arguments else FAST
    refused(inside("run", *arguments, "-o", "new/a", "-q", *ray), *texts)
    assert os.listdir(inside.folder) == ["tasks.jsonl"]


def test_a_wrong_config_names_its_line(inside: Inside) -> None:
    write_tasks(inside.folder / "tasks.jsonl", 2)
    (inside.folder / "run.toml").write_text("k = 2\n[host]\nslotz = 3\n")
    refused(inside("run", "tasks.jsonl", *GOOD, "--config", "run.toml"), "run.toml:3", "host.slotz", "slots")


def test_a_directory_that_is_not_ours_is_refused(inside: Inside) -> None:
    write_tasks(inside.folder / "tasks.jsonl", 2)
    (inside.folder / "a").mkdir()
    (inside.folder / "a" / "thesis.txt").write_text("mine")
    refused(inside("run", "tasks.jsonl", *GOOD, "-o", "a", "-q", *FAST), "a: is not empty")
    assert os.listdir(inside.folder / "a") == ["thesis.txt"]


def test_a_run_that_is_there_is_not_overwritten(inside: Inside, finished: tuple[Path, Done]) -> None:
    inside.go(finished[0])
    before = sorted(path.name for path in Path("a").iterdir())
    refused(inside("run", "tasks.jsonl", *GOOD, "-o", "a", "-q", *FAST), "is a run already", "rollout resume ")
    assert sorted(path.name for path in Path("a").iterdir()) == before


def test_an_unwritable_place_is_refused(inside: Inside) -> None:
    write_tasks(inside.folder / "tasks.jsonl", 2)
    (inside.folder / "file").write_text("")
    refused(inside("run", "tasks.jsonl", *GOOD, "-o", "file/a", "-q", *FAST), "file/a")


@pytest.mark.parametrize("command", ["resume", "rewards", "show"])
def test_a_path_that_is_no_run_is_refused(command: str, inside: Inside) -> None:
    refused(inside(command, "."), "run.json")
    assert os.listdir(inside.folder) == []


def test_a_second_driver_on_a_live_run_is_refused(tmp_path: Path) -> None:
    write_tasks(tmp_path / "tasks.jsonl", 2)
    slow = ("-m", "a=scripted:latency_ms=600000")
    with Running("run", "tasks.jsonl", *slow, "-o", "a", *FAST, cwd=tmp_path) as first:
        first.wait_for("running")
        refused(rollout("resume", "a", "-q", cwd=tmp_path), "a driver works on this run", str(first.pid))


def test_resuming_with_another_config_is_refused_with_the_difference(
    inside: Inside, finished: tuple[Path, Done]
) -> None:
    shutil.copytree(finished[0], inside.folder, dirs_exist_ok=True)
    before = (inside.folder / "a" / "run.json").read_bytes()
    done = inside("resume", "a", "-m", "weak.options.skill=0.9", "--failed", "-q", "--tasks-file", "tasks.jsonl")
    refused(done, "would mix results", "models.weak.options.skill: 0.3 -> 0.9")
    assert (inside.folder / "a" / "run.json").read_bytes() == before


def test_resuming_with_other_tasks_is_refused(inside: Inside, finished: tuple[Path, Done]) -> None:
    shutil.copytree(finished[0], inside.folder, dirs_exist_ok=True)
    other = write_tasks(inside.folder / "other.jsonl", 7)
    refused(inside("resume", "a", "--tasks-file", other), "other.jsonl", "not the tasks", "--tasks-file")
    refused(inside("resume", "a", "--tasks-file", "gone.jsonl"), "gone.jsonl")
