"""Connects to Ray or starts it, places one host on each node, and replaces lost ones."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.auth import prepare_auth, resolve_address
from actors.host import Fault, Opened, RolloutHost
from actors.reach import check_reachable, check_welcome
from rollout_engine.clusters import HostHandle, MakePlan
from rollout_engine.errors import HostError, HostLost, InputError, describe
from rollout_engine.exchange import Reply, Request
from rollout_engine.rollout import finish
from rollout_engine.version import VERSION

log = logging.getLogger(__name__)

HOST_OPEN_S = 120.0
"""The longest that a host may take to come up on a node."""
STOP_S = 30.0
MAX_CONCURRENCY = 16
"""Calls of one host at once: one exchange, those asked again, and the rest."""


class RayHandle:
    """A host actor as the driver reaches it."""

    def __init__(self, host_id: str, node_id: str, actor: Any) -> None:
        self.host_id, self.node_id, self._actor = host_id, node_id, actor

    async def exchange(self, request: Request) -> Reply:
        try:
            answer: Reply | Fault = await self._actor.exchange.remote(request)
        except ActorUnavailableError as error:
            raise HostError(describe(error)) from error
        except RayActorError as error:
            gone = isinstance(error, ActorDiedError) and await asyncio.to_thread(node_alive, self.node_id)
            raise HostLost(_first_line(error), process_gone=gone) from error
        if isinstance(answer, Fault):
            raise HostLost(answer.message) if answer.final else HostError(f"{answer.kind}: {answer.message}")
        return answer

    def nudge(self) -> None:
        self._actor.nudge.remote()

    async def waiting_for(self) -> list[str]:
        return list(await self._actor.waiting_for.remote())

    async def stop(self) -> None:
        try:
            async with asyncio.timeout(STOP_S):
                await self._actor.stop.remote()
        except (RayError, TimeoutError) as error:
            log.warning("host=%s did not stop by itself: %s", self.host_id, describe(error))
        self.kill()

    def kill(self) -> None:
        """Ends the process, if there still is one: a silent host must not wake up beside the one that replaced it."""
        ray.kill(self._actor)


class RayCluster:
    """The nodes of one Ray cluster, each with `hosts_per_node` hosts."""

    def __init__(self, address: str, hosts_per_node: int) -> None:
        self._address, self._hosts_per_node = address, hosts_per_node
        self._ours = False
        self._restore_auth = _nothing
        self._handles: dict[str, RayHandle] = {}
        self._made = 0

    async def open(self, make_plan: MakePlan, keys: Mapping[str, str]) -> list[HostHandle]:
        self._make_plan, self._keys = make_plan, dict(keys)
        connecting = asyncio.ensure_future(asyncio.to_thread(self._connect))
        try:
            await asyncio.shield(connecting)
            nodes = [node_id for node_id in usable_nodes() for _ in range(self._hosts_per_node)]
            return list(await asyncio.gather(*(self._start_host(node_id) for node_id in nodes)))
        except BaseException:
            await finish(self._undo(connecting), HOST_OPEN_S)
            raise

    async def _undo(self, connecting: asyncio.Future[None]) -> None:
        """A Ray that is being started cannot be stopped half-way: it is let come up, and then ended."""
        await asyncio.wait({connecting})
        connecting.exception()  # whoever opened the cluster has it, or has gone
        await self.close()

    def _connect(self) -> None:
        if ray.is_initialized():
            return
        address = resolve_address(self._address)
        local = address == "local"
        if not local:
            check_reachable(address)
        self._restore_auth = prepare_auth(address)
        try:
            if ":" in address:
                check_welcome(address)
            with _quiet():
                ray.init(
                    address=address,
                    include_dashboard=False if local else None,
                    log_to_driver=False,
                    configure_logging=False,
                )
        except InputError:
            self._restore_auth()
            raise
        except Exception as error:
            self._restore_auth()
            raise InputError(
                f"Ray at {address!r} cannot be used: {_first_line(error)}",
                where="ray",
                fix="check the address (RAY_ADDRESS, --ray), and RAY_AUTH_MODE and RAY_AUTH_TOKEN on both sides",
            ) from error
        self._ours = True

    async def _start_host(self, node_id: str) -> HostHandle:
        host_id = f"host-{self._made}"
        self._made += 1
        actor = RolloutHost.options(  # type: ignore[attr-defined]
            num_cpus=0,
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=MAX_CONCURRENCY,
            # Hard: two hosts that meet on one node after a failure would double its limits.
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        ).remote(self._make_plan(host_id, node_id))
        handle = RayHandle(host_id, node_id, actor)
        try:
            async with asyncio.timeout(HOST_OPEN_S):
                opened: Opened | Fault = await actor.open.remote(self._keys)
        except (RayError, TimeoutError) as error:
            ray.kill(actor)
            raise InputError(
                f"no host came up on node {node_id[:12]}: {_first_line(error)}",
                where="ray",
                fix=f"install rollout-engine=={VERSION} on every node (Python {_python()}), and look at the node's log",
            ) from error
        _check(opened, node_id)
        self._handles[host_id] = handle
        return handle

    async def replace(self, host_id: str) -> HostHandle | None:
        lost = self._handles.pop(host_id)
        lost.kill()
        if not await asyncio.to_thread(node_alive, lost.node_id):
            return None
        try:
            return await self._start_host(lost.node_id)
        except InputError as error:
            log.warning("no new host on node %s: %s", lost.node_id[:12], error)
            return None

    async def close(self) -> None:
        if self._ours:
            self._ours = False
            await asyncio.to_thread(ray.shutdown)
        self._restore_auth()


def start(address: str, hosts_per_node: int) -> RayCluster:
    """The entry point by which the engine reaches Ray: auto | local | ADDRESS. Connects when it is opened."""
    return RayCluster(address, hosts_per_node)


def usable_nodes() -> list[str]:
    """Ids of the nodes that rollouts may run on: alive and with CPUs (a head is often given none)."""
    return [node["NodeID"] for node in _alive_nodes() if node["Resources"].get("CPU", 0) > 0]


def node_alive(node_id: str) -> bool:
    """Whether Ray still counts on a node."""
    return any(node["NodeID"] == node_id for node in _alive_nodes())


def _alive_nodes() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Ray's remarks on how it starts (no SIGTERM handler in a thread, token mode) are not for our users."""
    logger = logging.getLogger("ray")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _check(opened: Opened | Fault, node_id: str) -> None:
    if isinstance(opened, Fault):
        where = opened.where or f"node {node_id[:12]}"
        raise InputError(f"{opened.message} (on node {node_id[:12]})", where=where, fix=opened.fix)
    if opened.version != VERSION:
        raise InputError(
            f"node {node_id[:12]} has rollout-engine {opened.version}, the driver has {VERSION}",
            where="ray",
            fix=f"install rollout-engine=={VERSION} on every node",
        )


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0].strip() if lines else type(error).__name__


def _python() -> str:
    import platform

    return platform.python_version()


def _nothing() -> None:
    return None
