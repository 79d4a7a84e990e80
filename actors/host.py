"""The Ray actor that owns a node's rollouts: a guard around `rollout_engine.host.Host` and nothing else.

No exception leaves a method: a SystemExit that escaped would leave a process that answers nothing, and an exception
with a constructor of its own would arrive as text. Faults go back as data.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from typing import NamedTuple

import ray

from rollout_engine import version
from rollout_engine.errors import HostError, InputError, describe
from rollout_engine.exchange import Reply, Request
from rollout_engine.host import Host, HostPlan
from rollout_engine.machine import raise_descriptor_limit


class Fault(NamedTuple):
    """An error as data."""

    kind: str
    message: str
    final: bool = False
    """The host will never answer again."""
    where: str = ""
    fix: str = ""


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

    async def open(self, keys: Mapping[str, str]) -> Opened | Fault:
        try:
            self._loop = asyncio.get_running_loop()
            descriptors = raise_descriptor_limit()
            host = Host(self._plan, keys, on_expired=_leave)
            await host.open()
            self._host = host
            # Of the module: Ray sends this class by value, and with it the driver's own value of a plain constant.
            return Opened(version.VERSION, os.getpid(), descriptors)
        except asyncio.CancelledError:
            raise
        except InputError as error:
            return Fault(type(error).__name__, error.message, True, error.where, error.fix)
        except BaseException as error:
            return Fault(type(error).__name__, describe(error), True)

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

    async def waiting_for(self) -> list[str]:
        return self._host.waiting_for() if self._host is not None else []

    @ray.method(concurrency_group="control")
    async def nudge(self) -> None:
        if self._host is not None:
            self._loop.call_soon_threadsafe(self._host.nudge)

    async def stop(self) -> None:
        if self._host is not None:
            await self._host.close()


def _leave() -> None:
    """A host whose lease has ended has cleaned up: its process is of no use any more."""
    os._exit(0)
