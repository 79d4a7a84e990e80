"""`rollout` as its users run it: a process of its own, with what it prints, and with Ctrl-C."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LIMIT_S = 180.0
"""No command of these tests takes longer; a Ray that starts on a busy machine has its own limit."""
LEFT_S = 10.0
"""What a command has told to end is gone by then."""
FAST = ("--ray", "off")
COMMAND = (sys.executable, "-W", "error", "-m", "rollout_engine")


@dataclass(frozen=True, slots=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """What --json printed: exactly one document."""
        return json.loads(self.out)


def environment() -> dict[str, str]:
    """Without keys and addresses of whoever runs the tests, and without a terminal's width."""
    return {name: value for name, value in os.environ.items() if "API_KEY" not in name and not name.startswith("RAY_")}


def rollout(*arguments: str | Path, cwd: Path, env: dict[str, str] | None = None) -> Done:
    """Runs a command to its end."""
    argv = [*COMMAND, *map(str, arguments)]
    done = subprocess.run(
        argv,
        cwd=cwd,
        env={**environment(), **(env or {})},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    return Done(done.returncode, done.stdout, done.stderr)


class Running:
    """A command that goes on: what it says is read line by line, and it can be interrupted as a terminal does it."""

    def __init__(self, *arguments: str | Path, cwd: Path, command: Sequence[str] = COMMAND) -> None:
        self._process = subprocess.Popen(
            [*command, *map(str, arguments)],
            cwd=cwd,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # a Ctrl-C reaches the whole group: it must not be ours
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._said: dict[str, list[str]] = {"out": [], "err": []}
        self._readers = [
            threading.Thread(target=self._read, args=(name, stream))
            for name, stream in (("out", self._process.stdout), ("err", self._process.stderr))
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, name: str, stream: Any) -> None:
        with stream:
            for line in stream:
                self._said[name].append(line)
                self._lines.put(line)

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_for(self, text: str, limit_s: float = LIMIT_S) -> str:
        """The first new line, of stdout or stderr, that holds the text."""
        ends = time.monotonic() + limit_s
        while True:
            line = self._lines.get(timeout=max(ends - time.monotonic(), 0.01))
            if text in line:
                return line

    def interrupt(self, number: signal.Signals = signal.SIGINT) -> None:
        os.killpg(self._process.pid, number)

    def end(self, limit_s: float = LIMIT_S) -> Done:
        """Waits for the end."""
        code = self._process.wait(limit_s)
        for reader in self._readers:
            reader.join()
        return Done(code, "".join(self._said["out"]), "".join(self._said["err"]))

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        for reader in self._readers:
            reader.join()

    def processes_left(self, limit_s: float = LEFT_S) -> list[str]:
        """What is still there, after so long, of everything that the command has started."""
        ends = time.monotonic() + limit_s
        while (left := self._processes()) and time.monotonic() < ends:
            time.sleep(0.05)
        return left

    def _processes(self) -> list[str]:
        listed = subprocess.run(["ps", "-eo", "sid=,stat=,cmd="], capture_output=True, text=True, check=True).stdout
        rows = (line.split(None, 2) for line in listed.splitlines())
        return [cmd for sid, stat, cmd in rows if int(sid) == self._process.pid and not stat.startswith("Z")]


def write_tasks(path: Path, count: int = 6, **fields: Any) -> Path:
    """Tasks sum-0, sum-1, ... whose right answer is twice their number."""
    tasks = [
        {
            "task_id": f"sum-{number}",
            "prompt": f"What is {number} + {number}?",
            "verifier": {"type": "match", "compare": "numeric", "expected": str(2 * number)},
            "solution": str(2 * number),
            **fields,
        }
        for number in range(count)
    ]
    path.write_text("".join(json.dumps(task) + "\n" for task in tasks))
    return path
