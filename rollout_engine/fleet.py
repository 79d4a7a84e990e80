"""The run's hosts: the first ones, those of nodes that join, what a lost one held, and the one that takes its place."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from rollout_engine.board import Board, Peer
from rollout_engine.clusters import Cluster, MakePlan
from rollout_engine.errors import HostLost, RunError, describe
from rollout_engine.intake import Intake
from rollout_engine.placement import Node, Placement
from rollout_engine.serving import Serving
from rollout_engine.teardown import finish

STOP_S = 40.0
"""The longest that stopping the hosts takes before they are left to their leases."""
LOOK_S = 2.0
"""How often the cluster is asked for its nodes."""
ASK_S = 10.0
"""The longest that it may take to say; the last answer holds until then."""
NO_HOST_S = 60.0
"""A run without any host waits this long for a node to join."""


class Fleet:
    """Owns the hosts from their start to their end."""

    def __init__(self, board: Board, intake: Intake, cluster: Cluster) -> None:
        self._board, self._intake, self._cluster = board, intake, cluster
        self.serving = Serving(board, intake, self._lost, self._retire)
        self._placement = Placement()
        self._nodes: Sequence[Node] = ()
        self._alone_since: float | None = None
        self._last = ""
        """How the last host was lost."""

    # -- life ---------------------------------------------------------------------------------------------------

    async def open(self, make_plan: MakePlan, keys: Mapping[str, str]) -> None:
        """A host on every node that can have one. Raises InputError where none can, or the cluster is not reached."""
        await self._cluster.open(make_plan, keys)
        self._news = asyncio.Event()
        try:
            self._nodes = await self._cluster.nodes()
            wanted = self._placement.to_start(self._nodes, self._board.loop.time())
            found = await asyncio.gather(*map(self._start, wanted))
            failed = [(node, error) for node, error in zip(wanted, found, strict=True) if error is not None]
            if failed and not self._board.peers:
                raise failed[0][1]
            for node, error in failed:
                self._tell_failed(node, error)
        except BaseException:
            await finish(self._undo(), 2 * STOP_S)
            raise
        self._board.spawn(self._watch(), "watch nodes")

    async def _undo(self) -> None:
        await self._board.end_tasks()
        await self.stop()
        await self._cluster.close()

    async def stop(self) -> None:
        """Ends all hosts, in bounded time; those that do not end are left to their leases."""
        stops = [asyncio.ensure_future(peer.handle.stop()) for peer in self._board.peers.values()]
        if stops:
            _, late = await asyncio.wait(stops, timeout=STOP_S)
            for stop in late:
                stop.cancel()
            await asyncio.gather(*stops, return_exceptions=True)

    # -- hosts come ---------------------------------------------------------------------------------------------

    async def _start(self, node: Node) -> Exception | None:
        """A host on a node; the error where it does not come up: the others go on without it."""
        board = self._board
        try:
            handle = await self._cluster.start(node.node_id)
        except Exception as error:
            self._last = f"node {node} has none: {describe(error)}"
            self._tell_given_up(self._placement.failed(node.node_id, board.loop.time()), node.node_id)
            return error
        if board.over.is_set():
            await handle.stop()
            return None
        self._placement.started(node.node_id, handle.host_id, board.loop.time())
        self._alone_since = None
        self.serving.add(handle)
        board.event("host_up", f"host {handle.host_id} is up on node {node}", handle, tell=False)
        return None

    async def _watch(self) -> None:
        """Looks at the cluster's nodes from time to time, and at once when a host is lost."""
        while True:
            self._place()
            if self._alone_since is not None:
                self._check_alone(self._board.loop.time())
            try:
                async with asyncio.timeout(LOOK_S):
                    await self._news.wait()
            except TimeoutError:
                pass
            self._news.clear()
            await self._look()

    async def _look(self) -> None:
        board = self._board
        try:
            async with asyncio.timeout(ASK_S):
                self._nodes = await self._cluster.nodes()
        except Exception as error:
            board.note(f"the cluster does not say which nodes it has: {describe(error)}; hosts go on as they are")
            return
        leaving = {node.node_id: node.leaving_in_s for node in self._nodes if node.leaving_in_s is not None}
        for peer in board.peers.values():
            if peer.leaving_at is None and peer.handle.node_id in leaving:
                self._leaves(peer, leaving[peer.handle.node_id])

    def _place(self) -> None:
        board = self._board
        for node in self._placement.to_start(self._nodes, board.loop.time()):
            board.spawn(self._start_one(node), f"start a host on {node.node_id}")

    async def _start_one(self, node: Node) -> None:
        error = await self._start(node)
        if error is not None:
            self._tell_failed(node, error)
        self._news.set()

    def _tell_failed(self, node: Node, error: Exception) -> None:
        self._board.event("host_failed", f"no host on node {node}: {describe(error)}", node=node.node_id)

    def _check_alone(self, now: float) -> None:
        """Raises RunError where there is no host and none will come."""
        if self._board.peers or self._placement.starting or self._alone_since is None:
            return
        staying = [node for node in self._nodes if node.leaving_in_s is None]
        patience = 0.0 if staying else NO_HOST_S
        if self._placement.hopeless(staying) and now - self._alone_since >= patience:
            raise RunError(f"no host is left ({self._last}); resume the run when the cluster is back")

    # -- hosts go -----------------------------------------------------------------------------------------------

    def _leaves(self, peer: Peer, left_s: float) -> None:
        """Its node is being drained: nothing new starts there, and what does not end in time is handed back."""
        board, handle = self._board, peer.handle
        peer.leaving_at, peer.notice_s = board.loop.time() + left_s, left_s
        message = (
            f"node {handle.node_id[:12]} is being drained and goes in {left_s:.0f} s: host {handle.host_id} leaves"
        )
        board.event("draining", message, handle, rollouts=len(board.scheduler.held[handle.host_id]))
        handle.nudge()

    def _lost(self, peer: Peer, error: HostLost) -> None:
        """A host is gone: its work is planned again elsewhere, and another host is asked for."""
        board, host, now = self._board, peer.link.host_id, self._board.loop.time()
        held = list(board.scheduler.held[host])
        why = f"host {host} is lost: {describe(error)}"
        board.event("host_lost", why, peer.handle, rollouts=len(held))
        self._last = f"the last one was {host}: {describe(error)}"
        blame = peer.leaving_at is None
        returns_at = now if error.process_gone else now + board.config.host.lease_s
        self._gone(peer, returns_at, blame=blame and not board.scheduler.runs_suspects_only(host))
        lost = board.scheduler.lost(host, blame=blame)
        board.recoveries.lost(host, peer.handle.node_id, [one.key for one in lost.planned_again], now)
        peer.handle.kill()
        self._intake.recover(lost)

    def _retire(self, peer: Peer) -> None:
        """A host that is of no more use is stopped; what it held is planned elsewhere, and nobody is to blame."""
        board, host, now = self._board, peer.link.host_id, self._board.loop.time()
        held = list(board.scheduler.held[host])
        node = peer.handle.node_id
        if peer.unfit:
            why = f"host {host} on node {node[:12]} can not run what it is given: {peer.unfit}"
            board.event("host_retired", why, peer.handle, rollouts=len(held))
            self._last = why
        else:
            board.event("drained", f"host {host} has left node {node[:12]}", peer.handle)
        self._gone(peer, now + board.config.host.lease_s if held else now, blame=bool(peer.unfit))
        lost = board.scheduler.lost(host, blame=False)
        board.spawn(peer.handle.stop(), f"stop {host}")
        self._intake.recover(lost)

    def _gone(self, peer: Peer, returns_at: float, *, blame: bool) -> None:
        board, host, now = self._board, peer.link.host_id, self._board.loop.time()
        board.budgets.lost(host, returns_at)
        board.watch.lost(host)
        board.monitor.lost(host)
        del board.peers[host]
        board.progress.hosts = len(board.peers)
        self._tell_given_up(self._placement.gone(host, now, blame=blame), peer.handle.node_id)
        if not board.peers:
            self._alone_since = now
        self._news.set()

    def _tell_given_up(self, given_up: bool, node_id: str) -> None:
        if given_up:
            message = f"node {node_id[:12]} gets no further host: too many in a row died young or did not come up"
            self._board.event("node_given_up", message, node=node_id)
