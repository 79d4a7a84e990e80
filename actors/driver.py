"""A whole run in a Ray actor of its own, so that it needs no terminal: `start_driver`, `find_driver`.

The actor takes one CPU somewhere in the cluster, brings up the hosts, and commits to the run directory, which must be
on storage that its node sees. A detached one lives until its run has ended, whoever goes: it can be found again by its
name, drained and cancelled. Its death ends its hosts; the run can be resumed.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayActorError, RayError

from actors.cluster import RayCluster
from actors.host import Fault
from rollout_engine.config import RunConfig, api_keys
from rollout_engine.engine import RolloutEngine
from rollout_engine.errors import InputError, RunError, describe
from rollout_engine.specs import Task

NAMESPACE = "rollout_engine"
"""Ray's namespace of named drivers."""
OPEN_S = 180.0
"""The longest that a driver may take to be placed and to bring its hosts up."""
ANSWER_S = 30.0
"""The longest that a driver may take to say where it stands."""
LINGER_S = 60.0
"""A detached driver whose run has ended can still be asked for so long; then its process ends."""


@dataclass(frozen=True, slots=True)
class Orders:
    """What a driver is to do. Picklable; holds no secrets."""

    config: RunConfig
    tasks: str | tuple[Task | dict[str, Any], ...]
    """A task file that the driver's node sees, or the tasks themselves."""
    run_dir: str
    resume: bool = False
    retry_failed: bool = False
    round: int = 0
    detached: bool = False


class Ended(NamedTuple):
    """How a run ended."""

    status: str
    """finished | interrupted | failed."""
    rows: int
    """Committed in this epoch and before."""
    message: str = ""
    """failed: why."""


@ray.remote(num_cpus=1, max_restarts=0, max_task_retries=0, max_concurrency=16)  # type: ignore[call-overload]
class RolloutDriver:
    """Owns one `RolloutEngine`. Errors go back as data, as those of hosts do."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._end: Ended | None = None

    async def open(self, keys: Mapping[str, str]) -> str | Fault:
        """Brings the hosts up and starts the run; the run's id."""
        orders = self._orders
        try:
            engine = RolloutEngine(
                config=orders.config,
                keys=keys,
                run_dir=orders.run_dir,
                resume=orders.resume,
                retry_failed=orders.retry_failed,
            )
            await engine.__aenter__()
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            return Fault.of(error)
        self._engine = engine
        self._work = asyncio.create_task(self._finish(), name="run")
        self._life = asyncio.create_task(self._live(), name="life")
        return engine.run_id

    async def _finish(self) -> None:
        tasks = self._orders.tasks
        await self._engine.finish(tasks if isinstance(tasks, str) else list(tasks), round=self._orders.round)

    async def _live(self) -> None:
        """From the start of the run until its end is on disk, whatever it is."""
        status, message = "finished", ""
        try:
            await self._work
            if self._engine.cancelled_by is not None:
                status, message = "interrupted", f"cancelled by {self._engine.cancelled_by}"
        except asyncio.CancelledError:
            status = "interrupted"
        except BaseException as error:
            status, message = "failed", describe(error)
        try:
            await self._engine.__aexit__(None, None, None)
        except BaseException as error:
            status, message = "failed", message or describe(error)
        progress = self._engine.progress
        self._end = Ended(status, progress.before + progress.done, message)
        if self._orders.detached:
            asyncio.get_running_loop().call_later(LINGER_S, os._exit, 0)

    async def wait(self, seconds: float) -> Ended | None:
        """The end, if it comes within so long."""
        await asyncio.wait({self._life}, timeout=seconds)
        return self._end

    async def progress(self) -> dict[str, Any]:
        """Where the run stands: counts, notes, events."""
        return self._engine.progress.to_dict()

    async def drain(self) -> None:
        """Starts nothing more; returns when what was running is committed. The run then ends as interrupted."""
        if not self._work.done():
            await self._engine.drain()
            await self.cancel()

    async def cancel(self) -> None:
        """Ends the run now; what was in flight stays planned, for a resume."""
        if not self._work.done():
            self._engine.give_up()
            self._work.cancel()
        await asyncio.wait({self._life})


class DriverHandle:
    """A driver elsewhere. Methods block; each raises RunError where the driver is gone."""

    def __init__(self, actor: Any, name: str) -> None:
        self._actor, self.name = actor, name

    def wait(self, seconds: float) -> Ended | None:
        """How the run ended; None where it goes on after so long."""
        ended: Ended | None = self._ask(self._actor.wait.remote(seconds), seconds + ANSWER_S)
        return ended

    def progress(self) -> dict[str, Any]:
        """Where the run stands."""
        found: dict[str, Any] = self._ask(self._actor.progress.remote(), ANSWER_S)
        return found

    def drain(self, seconds: float) -> None:
        """Lets what runs end, within so long, and ends the run."""
        self._ask(self._actor.drain.remote(), seconds)

    def cancel(self, seconds: float = ANSWER_S * 3) -> None:
        """Ends the run."""
        self._ask(self._actor.cancel.remote(), seconds)

    def kill(self) -> None:
        """Ends the driver's process, and with it its hosts; for one whose run has ended, or that does not answer."""
        ray.kill(self._actor)

    def _ask(self, call: Any, seconds: float) -> Any:
        try:
            return ray.get(call, timeout=seconds)
        except RayActorError as error:
            raise RunError(f"the driver {self.name!r} is gone; see its run directory, and resume it there") from error
        except RayError as error:
            raise RunError(f"the driver {self.name!r} does not answer: {describe(error).splitlines()[0]}") from error


def start_driver(
    config: RunConfig,
    tasks: str | Path | Sequence[Task | dict[str, Any]],
    run_dir: str | Path,
    *,
    name: str,
    detached: bool = False,
    resume: bool = False,
    retry_failed: bool = False,
    round: int = 0,
) -> DriverHandle:
    """Starts a run in an actor called `name`; returns once its hosts are up. Connects to `config.ray` if need be.

    API keys are read here and sent in one call. Not detached, the driver ends with this process.
    Raises InputError where the run cannot start, the name is taken, or no node has a CPU to spare.
    """
    keys = api_keys(config.clients)
    RayCluster(config.ray, config.hosts_per_node).connect()
    orders = Orders(
        config.model_copy(update={"ray": "auto"}),
        str(tasks) if isinstance(tasks, str | Path) else tuple(tasks),
        str(run_dir),
        resume,
        retry_failed,
        round,
        detached,
    )
    options = {"name": name, "namespace": NAMESPACE, "lifetime": "detached" if detached else None}
    try:
        actor = RolloutDriver.options(**options).remote(orders)  # type: ignore[attr-defined]
    except ValueError as error:
        raise InputError(
            f"a driver named {name!r} is there already", where="name", fix="attach to it, or give another name"
        ) from error
    handle = DriverHandle(actor, name)
    try:
        opened = handle._ask(actor.open.remote(keys), OPEN_S)
    except BaseException as error:
        handle.kill()
        if isinstance(error, RunError):
            raise InputError(
                f"no driver came up: {error}", where="ray", fix="one node needs a free CPU and this package"
            ) from error
        raise
    if isinstance(opened, Fault):
        handle.kill()
        raise InputError(opened.message, where=opened.where, fix=opened.fix)
    return handle


def find_driver(name: str, address: str = "auto") -> DriverHandle:
    """The driver of that name. Raises InputError where there is none."""
    RayCluster(address, 1).connect()
    try:
        return DriverHandle(ray.get_actor(name, namespace=NAMESPACE), name)
    except ValueError as error:
        raise InputError(
            f"no driver is named {name!r}", where="name", fix="its run has ended, or was never detached"
        ) from error
