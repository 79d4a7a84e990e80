"""`rollout status` and `rollout top`: a run seen from another process, while it lives, when it has ended, and killed.

One test: .venv/bin/pytest tests/cli/test_status.py -k killed
"""

from __future__ import annotations

import json
import os
import pickle
import pty
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.inside import Inside
from tests.cli.rollout import COMMAND, FAST, LIMIT_S, Done, Running, environment, rollout, write_tasks

SLOW = "weak=scripted:skill=0.5,latency_ms=600000"
"""A model that never answers within a test."""
QUICK = "good=scripted:skill=1"


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    """A run of 6 tasks by two models, of which one has answered and the other never will."""
    write_tasks(tmp_path / "tasks.jsonl")
    models = ("-m", QUICK, "-m", SLOW, "-m", "weak.max_concurrency=3")
    with Running("run", "tasks.jsonl", *models, "-o", "a", *FAST, "--slots", "8", cwd=tmp_path) as run:
        yield run


def until(cwd: Path, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """What `rollout status --json` says once it is as wanted."""
    ends = time.monotonic() + LIMIT_S
    while True:
        done = rollout("status", "a", "--json", cwd=cwd)
        if done.out and condition(done.document):
            found: dict[str, Any] = done.document
            return found
        assert time.monotonic() < ends, (done.out, done.err)


def all_good_are_done(found: dict[str, Any]) -> bool:
    status = found["status"]
    return status is not None and status["progress"]["done"] == 6 and status["phases"].get("agent") == 6


def all_others_wait(found: dict[str, Any]) -> bool:
    """Three for their answer, and three for a permit: from "agent" to there is a step."""
    if not all_good_are_done(found):
        return False
    waits = {each["waits_for"] for each in found["status"]["slowest"]}
    (weak,) = (model for model in found["status"]["models"] if model["name"] == "weak")
    return (weak["in_flight"], weak["waiting"]) == (3, 3) and "its agent" not in waits


def test_a_live_run_is_seen_from_another_process_and_goes_on(running: Running, tmp_path: Path) -> None:
    found = until(tmp_path, all_others_wait)
    assert (found["state"], found["driver"]["pid"], found["driver"]["alive"]) == ("running", running.pid, True)
    status = found["status"]
    assert (status["progress"]["total"], status["progress"]["valid"]) == (12, 6)
    [host] = status["hosts"]
    assert (host["slots"], host["running"], host["pid"]) == (8, 6, running.pid)
    models = {model["name"]: model for model in status["models"]}
    assert (models["good"]["calls"], models["weak"]["in_flight"], models["weak"]["limit"]) == (6, 3, 3)
    assert models["weak"]["waiting"] == 3
    waits = {each["waits_for"] for each in status["slowest"]}
    assert waits == {"call 1 to model weak", "a permit of model weak"}
    shown = rollout("status", "a", cwd=tmp_path)
    assert shown.code == 0
    assert "a  running" in shown.out
    assert "6/12 done (50 %)" in shown.out
    assert "call 1 to model weak" in shown.out
    assert "\x1b" not in shown.out
    running.interrupt()
    running.wait_for("draining")
    running.interrupt()
    assert running.end().code == 130
    ended = rollout("status", "a", "--json", cwd=tmp_path)
    assert (ended.code, ended.document["state"], ended.document["remark"]) == (0, "interrupted", None)
    assert ended.document["status"]["state"] == "ended"


def test_a_killed_driver_is_said_to_be_gone(running: Running, tmp_path: Path) -> None:
    until(tmp_path, all_good_are_done)
    running.interrupt(signal.SIGKILL)
    running.end()
    shown = rollout("status", "a", cwd=tmp_path)
    assert shown.code == 1
    assert f"the driver is gone (pid {running.pid} on " in shown.out
    assert "rollout resume a goes on" in shown.out
    assert "6/12 done" in shown.out
    watched = rollout("top", "a", cwd=tmp_path)
    assert watched.code == 1
    assert len(watched.out.splitlines()) == 2
    assert "the driver is gone" in watched.out


def test_seen_from_another_machine_a_driver_lives_by_its_heartbeat(running: Running, tmp_path: Path) -> None:
    """The record of a driver elsewhere: another machine's id, so that its pid says nothing here."""
    until(tmp_path, all_good_are_done)
    running.interrupt(signal.SIGKILL)
    running.end()
    path = tmp_path / "a" / "epochs" / "1.json"
    record = json.loads(path.read_text()) | {"machine": "elsewhere", "host": "elsewhere", "heartbeat": time.time()}
    path.write_text(json.dumps(record))
    assert rollout("status", "a", "--json", cwd=tmp_path).document["state"] == "running"
    ago = time.time() - 7 * record["heartbeat_s"]
    os.utime(path, (ago, ago))
    found = rollout("status", "a", "--json", cwd=tmp_path)
    assert (found.code, found.document["state"]) == (1, "gone")


def test_top_in_a_pipe_writes_plain_lines_until_the_run_ends(running: Running, tmp_path: Path) -> None:
    until(tmp_path, all_good_are_done)
    with Running("top", "a", "--every", "0.2", cwd=tmp_path) as watching:
        watching.wait_for("running · 6/12 done (50 %) · 6 running")
        running.interrupt()
        running.wait_for("draining")
        running.interrupt()
        watched = watching.end()
    assert running.end().code == 130
    assert watched.code == 0, watched.err
    assert "\x1b" not in watched.out
    assert watched.out.splitlines()[-1].startswith("interrupted · 6/12 done (50 %) · 0 running")


def on_a_terminal(*arguments: str, cwd: Path, ready: str) -> tuple[int, str]:
    """A command whose output is a terminal; Ctrl-C once it has shown `ready`."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [*COMMAND, *arguments], cwd=cwd, env={**environment(), "TERM": "xterm", "COLUMNS": "160"}, stdin=theirs,
        stdout=theirs, stderr=theirs, start_new_session=True,
    ) as process:  # fmt: skip
        os.close(theirs)
        shown = b""
        try:
            while ready.encode() not in shown:
                shown += os.read(ours, 65536)
            os.killpg(process.pid, signal.SIGINT)
            while True:
                shown += os.read(ours, 65536)
        except OSError:  # how a terminal says that nobody holds its other end
            return process.wait(LIMIT_S), shown.decode()
        finally:
            os.close(ours)


def test_top_on_a_terminal_draws_until_ctrl_c_which_leaves_the_run_alone(running: Running, tmp_path: Path) -> None:
    until(tmp_path, all_good_are_done)
    code, shown = on_a_terminal("top", "a", cwd=tmp_path, ready="waits for")
    assert code == 0
    assert "\x1b[?1049h" in shown  # a screen of its own ...
    assert "\x1b[?1049l" in shown  # ... that is given back
    assert "Traceback" not in shown
    assert rollout("status", "a", "--json", cwd=tmp_path).document["state"] == "running"


def test_flags_for_logs_and_metrics_reach_the_run(tmp_path: Path) -> None:
    write_tasks(tmp_path / "tasks.jsonl", 2)
    command = ("run", "tasks.jsonl", "-m", QUICK, *FAST, "-o", "a", "--log-level", "warning", "--metrics-port", "0")
    done = rollout(*command, cwd=tmp_path)
    assert done.code == 0, done.err
    assert "metrics: http://127.0.0.1:" in done.err
    assert (tmp_path / "a" / "logs" / "driver-e1.jsonl").read_text() == ""
    resumed = rollout("resume", "a", "--log-level", "info", cwd=tmp_path)
    assert resumed.code == 0, resumed.err


def test_an_unknown_level_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    write_tasks(tmp_path / "tasks.jsonl", 2)
    flag = rollout("run", "tasks.jsonl", "-m", QUICK, *FAST, "-o", "a", "--log-level", "loud", cwd=tmp_path)
    variable = rollout(
        "run", "tasks.jsonl", "-m", QUICK, *FAST, "-o", "a", cwd=tmp_path, env={"ROLLOUT_LOG_LEVEL": "loud"}
    )
    assert (flag.code, variable.code) == (2, 2)
    assert "logs.level" in flag.err
    assert "ROLLOUT_LOG_LEVEL: there is no log level 'loud'" in variable.err
    assert not (tmp_path / "a").exists()


# -- bad input ----------------------------------------------------------------------------------------------------


@pytest.fixture
def ended(inside: Inside) -> Inside:
    write_tasks(inside.folder / "tasks.jsonl", 2)
    assert inside("run", "tasks.jsonl", "-m", QUICK, *FAST, "-o", "a", "-q").code == 0
    return inside


def refused(done: Done, text: str) -> None:
    assert done.code == 2, done
    assert done.out == ""
    assert text in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize("command", ["status", "top"])
def test_what_is_no_run_is_refused(command: str, inside: Inside) -> None:
    refused(inside(command, "nowhere"), "nowhere: is no run directory")
    (inside.folder / "empty").mkdir()
    refused(inside(command, "empty"), "empty: is no run directory")


class Bomb:
    """Would make a file if anybody unpickled it."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, ("exploded",)


@pytest.mark.parametrize("command", ["status", "top"])
def test_a_poisoned_status_is_never_executed(command: str, ended: Inside) -> None:
    path = ended.folder / "a" / "status.json"
    path.write_bytes(pickle.dumps(Bomb()))
    refused(ended(command, "a"), "a/status.json: is no status of a run")
    assert not (ended.folder / "exploded").exists()
    (ended.folder / "exploded").mkdir()
    with pytest.raises(FileExistsError):  # the attempt could have worked: now there is something in its way
        pickle.loads(path.read_bytes())


def test_a_newer_status_is_told_from_a_damaged_one(ended: Inside) -> None:
    path = ended.folder / "a" / "status.json"
    good = json.loads(path.read_text())
    path.write_text(json.dumps(good | {"format": 99}))
    refused(ended("status", "a"), "has format 99, this version reads 1")
    path.write_text(json.dumps(good | {"hosts": "many"}))
    refused(ended("status", "a"), "is no status of a run: hosts")


def test_text_of_a_status_cannot_command_the_terminal(ended: Inside) -> None:
    path = ended.folder / "a" / "status.json"
    evil = "\x1b]0;owned\x07\x1b[2J"
    status = json.loads(path.read_text())
    status["notes"] = [evil]
    status["hosts"][0] |= {"host_id": evil, "node": evil}
    status["models"][0]["name"] = evil
    status["phases"] = {evil: 1}
    status["slowest"] = [
        {"rollout": evil, "host_id": evil, "phase": evil, "waits_for": evil, "since_s": 1.0, "age_s": 1.0}
    ]
    status["errors"] = [{"kind": evil, "count": 1, "example": evil, "rollout": evil}]
    path.write_text(json.dumps(status))
    done = ended("status", "a")
    assert done.code == 0
    assert "owned" in done.out
    assert "\x1b" not in done.out
    assert "\x07" not in done.out


def test_a_run_of_an_older_version_has_a_state_and_no_picture(ended: Inside) -> None:
    (ended.folder / "a" / "status.json").unlink()
    done = ended("status", "a")
    assert done.code == 0
    assert "a  finished" in done.out
    assert "no status.json" in done.out
