"""What docker can do on this machine, for `rollout doctor`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rollout_engine.errors import RolloutEngineError
from rollout_engine.sandboxes.docker.body import unenforceable
from rollout_engine.sandboxes.docker.engine import Engine
from rollout_engine.sandboxes.docker.hijack import Address
from rollout_engine.sandboxes.docker.reach import NO_DAEMON, Reach, facts_of, reach
from rollout_engine.sandboxes.docker.supply import can_supply


@dataclass(frozen=True, slots=True)
class DockerCapabilities:
    """`advice` says what to do about what is missing; empty where nothing is."""

    reachable: bool
    host: str
    version: str = ""
    api_version: str = ""
    storage_driver: str = ""
    cgroup_version: str = ""
    runtimes: tuple[str, ...] = ()
    limits: tuple[str, ...] = ()
    supervisor: bool = False
    """Commands run by a supervisor in the container, not by the Engine's slower and less exact exec."""
    images: int = 0
    reach: Reach = field(default=NO_DAEMON)
    advice: tuple[str, ...] = field(default=())


async def capabilities(engine_host: str | None = None) -> DockerCapabilities:
    """Asks the daemon; never raises where it cannot be reached."""
    try:
        engine = Engine(engine_host, threads=1)
    except RolloutEngineError as error:
        return DockerCapabilities(False, engine_host or "", advice=(str(error),))
    try:
        info = await engine.ask("info", lambda api: {**api.info(), "_api": api.api_version})
    except RolloutEngineError as error:
        return DockerCapabilities(False, engine.host, advice=(str(error),))
    finally:
        engine.close()
    supervisor = await can_supply(info)
    return _found(engine, info, supervisor, await reach_of(engine.address, info))


async def reach_of(address: Address, info: Mapping[str, Any]) -> Reach:
    """How agent programs in its containers reach their proxy."""
    return reach(await asyncio.to_thread(facts_of, address, await can_supply(info)))


def _found(engine: Engine, info: Mapping[str, Any], supervisor: bool, way: Reach) -> DockerCapabilities:
    lacking = unenforceable(info)
    return DockerCapabilities(
        reachable=True,
        host=engine.host,
        version=str(info.get("ServerVersion", "")),
        api_version=str(info["_api"]),
        storage_driver=str(info.get("Driver", "")),
        cgroup_version=str(info.get("CgroupVersion", "1")),
        runtimes=tuple(sorted(info.get("Runtimes") or {})),
        limits=tuple(limit for limit in ("memory", "processes", "cpus") if limit not in lacking),
        supervisor=supervisor,
        images=int(info.get("Images", 0)),
        reach=way,
        advice=tuple(_advice(engine, info, lacking, supervisor)),
    )


def _advice(engine: Engine, info: Mapping[str, Any], lacking: list[str], supervisor: bool) -> list[str]:
    advice = [f"the daemon cannot limit {limit}: enable its cgroup controller in the kernel" for limit in lacking]
    if info.get("Driver") == "vfs":
        advice.append("storage driver vfs copies a whole image per sandbox: use overlay2")
    if not engine.is_local:
        advice.append("the daemon is remote: sandboxes of dead hosts that ran elsewhere are not found by the reaper")
    if not supervisor:
        advice.append("install a C compiler with a static libc (gcc, libc6-dev): commands then cost 1 ms instead of 45")
    if not info.get("Images"):
        advice.append("the daemon has no image: pull or load those that the tasks name")
    return advice
