"""Ctrl-C once drains, twice cancels, SIGTERM is one Ctrl-C; `resume` ends the run as if nothing had been.

One test: .venv/bin/pytest tests/cli/test_interrupt.py -k twice
"""

from __future__ import annotations

import signal
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.cli.rollout import COMMAND, FAST, Done, Running, rollout, write_tasks
from tests.ray.rays import ROOT

WAITING = ("-m", "a=scripted:skill=0.5", "-k", "2", "--slots", "3", "--config", "c.toml")
"""At most three at once, which wait for the gate."""
QUICK = ("-m", "a=scripted:skill=0.5", "-k", "2")


@pytest.fixture
def gates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the gate that agents wait for: what is under way ends when a test says so."""
    (folder := tmp_path / "gates").mkdir()
    agent = f'agent = "tests.nodes.agents:Waits"\n[agent_options]\nfolder = "{folder}"\n'
    (tmp_path / "c.toml").write_text(agent)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return folder


def run_and_interrupt(folder: Path, *signals: signal.Signals) -> tuple[Done, list[str]]:
    """Interrupts a run while its first three rollouts are under way, which end thereafter."""
    write_tasks(folder / "tasks.jsonl")
    with Running("run", "tasks.jsonl", *WAITING, "-o", "a", "--json", *FAST, cwd=folder) as running:
        running.wait_for("3 running")
        running.interrupt(signals[0])
        running.wait_for("draining")
        for number in signals[1:]:
            running.interrupt(number)
            if number is signal.SIGINT:
                running.wait_for("cancelling")
        if signal.SIGINT not in signals[1:]:
            (folder / "gates" / "gate").touch()
        done = running.end()
        return done, running.processes_left()


@pytest.mark.parametrize("signals", [(signal.SIGINT,), (signal.SIGTERM, signal.SIGTERM)], ids=["Ctrl-C", "SIGTERM"])
def test_one_ctrl_c_lets_what_runs_end_and_commits_it(
    signals: tuple[signal.Signals, ...], gates: Path, tmp_path: Path
) -> None:
    done, left = run_and_interrupt(tmp_path, *signals)
    found = done.document
    assert done.code == found["exit_code"] == 130
    assert (found["status"], found["rows"], found["valid"], found["missing"]) == ("interrupted", 3, 3, 9)
    assert found["next"][0] == "rollout resume a"
    assert left == []


def test_ctrl_c_twice_cancels_at_once_and_the_run_can_be_resumed(gates: Path, tmp_path: Path) -> None:
    done, left = run_and_interrupt(tmp_path, signal.SIGINT, signal.SIGINT)
    assert done.code == 130
    assert (done.document["rows"], done.document["missing"]) == (0, 12)
    assert left == []
    (gates / "gate").touch()
    resumed = rollout("resume", "a", "--slots", "100", "--json", cwd=tmp_path)
    assert (resumed.code, resumed.document["status"], resumed.document["rows"]) == (0, "finished", 12)


def test_a_run_that_was_interrupted_and_resumed_has_the_rows_of_an_undisturbed_one(gates: Path, tmp_path: Path) -> None:
    run_and_interrupt(tmp_path, signal.SIGINT)
    assert rollout("resume", "a", "--slots", "100", "-q", cwd=tmp_path).code == 0
    assert rollout("run", "tasks.jsonl", *QUICK, "-o", "b", "-q", *FAST, cwd=tmp_path).code == 0
    rows = [pq.read_table(tmp_path / run / "rollouts") for run in "ab"]
    scores = [Counter(zip(table["rollout_id"].to_pylist(), table["score"].to_pylist(), strict=True)) for table in rows]
    assert scores[0] == scores[1]
    assert set(scores[0].values()) == {1}


def test_a_kill_leaves_a_run_that_resumes(gates: Path, tmp_path: Path) -> None:
    write_tasks(tmp_path / "tasks.jsonl")
    with Running("run", "tasks.jsonl", *WAITING, "-o", "a", *FAST, cwd=tmp_path) as running:
        running.wait_for("3 running")
        running.interrupt(signal.SIGKILL)
        assert running.end().code == -signal.SIGKILL
    assert "interrupted" in rollout("show", "a", cwd=tmp_path).out
    (gates / "gate").touch()
    resumed = rollout("resume", "a", "--slots", "100", "--json", cwd=tmp_path)
    assert (resumed.code, resumed.document["rows"]) == (0, 12)


@pytest.mark.ray
def test_ctrl_c_in_a_terminal_drains_a_run_on_ray_and_leaves_no_process(gates: Path, tmp_path: Path) -> None:
    write_tasks(tmp_path / "tasks.jsonl")
    # Ray's own warnings are not ours to turn into errors.
    command = [argument for argument in COMMAND if argument not in ("-W", "error")]
    run = ("run", "tasks.jsonl", *WAITING, "--ray", "local", "-o", "a", "--json")
    with Running(*run, cwd=tmp_path, command=command) as running:
        running.wait_for("3 running", 180)
        running.interrupt()
        running.wait_for("draining")
        (gates / "gate").touch()
        done = running.end()
        assert (done.code, done.document["rows"], done.document["missing"]) == (130, 3, 9), done.err
        assert running.processes_left() == []
    resumed = rollout("resume", "a", "--slots", "100", "--json", *FAST, cwd=tmp_path)
    assert (resumed.code, resumed.document["rows"]) == (0, 12)
