"""One run that is struck until it is over: what is killed is put back, and how long that took is kept."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from rollout_engine.models.server_process import ServerProcess
from rollout_engine.specs import Task
from tests.chaos.daemon import Daemon
from tests.chaos.driver import DriverProcess
from tests.chaos.plan import Kind, Strike
from tests.chaos.work import config_of, serve
from tests.nodes.three import ThreeNodes, host_pids, kill_raylet
from tests.ray.rays import POLL_S, alive, free_port

T = TypeVar("T")

WAIT_S = 300.0
"""Whatever is waited for comes within this time, or the suite has failed."""


@dataclass(frozen=True, slots=True)
class Killed:
    """One kill, and what came of it."""

    kind: Kind
    seconds: float | None
    """Until it was put back and the next row was committed; None: the run was over before."""


@dataclass
class Field:
    """All that can be killed, but the driver. Whoever makes it calls `close`."""

    three: ThreeNodes
    daemon: Daemon | None
    tasks: list[Task]
    server: ServerProcess = field(init=False)
    port: int = field(init=False)

    def __post_init__(self) -> None:
        self.server = serve(self.tasks, free_port())  # nobody else is given it while no server is there
        self.port = int(self.server.url.rpartition(":")[2].partition("/")[0])

    def serve_again(self) -> None:
        """A killed server's successor, at the same port."""
        self.server.close()
        self.server = serve(self.tasks, self.port)

    def close(self) -> None:
        self.server.close()


class Leg:
    """A run in `run_dir`. `strike` gives False where the run was over before the strike's moment."""

    def __init__(self, ground: Field, run_dir: Path, work: tuple[int, int]) -> None:
        self._field, self._run_dir, self._work = ground, run_dir, work
        self.drivers = 0
        self.killed: list[Killed] = []
        self._driver = self._start()

    def _start(self, retry_failed: bool = False) -> DriverProcess:
        self.drivers += 1
        config = config_of(self._field.server.url, self._field.three.address).model_dump(
            mode="json", exclude_defaults=True
        )
        orders = {"config": config, "run_dir": str(self._run_dir), "work": self._work, "retry_failed": retry_failed}
        return DriverProcess(orders, self._run_dir.with_suffix(".err"))

    def _until(self, condition: Callable[[], T], what: str) -> T | None:
        """What it gives once it is true; None where the run is over before."""
        ends = time.monotonic() + WAIT_S
        while not (found := condition()):
            self._driver.check()
            if self._driver.finished:
                return None
            assert time.monotonic() < ends, f"not within {WAIT_S:g} s: {what} ({self._driver.done} rows)"
            time.sleep(POLL_S)
        return found

    def strike(self, strike: Strike) -> bool:
        """Kills when so many more rows are there, puts back what can be, and waits for the next row."""
        if self._until(lambda: self._driver.up and self._driver.hosts, "the driver has hosts") is None:
            return False
        wanted = self._driver.done + strike.rows
        if self._until(lambda: self._driver.done >= wanted, f"{wanted} rows") is None:
            return False
        began = time.monotonic()
        with contextlib.ExitStack() as mending:
            for kind in sorted(strike.kinds, key="driver".__eq__):  # it is asked for hosts while it lives
                self._kill(kind, strike.pick, mending)
        rows = max(self._driver.done, 0)
        went_on = self._until(lambda: self._driver.done > rows, f"a row after {strike}")
        seconds = None if went_on is None else time.monotonic() - began
        self.killed += [Killed(kind, seconds) for kind in strike.kinds]
        return True

    def _kill(self, kind: Kind, pick: int, mending: contextlib.ExitStack) -> None:
        """The kill at once; what puts things back comes after all kills of the strike."""
        match kind:
            case "host":
                self._each_host(pick, signal.SIGKILL)
            case "stop":
                mending.callback(
                    self._wake, self._each_host(pick, signal.SIGSTOP), self._driver, len(self._driver.lost)
                )
            case "raylet":
                node = self._field.three.others[pick % len(self._field.three.others)]
                kill_raylet(node)
                mending.callback(self._field.three.restore)
            case "driver":
                self._driver.end()
                mending.callback(self._start_again)
            case "docker":
                assert self._field.daemon is not None
                self._field.daemon.kill()
                mending.callback(self._field.daemon.start)
            case "model":
                os.kill(self._field.server.pid, signal.SIGKILL)
                mending.callback(self._field.serve_again)

    def _start_again(self) -> None:
        self._driver = self._start()

    def _each_host(self, pick: int, number: signal.Signals) -> int | None:
        """Sends one host a signal; gives its pid, None where the run ended before there was one."""
        for _ in range(100):
            hosts = self._until(lambda: sorted(alive(host_pids().values())), "there is a host")
            if hosts is None:
                return None
            pid = hosts[pick % len(hosts)]
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
                return pid
        raise AssertionError("hosts die faster than they can be killed")

    def _wake(self, pid: int | None, driver: DriverProcess, lost: int) -> None:
        """It wakes up when it has been given up, or its driver is gone; it is not to do anything any more."""
        if pid is None:
            return
        self._until(lambda: len(driver.lost) > lost or driver.ended or not alive([pid]), "a stopped host is given up")
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    def finish(self) -> None:
        """Lets the run come to its end."""
        self._driver.wait(4 * WAIT_S)

    def retry_failed(self) -> None:
        """Another driver, for the rows that failed. It is let finish."""
        self._driver.end()
        self._driver = self._start(retry_failed=True)
        self.finish()

    def close(self) -> None:
        self._driver.end()
