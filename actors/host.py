"""The Ray actor that owns a node's rollouts: a guard around `rollout_engine.host.Host` and nothing else.

No exception leaves a method: a SystemExit that escaped would leave a process that answers nothing, and an exception
with a constructor of its own would arrive as text. Faults go back as data.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import ray

from actors.metrics import RayMetrics
from rollout_engine import version
from rollout_engine.errors import HostError, InputError, TaskBodyError, describe
from rollout_engine.exchange import Reply, Request
from rollout_engine.host import Host
from rollout_engine.hostplan import HostPlan
from rollout_engine.loglines import About
from rollout_engine.logs import Logs, open_logs
from rollout_engine.machine import collect_seldom, raise_descriptor_limit
from rollout_engine.probe import Probe
from rollout_engine.store.layout import Layout
from rollout_engine.store.traces import sees_run
from rollout_engine.waiting import Waiting

log = logging.getLogger(__name__)

PARENT_S = 1.0
"""How often a host looks whether its raylet is alive."""
ORPHAN_S = 60.0
"""The longest that a host without a raylet takes to clean up; what is left then ends with its process."""


class Fault(NamedTuple):
    """An error as data."""

    kind: str
    message: str
    final: bool = False
    """The host will never answer again."""
    where: str = ""
    fix: str = ""

    @classmethod
    def of(cls, error: BaseException) -> Fault:
        """What ended an actor's start; for the driver to raise again."""
        if isinstance(error, InputError):
            return cls(type(error).__name__, error.message, True, error.where, error.fix)
        return cls(type(error).__name__, describe(error), True)


class Opened(NamedTuple):
    """What a host says when it is up."""

    version: str
    pid: int
    descriptors: int


@ray.remote(concurrency_groups={"control": 2})  # type: ignore[call-overload]
class RolloutHost:
    """One per node. `exchange` runs on the host's loop; `nudge` on another, so that it is heard at once."""

    def __init__(self, plan: HostPlan) -> None:
        self._plan = plan
        self._host: Host | None = None
        self._logs: Logs | None = None
        # From now on: a raylet may die before anybody opens the host, and then nobody will.
        threading.Thread(target=self._watch_parent, args=(os.getppid(),), name="raylet watchdog", daemon=True).start()

    async def open(self, keys: Mapping[str, str]) -> Opened | Fault:
        try:
            self._loop = asyncio.get_running_loop()
            descriptors = raise_descriptor_limit()
            self._logs = _open_logs(self._plan, keys)
            host = Host(self._plan, keys, on_expired=self._leave, exporter=RayMetrics(self._plan.host_id))
            await host.open()
            self._host = host
            collect_seldom()
            # Of the module: Ray sends this class by value, and with it the driver's own value of a plain constant.
            return Opened(version.VERSION, os.getpid(), descriptors)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            return Fault.of(error)

    async def exchange(self, request: Request) -> Reply | Fault:
        if self._host is None:
            return Fault("HostError", "the host is not open", True)
        try:
            return await self._host.exchange(request)
        except asyncio.CancelledError:
            raise
        except HostError as error:
            return Fault(type(error).__name__, describe(error), True)
        except BaseException as error:
            return Fault(type(error).__name__, describe(error))

    async def probe(self, body: bytes) -> Probe | Fault:
        if self._host is None:
            return Fault("HostError", "the host is not open", True)
        try:
            return await self._host.probe(body)
        except asyncio.CancelledError:
            raise
        except TaskBodyError as error:
            return Fault(type(error).__name__, describe(error))
        except BaseException as error:
            return Fault("HostError", f"{type(error).__name__}: {describe(error)}")

    @ray.method(concurrency_group="control")
    async def waiting_for(self, limit: int) -> list[Waiting] | Fault:
        """Runs beside the host's loop, so that one that is blocked still says by what."""
        try:
            return self._host.waiting_for(limit) if self._host is not None else []
        except BaseException as error:
            return Fault("HostError", f"{type(error).__name__}: {describe(error)}")

    @ray.method(concurrency_group="control")
    async def nudge(self) -> None:
        if self._host is not None:
            self._loop.call_soon_threadsafe(self._host.nudge)

    def _watch_parent(self, raylet: int) -> None:
        """Ray counts no more on a node whose raylet is gone, and lets its actors live on: what runs here ends."""
        while os.getppid() == raylet:
            time.sleep(PARENT_S)
        if self._host is not None:
            log.error("host=%s has lost its raylet: it ends", self._plan.host_id)
            closing = asyncio.run_coroutine_threadsafe(self._host.close(), self._loop)
            with contextlib.suppress(Exception):  # what does not let itself be closed ends with its process
                closing.result(ORPHAN_S)
        self._leave()

    async def stop(self) -> None:
        if self._host is not None:
            await self._host.close()
        if self._logs is not None:
            await asyncio.to_thread(self._logs.close)

    def _leave(self) -> None:
        """A host whose lease has ended, or that lost its raylet, has cleaned up: its process is of no use any more."""
        if self._logs is not None:
            self._logs.close()
        os._exit(0)


def _open_logs(plan: HostPlan, keys: Mapping[str, str]) -> Logs:
    """A file in the run directory; the process's own standard error, which Ray keeps, where that is out of reach."""
    seen = plan.run_dir is not None and sees_run(plan.run_dir, plan.run_id)
    folder = Layout(Path(plan.run_dir)).logs if plan.run_dir is not None and seen else None
    about = About(plan.run_id, plan.epoch, plan.host_id)
    return open_logs(folder, plan.host_id, about, plan.log_level, plan.config.logs, keys.values())
