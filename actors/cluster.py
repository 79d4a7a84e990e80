"""Connects to Ray or starts it, says which nodes it has, and starts hosts on them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ray
from ray._private.state import state
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.auth import prepare_auth, resolve_address
from actors.host import Fault, Opened, RolloutHost
from actors.jobs import submit_job
from actors.metrics import RayMetrics
from actors.reach import check_reachable, check_welcome
from rollout_engine.clusters import HostHandle, MakePlan
from rollout_engine.errors import HostError, HostLost, InputError, TaskBodyError, describe
from rollout_engine.exchange import Reply, Request
from rollout_engine.metrics import DRIVER, Exporter
from rollout_engine.placement import Node
from rollout_engine.probe import Probe
from rollout_engine.teardown import finish
from rollout_engine.version import VERSION
from rollout_engine.waiting import OLDEST, Waiting

log = logging.getLogger(__name__)

HOST_OPEN_S = 120.0
"""The longest that a host may take to come up on a node."""
ASK_S = 5.0
"""The longest that Ray is asked whether a dead host's node lives; in doubt it does not."""
STOP_S = 30.0
MAX_NOTICE_S = 3600.0
"""The longest notice of a draining node that is believed; one without a deadline has this one."""
MAX_CONCURRENCY = 16
"""Calls of one host at once: one exchange, those asked again, and the rest."""


class RayHandle:
    """A host actor as the driver reaches it."""

    def __init__(self, host_id: str, node_id: str, actor: Any) -> None:
        self.host_id, self.node_id, self._actor = host_id, node_id, actor

    async def exchange(self, request: Request) -> Reply:
        answer: Reply = await self._answer(self._actor.exchange.remote(request))
        return answer

    async def probe(self, body: bytes) -> Probe:
        answer: Probe = await self._answer(self._actor.probe.remote(body))
        return answer

    async def _answer(self, call: Any) -> Any:
        """The answer of an actor call, or the error that it means. Raises HostLost, HostError, TaskBodyError."""
        try:
            answer = await call
        except ActorUnavailableError as error:
            raise HostError(describe(error)) from error
        except RayActorError as error:
            gone = isinstance(error, ActorDiedError) and await self._node_alive()
            raise HostLost(_first_line(error), process_gone=gone) from error
        if not isinstance(answer, Fault):
            return answer
        if answer.kind == TaskBodyError.__name__:
            raise TaskBodyError(answer.message)
        raise HostLost(answer.message) if answer.final else HostError(f"{answer.kind}: {answer.message}")

    async def _node_alive(self) -> bool:
        """Whether its process is known to be gone: of a host on a lost node, nobody can say so."""
        try:
            async with asyncio.timeout(ASK_S):
                return await asyncio.to_thread(node_alive, self.node_id)
        except (RayError, TimeoutError):
            return False

    def nudge(self) -> None:
        self._actor.nudge.remote()

    async def waiting_for(self, limit: int = OLDEST) -> list[Waiting]:
        answer: list[Waiting] = await self._answer(self._actor.waiting_for.remote(limit))
        return answer

    async def stop(self) -> None:
        try:
            async with asyncio.timeout(STOP_S):
                await self._actor.stop.remote()
        except (RayError, TimeoutError) as error:
            log.warning("host=%s did not stop by itself: %s", self.host_id, describe(error))
        self.kill()

    def kill(self) -> None:
        """Ends the process, if there still is one: a silent host must not wake up beside the one that replaced it."""
        with contextlib.suppress(RayError):
            ray.kill(self._actor)


class RayCluster:
    """The nodes of one Ray cluster, each with `hosts_per_node` hosts."""

    def __init__(self, address: str, hosts_per_node: int) -> None:
        self._address, self._hosts_per_node = address, hosts_per_node
        self._ours = False
        self._restore_auth = _nothing
        self._made = 0
        self._asking: asyncio.Future[list[Node]] | None = None

    async def open(self, make_plan: MakePlan, keys: Mapping[str, str]) -> None:
        self._make_plan, self._keys = make_plan, dict(keys)
        connecting = asyncio.ensure_future(asyncio.to_thread(self.connect))
        try:
            await asyncio.shield(connecting)
        except BaseException:
            await finish(self._undo(connecting), HOST_OPEN_S)
            raise

    async def _undo(self, connecting: asyncio.Future[None]) -> None:
        """A Ray that is being started cannot be stopped half-way: it is let come up, and then ended."""
        await asyncio.wait({connecting})
        connecting.exception()  # whoever opened the cluster has it, or has gone
        await self.close()

    def connect(self) -> None:
        """Joins or starts the cluster, unless this process is in one. Blocks. Raises InputError."""
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

    async def nodes(self) -> Sequence[Node]:
        """Asks Ray in a thread, and only once at a time: a head that hangs holds up one thread, not one a look."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.ensure_future(asyncio.to_thread(usable_nodes, self._hosts_per_node))
        return await asyncio.shield(self._asking)

    async def start(self, node_id: str) -> HostHandle:
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
            _check(await self._opened(actor, node_id), node_id)
        except BaseException:
            handle.kill()
            raise
        return handle

    async def _opened(self, actor: Any, node_id: str) -> Opened | Fault:
        try:
            async with asyncio.timeout(HOST_OPEN_S):
                opened: Opened | Fault = await actor.open.remote(self._keys)
        except (RayError, TimeoutError) as error:
            why = _first_line(error) if isinstance(error, RayError) else f"it was not up within {HOST_OPEN_S:g} s"
            raise InputError(
                f"no host came up on node {node_id[:12]}: {why}",
                where="ray",
                fix=f"install rollout-engine=={VERSION} on every node (Python {_python()}), and look at the node's log",
            ) from error
        return opened

    def exporter(self) -> Exporter:
        return RayMetrics(DRIVER)

    def submit(self, entrypoint: str, folder: str) -> str:
        """Hands a command to the job server at the address. Raises InputError."""
        return submit_job(self._address, entrypoint, folder)

    async def close(self) -> None:
        if self._ours:
            self._ours = False
            await asyncio.to_thread(_shutdown)
        self._restore_auth()


def start(address: str, hosts_per_node: int) -> RayCluster:
    """The entry point by which the engine reaches Ray: auto | local | ADDRESS. Connects when it is opened."""
    return RayCluster(address, hosts_per_node)


_asking = threading.Lock()
"""Held while Ray's head is asked, in some thread: no question may meet the end of its Ray."""


def _shutdown() -> None:
    held = _asking.acquire(timeout=ASK_S)
    try:
        ray.shutdown()
    finally:
        if held:
            _asking.release()


def usable_nodes(hosts_per_node: int) -> list[Node]:
    """The nodes that rollouts may run on: alive and with CPUs (a head is often given none)."""
    with _asking:
        return _usable_nodes(hosts_per_node) if ray.is_initialized() else []


def _usable_nodes(hosts_per_node: int) -> list[Node]:
    ends_ms: Mapping[str, int] = state.get_draining_nodes()
    now_ms = time.time() * 1000
    return [
        Node(
            node["NodeID"],
            hosts_per_node,
            node["NodeManagerAddress"],
            _left_s(ends_ms[node["NodeID"]], now_ms) if node["NodeID"] in ends_ms else None,
        )
        for node in _alive_nodes()
        if node["Resources"].get("CPU", 0) > 0
    ]


def _left_s(ends_ms: int, now_ms: float) -> float:
    """Seconds until a draining node goes; it is told by another machine's clock, so it is only a hint.

    Too early, and work is handed back that might have ended; too late, and it is planned again as that of a lost host.
    """
    return min(max((ends_ms - now_ms) / 1000, 0.0), MAX_NOTICE_S) if ends_ms else MAX_NOTICE_S


def node_alive(node_id: str) -> bool:
    """Whether Ray still counts on a node."""
    with _asking:
        return ray.is_initialized() and any(node["NodeID"] == node_id for node in _alive_nodes())


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
