"""`--detach`: the driver goes on in a process of its own, in a session of its own, after the terminal has closed.

The process is this command again, with `--tell FD`. Until its run is open it speaks to our terminal, so that mistakes
are told here; then it turns to RUN/driver.log, says so on the descriptor, and we end.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rollout_engine.commands.console import INTERRUPTED, OK, print_json, say
from rollout_engine.commands.report import shown_path
from rollout_engine.store import named
from rollout_engine.store.layout import Layout

FLAG, TELL = "--detach", "--tell"
STOP_S = 60.0
"""How long a driver that was interrupted before its run was open may take to clean up."""
MAX_TOLD_BYTES = 1 << 16


def detach(arguments: Sequence[str], *, as_json: bool) -> int:
    """Starts the same command in the background. Returns its exit code if it ends before its run is open, else OK."""
    read, write = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "rollout_engine", *(word for word in arguments if word != FLAG), TELL, str(write)],
        stdin=subprocess.DEVNULL,
        pass_fds=(write,),
        start_new_session=True,
    )
    os.close(write)
    try:
        told = _told(read)
    except KeyboardInterrupt:
        _stop(process)
        return INTERRUPTED
    finally:
        os.close(read)
    if told is None:
        return process.wait()
    process.returncode = 0  # it is on its own from here on: not ours to wait for
    _say(told, process.pid, as_json)
    return OK


def _told(descriptor: int) -> dict[str, str] | None:
    """What the driver says once its run is open; None where it ended before that."""
    data = b""
    while len(data) < MAX_TOLD_BYTES and (more := os.read(descriptor, MAX_TOLD_BYTES)):
        data += more
    found: dict[str, str] | None = json.loads(data) if data else None
    return found


def _stop(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _say(told: dict[str, str], pid: int, as_json: bool) -> None:
    if as_json:
        print_json({**told, "pid": pid})
        return
    run = told["run"]
    say(f"detached: pid {pid}, {run}; what it says is in {told['log']}")
    say(f"  rollout attach {run}   shows how it goes\n  rollout cancel {run}   ends it")


def telling(descriptor: int, opened: Callable[[Path], None]) -> Callable[[Path], None]:
    """As `opened`, and then what is printed goes to the run's log, and whoever started us is told."""

    def told(run_dir: Path) -> None:
        opened(run_dir)
        path = Layout(run_dir.absolute()).said
        log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        sys.stdout.flush()
        sys.stderr.flush()
        for stream in (1, 2):
            os.dup2(log, stream)
        os.close(log)
        names = {"run": shown_path(run_dir), "log": named(path)}
        os.write(descriptor, json.dumps(names).encode())
        os.close(descriptor)

    return told
