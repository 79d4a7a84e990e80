"""Where hosts live: the contract between the driver and a cluster, and the cluster of in-process hosts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Protocol, TypeAlias

from rollout_engine.config import RunConfig
from rollout_engine.errors import InputError
from rollout_engine.exchange import Reply, Request
from rollout_engine.host import Host
from rollout_engine.hostplan import HostPlan
from rollout_engine.metrics import Exporter
from rollout_engine.placement import Node
from rollout_engine.probe import Probe
from rollout_engine.waiting import OLDEST, Waiting

MakePlan: TypeAlias = Callable[[str, str], HostPlan]
"""(host_id, node_id) -> what the host is told."""


class HostHandle(Protocol):
    """A host as the driver reaches it."""

    @property
    def host_id(self) -> str: ...

    @property
    def node_id(self) -> str: ...

    async def exchange(self, request: Request) -> Reply:
        """Raises HostLost where the host is gone for good; any other error may pass."""
        ...

    def nudge(self) -> None:
        """Makes a waiting exchange return at once; does not wait."""
        ...

    async def probe(self, body: bytes) -> Probe:
        """The dry run of a task. Raises HostLost, HostError, TaskBodyError."""
        ...

    async def waiting_for(self, limit: int = OLDEST) -> list[Waiting]:
        """What the host's oldest rollouts wait for."""
        ...

    async def stop(self) -> None:
        """Ends the host and all that it made, in bounded time."""
        ...

    def kill(self) -> None:
        """Ends a lost host's process, if there still is one; does not wait."""
        ...


class Cluster(Protocol):
    """Knows the nodes, and makes hosts on them."""

    async def open(self, make_plan: MakePlan, keys: Mapping[str, str]) -> None:
        """Connects. Raises InputError where the cluster cannot be reached."""
        ...

    async def nodes(self) -> Sequence[Node]:
        """Those that are usable now. Any error may pass: the last answer holds."""
        ...

    async def start(self, node_id: str) -> HostHandle:
        """A new host on a node, in bounded time. Raises InputError, or any other error, where it does not come up."""
        ...

    def exporter(self) -> Exporter | None:
        """Where the driver's own metrics go on this cluster. May be asked before it is open."""
        ...

    async def close(self) -> None:
        """Lets go of the cluster; hosts are stopped before."""
        ...


class JobCluster(Protocol):
    """A cluster that can be handed a whole run."""

    def submit(self, entrypoint: str, folder: str) -> str:
        """Has a command run on the cluster, in a copy of the folder; returns the job's id. Raises InputError."""
        ...


class LocalHandle:
    """A host on the driver's own event loop."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self.host_id, self.node_id = host.plan.host_id, host.plan.node_id
        self._ending: asyncio.Future[None] | None = None

    async def exchange(self, request: Request) -> Reply:
        return await self._host.exchange(request)

    def nudge(self) -> None:
        self._host.nudge()

    async def probe(self, body: bytes) -> Probe:
        return await self._host.probe(body)

    async def waiting_for(self, limit: int = OLDEST) -> list[Waiting]:
        return self._host.waiting_for(limit)

    async def stop(self) -> None:
        await self._host.close()

    def kill(self) -> None:
        self._ending = asyncio.ensure_future(self._host.close())


class LocalCluster:
    """Hosts in the driver's own process: tests, small scripts, `--ray off`."""

    def __init__(self, hosts: int = 1) -> None:
        self._hosts = hosts
        self._made = 0

    async def open(self, make_plan: MakePlan, keys: Mapping[str, str]) -> None:
        self._make_plan, self._keys = make_plan, dict(keys)

    async def nodes(self) -> Sequence[Node]:
        return [Node("local", self._hosts)]

    async def start(self, node_id: str) -> HostHandle:
        host = Host(self._make_plan(f"host-{self._made}", node_id), self._keys)
        self._made += 1
        await host.open()
        return LocalHandle(host)

    def exporter(self) -> Exporter | None:
        return None

    async def close(self) -> None:
        return None


def make_cluster(config: RunConfig) -> Cluster:
    """In-process hosts, or the Ray binding by its entry point. Raises InputError."""
    if config.ray == "off":
        return LocalCluster(config.hosts_per_node)
    found = entry_points(group="rollout_engine.clusters", name="ray")
    if not found:
        raise InputError(
            "the Ray binding is not installed", where="ray", fix="pip install rollout-engine, or use --ray off"
        )
    cluster: Cluster = next(iter(found)).load()(config.ray, config.hosts_per_node)
    return cluster
