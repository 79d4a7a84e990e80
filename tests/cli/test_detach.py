"""A run in the background: it outlives its terminal, is shown from another one, and ends when it is told to.

One test: .venv/bin/pytest tests/cli/test_detach.py -k terminal
"""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from rollout_engine.store import open_run
from tests.cli.rollout import COMMAND, FAST, LIMIT_S, Done, Running, environment, rollout, write_tasks

TASKS, K = 6, 2
ROWS = TASKS * K
FOR_EVER = 600_000
"""Milliseconds that a model takes whose run is not to end by itself."""
QUICK_TABLES = "[store]\nlive_tables_s = 1\nheartbeat_s = 0.5\n"


def models(latency_ms: int) -> tuple[str, ...]:
    return ("-m", f"a=scripted:skill=0.5,latency_ms={latency_ms}", "-k", str(K), "--config", "c.toml", *FAST)


def detached(folder: Path, latency_ms: int, slots: int = 3, extra: tuple[str, ...] = ()) -> dict[str, str]:
    """What a detached run says of itself."""
    write_tasks(folder / "tasks.jsonl", TASKS)
    (folder / "c.toml").write_text(QUICK_TABLES)
    command = ("run", "tasks.jsonl", *extra, *models(latency_ms), "--slots", str(slots), "-o", "a", "--detach")
    done = rollout(*command, "--json", cwd=folder)
    assert done.code == 0, done.err
    told: dict[str, str] = done.document
    return told


def until(true: Callable[[], bool], what: str) -> None:
    ends = time.monotonic() + LIMIT_S
    while not true():
        assert time.monotonic() < ends, f"not in {LIMIT_S:g} s: {what}"
        time.sleep(0.05)


def gone(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder whose detached drivers, should a test fail, do not stay."""
    yield tmp_path
    for record in tmp_path.glob("*/epochs/*.json"):
        with suppress(ProcessLookupError, ValueError):
            pid = json.loads(record.read_text())["pid"]
            if not gone(pid) and str(tmp_path) in os.readlink(f"/proc/{pid}/cwd"):
                os.kill(pid, signal.SIGKILL)


def test_the_driver_goes_on_when_the_terminal_closes_and_its_log_is_in_the_run(folder: Path) -> None:
    write_tasks(folder / "tasks.jsonl", TASKS)
    (folder / "c.toml").write_text(QUICK_TABLES)
    terminal, slave = pty.openpty()
    command = [*COMMAND, "run", "tasks.jsonl", *models(4000), "--slots", "3", "-o", "a", "--detach"]
    with subprocess.Popen(
        command, cwd=folder, env=environment(), stdin=slave, stdout=slave, stderr=slave, start_new_session=True
    ) as shell:
        os.close(slave)
        said = b""
        with suppress(OSError):  # how a terminal says that nobody holds it any more
            while chunk := os.read(terminal, 4096):
                said += chunk
        assert shell.wait() == 0
    os.close(terminal)
    assert b"rollout attach a" in said, "its descriptors are closed, so reading the terminal has come to its end"
    driver = open_run(folder / "a").driver()
    assert driver is not None
    assert os.getsid(driver.pid) == driver.pid
    until(lambda: gone(driver.pid), "the run ends")
    run = open_run(folder / "a")
    assert run.info.status == "finished"
    assert len(run.rollouts()) == ROWS
    log = (folder / "a" / "driver.log").read_text()
    assert "done" in log
    assert "\x1b[" not in log, "a log is no terminal"


def test_bad_input_is_told_where_the_command_was_typed(folder: Path) -> None:
    write_tasks(folder / "tasks.jsonl", 1)
    done = rollout("run", "nothing.jsonl", "-m", "a=scripted:skill=1", "-o", "a", "--detach", *FAST, cwd=folder)
    assert (done.code, "nothing.jsonl" in done.err) == (2, True)
    (folder / "a").mkdir()
    (folder / "a" / "thesis.tex").write_text("x")
    done = rollout("run", "tasks.jsonl", "-m", "a=scripted:skill=1", "-o", "a", "--detach", *FAST, cwd=folder)
    assert (done.code, "is not empty" in done.err) == (2, True)
    assert [path.name for path in (folder / "a").iterdir()] == ["thesis.tex"]


def test_attach_shows_it_until_its_end_and_ctrl_c_lets_it_go_on(folder: Path) -> None:
    told = detached(folder, 8000)
    with Running("attach", "a", cwd=folder) as watching:
        watching.wait_for("running since")
        watching.interrupt()
        done = watching.end()
    assert done.code == 0
    assert "detached: the run goes on" in done.err
    assert not gone(int(told["pid"]))
    with Running("attach", "a", "--json", cwd=folder) as watching:
        watching.wait_for("done")
        done = watching.end()
    assert done.code == 0, done.err
    assert (done.document["status"], done.document["rows"]) == ("finished", ROWS)
    again = rollout("attach", "a", cwd=folder)
    assert (again.code, "no driver is at work on it: the run is finished" in again.err) == (0, True)


def cancelled(folder: Path) -> tuple[Done, dict[str, int]]:
    """Cancels, and counts the rows by status."""
    done = rollout("cancel", "a", cwd=folder)
    statuses = open_run(folder / "a").rollouts(["status"]).column("status").to_pylist()
    return done, {status: statuses.count(status) for status in set(statuses)}


def test_cancel_gives_every_planned_rollout_its_row_and_leaves_no_process(folder: Path) -> None:
    told = detached(folder, FOR_EVER)
    done, counts = cancelled(folder)
    assert done.code == 0, done.err
    assert counts == {"cancelled": ROWS}
    until(lambda: gone(int(told["pid"])), "the driver has ended")
    shown = rollout("show", "a", "--json", cwd=folder).document
    assert (shown["status"], shown["missing"], shown["cancelled"]) == ("interrupted", 0, ROWS)
    assert len(pq.read_table(folder / "a" / "rollouts")) == ROWS, "its tables are made"
    assert "cancelled by" in (folder / "a" / "driver.log").read_text()
    assert "the run is interrupted" in rollout("cancel", "a", cwd=folder).err


def test_what_was_cancelled_can_be_resumed_and_an_old_request_does_not_end_it_again(folder: Path) -> None:
    detached(folder, FOR_EVER)
    cancelled(folder)
    with Running("resume", "a", "--failed", cwd=folder) as running:
        running.wait_for("3 running")
        done, _ = cancelled(folder)
        assert done.code == 0, "the second request is for the second driver"
        assert running.end().code == 130


def test_cancel_of_a_run_whose_driver_was_killed_says_so_and_ends_it(folder: Path) -> None:
    told = detached(folder, FOR_EVER, extra=("-m", "quick=scripted:skill=1"))
    until(lambda: len(open_run(folder / "a").rollouts(["status"])) > 0, "a row, and with it the plan, is on the disk")
    os.kill(int(told["pid"]), signal.SIGKILL)
    until(lambda: gone(int(told["pid"])), "it is dead")
    before = len(open_run(folder / "a").rollouts(["status"]))
    done, counts = cancelled(folder)
    assert done.code == 0, done.err
    assert "ended without a word" in done.err
    assert f"{2 * ROWS - before} cancelled rows written" in done.err
    assert counts == {"cancelled": 2 * ROWS - before, "completed": before}
    assert open_run(folder / "a").info.status == "interrupted"


def test_cancel_does_not_wait_for_ever(folder: Path) -> None:
    told = detached(folder, FOR_EVER)
    os.kill(int(told["pid"]), signal.SIGSTOP)
    try:
        done = rollout("cancel", "a", "--wait", "1", cwd=folder)
    finally:
        os.kill(int(told["pid"]), signal.SIGCONT)
    assert (done.code, "still at work after 1 s" in done.err) == (1, True)
    until(lambda: gone(int(told["pid"])), "it hears of it later")
    assert set(open_run(folder / "a").rollouts(["status"]).column("status").to_pylist()) == {"cancelled"}


@pytest.mark.parametrize("command", ["attach", "cancel"])
def test_what_is_no_run_is_told(command: str, folder: Path) -> None:
    done = rollout(command, "nothing", cwd=folder)
    assert (done.code, "is no run directory" in done.err) == (2, True)


def test_a_job_s_run_must_lie_where_the_cluster_finds_it(folder: Path) -> None:
    write_tasks(folder / "tasks.jsonl", 1)
    command = ("run", "tasks.jsonl", "-m", "a=scripted:skill=1", "--ray", "http://127.0.0.1:1")
    done = rollout(*command, "-o", "here", "--detach", cwd=folder)
    assert (done.code, "must be one that the cluster finds" in done.err) == (2, True)
