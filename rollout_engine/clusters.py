"""Where hosts live: the contract between the driver and a cluster, and the cluster of one in-process host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol, TypeAlias

from rollout_engine.exchange import Reply, Request
from rollout_engine.host import Host, HostPlan
from rollout_engine.probe import Probe

MakePlan: TypeAlias = Callable[[str, str], HostPlan]
"""(host_id, node_id) -> what the host is told."""


class HostHandle(Protocol):
    """A host as the driver reaches it."""

    @property
    def host_id(self) -> str: ...

    async def exchange(self, request: Request) -> Reply:
        """Raises HostLost where the host is gone for good; any other error may pass."""
        ...

    def nudge(self) -> None:
        """Makes a waiting exchange return at once; does not wait."""
        ...

    async def probe(self, body: bytes) -> Probe:
        """The dry run of a task. Raises HostLost, HostError, TaskBodyError."""
        ...

    async def waiting_for(self) -> list[str]:
        """What the host's oldest rollouts wait for, one line each."""
        ...

    async def stop(self) -> None:
        """Ends the host and all that it made, in bounded time."""
        ...


class Cluster(Protocol):
    """Makes hosts and replaces lost ones."""

    async def open(self, make_plan: MakePlan, keys: Mapping[str, str]) -> list[HostHandle]:
        """The first hosts. Raises InputError where the cluster cannot be reached or used."""
        ...

    async def replace(self, host_id: str) -> HostHandle | None:
        """A new host for a lost one, or None where its node is gone too."""
        ...

    async def close(self) -> None:
        """Lets go of the cluster; hosts are stopped before."""
        ...


class LocalHandle:
    """A host on the driver's own event loop."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self.host_id = host.plan.host_id

    async def exchange(self, request: Request) -> Reply:
        return await self._host.exchange(request)

    def nudge(self) -> None:
        self._host.nudge()

    async def probe(self, body: bytes) -> Probe:
        return await self._host.probe(body)

    async def waiting_for(self) -> list[str]:
        return self._host.waiting_for()

    async def stop(self) -> None:
        await self._host.close()


class LocalCluster:
    """One host in the driver's own process: tests, small scripts, `--ray off`."""

    async def open(self, make_plan: MakePlan, keys: Mapping[str, str]) -> list[HostHandle]:
        host = Host(make_plan("host-0", "local"), keys)
        await host.open()
        return [LocalHandle(host)]

    async def replace(self, host_id: str) -> HostHandle | None:
        return None

    async def close(self) -> None:
        return None
