"""What tests ask of a Ray cluster and of the machine: actors, processes, and conditions that come true in time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

POLL_S = 0.02
ROOT = Path(__file__).parents[2]
SHORT = "/tmp"
"""Where folders of Ray are made, wherever TMPDIR is: the path of a socket below one has room for 107 characters."""
PORTS = range(20_000, 32_768)
"""Above those of Ray's workers, and below those that the kernel gives to whoever connects to something."""


@dataclass(frozen=True)
class SharedRay:
    """The Ray that this test process is connected to."""

    address: str
    session_dir: Path
    token: Path

    def host_pids(self) -> list[int]:
        """Processes of live host actors, whoever's they are."""
        import ray._private.state as state

        actors = state.actors().values()
        return [each["Pid"] for each in actors if each["ActorClassName"] == "RolloutHost" and each["State"] != "DEAD"]

    def host_pid(self) -> int:
        """Of the one live host. One of an earlier run may be on its way out."""
        blocking_until(lambda: len(self.host_pids()) == 1, "there is one host")
        (host,) = self.host_pids()
        return host

    def environment(self, **more: str) -> dict[str, str]:
        """For a driver process that joins: the token file, and nothing else of Ray's."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        return {**kept, "RAY_AUTH_TOKEN_PATH": str(self.token), **more}


def kill_process(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


async def until(condition: Callable[[], T], what: str, seconds: float = 60.0) -> T:
    """What the condition gives once it is true."""
    ends = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < ends, f"not within {seconds:g} s: {what}"
        await asyncio.sleep(POLL_S)
    return found


def blocking_until(condition: Callable[[], T], what: str, seconds: float = 60.0) -> T:
    """`until` for what waits without an event loop, or holds its own up."""
    ends = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < ends, f"not within {seconds:g} s: {what}"
        time.sleep(POLL_S)
    return found


def alive(pids: Iterable[int]) -> list[int]:
    """Those that are processes, and no zombies."""
    return [pid for pid in pids if _state(pid) not in ("", "Z", "X")]


def processes() -> list[int]:
    """All that can be seen from here, at this moment."""
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def descendants(pid: int) -> list[int]:
    """The processes below one, at this moment."""
    below: dict[int, list[int]] = {}
    for each in processes():
        if fields := _fields(each):
            below.setdefault(int(fields[1]), []).append(each)
    found, look = [], [pid]
    while look:
        children = below.get(look.pop(), [])
        found += children
        look += children
    return found


def command(pid: int) -> str:
    """A process's command line, as `ps` shows it."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    except OSError:
        return ""


def temporary_folders() -> set[str]:
    """The folders of runs without a run_dir, and of whatever else the engine puts there."""
    folder = Path(os.environ.get("TMPDIR", "/tmp"))
    return {entry.name for entry in folder.iterdir() if entry.name.startswith("rollout-engine-")}


def free_port() -> int:
    """A port that nobody listens at, and that no connection is given between this and its use."""
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port
    raise AssertionError("no port is free")


def _fields(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _state(pid: int) -> str:
    fields = _fields(pid)
    return fields[0] if fields else ""


def start_driver(environment: dict[str, str], **orders: Any) -> subprocess.Popen[str]:
    """`tests.ray.drive` as a process. Its parent waits for it."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.ray.drive", json.dumps(orders)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def said(driver: subprocess.Popen[str]) -> str:
    """Its next line, but for Ray's own warnings, with their time in brackets; empty at its end."""
    assert driver.stdout is not None
    while (line := driver.stdout.readline()).startswith("[20"):
        pass
    return line.strip()
