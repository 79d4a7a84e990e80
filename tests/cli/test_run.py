"""`rollout run` from tasks to tables.

One test: .venv/bin/pytest tests/cli/test_run.py -k json
"""

from __future__ import annotations

import json
import os
import pty
import subprocess
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.cli.conftest import MODELS
from tests.cli.inside import Inside
from tests.cli.rollout import COMMAND, FAST, LIMIT_S, Done, environment, write_tasks


def test_a_run_ends_with_tables_and_says_what_to_do_next(finished: tuple[Path, Done]) -> None:
    _, done = finished
    for text in ("6 tasks × 2 models × 4 attempts = 48 rollouts", "strong", "strong − weak", "coverage   100 %"):
        assert text in done.out
    assert "rollout rewards a" in done.out
    assert "resume" not in done.out


def test_progress_goes_to_stderr_and_the_table_to_stdout(finished: tuple[Path, Done]) -> None:
    _, done = finished
    assert "running" in done.err
    assert "running" not in done.out
    assert "learnability" not in done.err


def test_the_run_directory_holds_every_rollout_once(finished: tuple[Path, Done]) -> None:
    folder, _ = finished
    rows = pq.read_table(folder / "a" / "rollouts")
    assert rows.num_rows == 48
    assert len(set(rows["rollout_id"].to_pylist())) == 48


def test_json_is_one_document_with_the_summary(inside: Inside) -> None:
    write_tasks(inside.folder / "tasks.jsonl")
    done = inside("run", "tasks.jsonl", *MODELS, "-k", "2", "-o", "a", "--json", "-q", *FAST)
    found = done.document
    assert (found["exit_code"], found["planned"], found["rows"], found["valid"]) == (0, 24, 24, 24)
    assert [model["model"] for model in found["summary"]["models"]] == ["strong", "weak"]
    assert found["status"] == "finished"
    assert done.err == ""


def test_failed_rollouts_are_told_by_kind_and_give_exit_code_1(inside: Inside) -> None:
    write_tasks(inside.folder / "tasks.jsonl", 2)
    broken = ("-m", "bad=scripted:p_garbage=1", "-m", "bad.call_retries=0", "--config", "run.toml")
    (inside.folder / "run.toml").write_text("[retry]\nmax_retries = 0\n")
    done = inside("run", "tasks.jsonl", *broken, "-o", "a", *FAST)
    assert done.code == 1
    assert "model:ModelBadResponse 2" in done.out
    assert "rollout resume a --failed" in done.out


def test_without_o_a_run_is_named_by_its_time(inside: Inside) -> None:
    write_tasks(inside.folder / "tasks.jsonl", 1)
    done = inside("run", "tasks.jsonl", *MODELS, "--json", *FAST)
    [run] = (inside.folder / "runs").iterdir()
    assert done.document["run_dir"] == str(run)


def test_a_config_file_says_all_and_flags_win_over_it(inside: Inside) -> None:
    write_tasks(inside.folder / "tasks.jsonl")
    (inside.folder / "run.toml").write_text(
        'tasks = "tasks.jsonl"\nrun_dir = "a"\nk = 3\nray = "off"\nsandbox = "none"\n'
        '[models.one]\nkind = "scripted"\n[models.one.options]\nskill = 0.5\n'
    )
    found = inside("run", "--config", "run.toml", "-k", "2", "--json", "-q").document
    assert (found["run_dir"], found["k"], found["planned"], found["models"]) == (
        str(inside.folder / "a"),
        2,
        12,
        ["one"],
    )


def test_limit_and_pattern_choose_tasks_and_are_remembered(inside: Inside) -> None:
    write_tasks(inside.folder / "tasks.jsonl", 12)
    chosen = ("--tasks", "sum-1*", "--limit", "2")
    done = inside("run", "tasks.jsonl", *MODELS, *chosen, "-o", "a", "--json", *FAST)
    assert done.document["planned"] == 4
    assert set(pq.read_table(inside.folder / "a" / "rollouts")["task_id"].to_pylist()) == {"sum-1", "sum-10"}
    source = json.loads((inside.folder / "a" / "source.json").read_text())
    assert (source["pattern"], source["limit"], source["count"]) == ("sum-1*", 2, 2)
    assert source["path"] == str(inside.folder / "tasks.jsonl")


def test_a_dry_run_prints_the_plan_and_its_price_and_writes_nothing(inside: Inside) -> None:
    write_tasks(inside.folder / "tasks.jsonl")
    priced = ("-m", "a.price_prompt=2", "-m", "a.price_completion=10", "-m", "a.max_tokens=1000")
    done = inside("run", "tasks.jsonl", "-m", "a=openai:gpt@http://h/v1", *priced, "-k", "5", "--dry-run")
    assert done.code == 0
    assert "6 tasks × 1 model × 5 attempts = 30 rollouts" in done.out
    assert "≤ $0.30" in done.out
    assert [path.name for path in inside.folder.iterdir()] == ["tasks.jsonl"]


def test_a_recorded_model_answers_from_its_file_and_what_is_missing_fails(inside: Inside) -> None:
    write_tasks(inside.folder / "tasks.jsonl", 3)
    answers = [{"task_id": "sum-0", "content": "0"}, {"task_id": "sum-1", "content": "7"}]
    (inside.folder / "answers.jsonl").write_text("".join(json.dumps(answer) + "\n" for answer in answers))
    done = inside("run", "tasks.jsonl", "-m", "old=replay:answers.jsonl", "-o", "a", "--json", *FAST)
    assert done.code == 1
    assert done.document["failures"] == {"model:ModelMissingAnswer": 1}
    assert done.document["summary"]["models"][0]["mean_score"]["value"] == 0.5


def test_a_spent_budget_is_told_and_gives_exit_code_1(inside: Inside) -> None:
    write_tasks(inside.folder / "tasks.jsonl", 40)
    dear = ("-m", "dear=scripted:tokens=1000,latency_ms=200", "-m", "dear.price_completion=1000")
    done = inside("run", "tasks.jsonl", *dear, "--max-cost", "3", "--slots", "2", "-o", "a", "--json", *FAST)
    found = done.document
    assert done.code == 1
    assert 0 < found["valid"] < 40
    assert found["rows"] == 40
    assert found["failures"] == {"cancel:BudgetSpent": found["cancelled"]}
    assert "budget of $3 is spent" in done.err


@pytest.mark.slow
def test_on_a_terminal_the_progress_is_a_block_that_goes_away(tmp_path: Path) -> None:
    write_tasks(tmp_path / "tasks.jsonl", 3)
    ours, theirs = pty.openpty()
    argv = [*COMMAND, "run", "tasks.jsonl", "-m", "a=scripted:latency_ms=4000", "-o", "a", *FAST]
    child = subprocess.Popen(argv, cwd=tmp_path, env=environment(), stderr=theirs, stdout=subprocess.DEVNULL)
    os.close(theirs)
    seen = b""
    try:
        while piece := os.read(ours, 65536):
            seen += piece
    except OSError:  # how a terminal says that its last writer is gone
        pass
    os.close(ours)
    assert child.wait(LIMIT_S) == 0
    assert "━".encode() in seen
    assert b"3 running" in seen
    assert b"\x1b[2K" in seen


@pytest.mark.slow
def test_a_run_that_is_stuck_says_by_what_and_where_its_state_is(inside: Inside) -> None:
    write_tasks(inside.folder / "tasks.jsonl", 2)
    (inside.folder / "stuck.toml").write_text("no_progress_s = 4.0\n")
    slow = ("-m", "m=scripted:latency_ms=900000", "--config", "stuck.toml")
    done = inside("run", "tasks.jsonl", *slow, "-o", "a", *FAST)
    assert done.code == 1
    assert "nothing has gone forward for 4 s (no_progress_s); the whole state is in" in done.err
    assert "agent, waits for call 1 to model m" in done.err
    assert "Traceback" not in done.err
    assert "m/0/sum-0: agent" in (inside.folder / "a" / "stuck-1.txt").read_text()


def test_a_spent_budget_of_tokens_is_told_and_its_rows_name_it(inside: Inside) -> None:
    write_tasks(inside.folder / "tasks.jsonl", 40)
    wordy = ("-m", "wordy=scripted:tokens=1000,latency_ms=200")
    done = inside("run", "tasks.jsonl", *wordy, "--max-tokens", "3000", "--slots", "2", "-o", "a", "--json", *FAST)
    assert done.code == 1
    assert done.document["rows"] == 40
    assert done.document["failures"] == {"cancel:BudgetSpent": done.document["cancelled"]}
    assert "budget of 3,000 tokens is spent" in done.err
