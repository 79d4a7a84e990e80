"""Serves each host with one exchange after the other: grants by credit down, rows up."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from rollout_engine.board import Board, Peer
from rollout_engine.budgets import CONTROL_S
from rollout_engine.clusters import HostHandle
from rollout_engine.errors import HostLost, describe
from rollout_engine.exchange import HandBack, HostLimits, Reply
from rollout_engine.hostclock import offset
from rollout_engine.intake import Intake
from rollout_engine.link import Link
from rollout_engine.pacing import Pacing

log = logging.getLogger(__name__)

EXCHANGE_GRACE_S = 10.0
"""An exchange that has not returned this long after its own limit is asked again."""
RETRY_PAUSE_S = 0.2
"""Pause before a failed exchange is asked again."""
BASE_LINGER_S = 0.05
"""How long a finished row waits for company on one host; grows with their number, so that the driver has as many
exchanges a second with many hosts as with one."""
MAX_LINGER_S = 2.0
HEARTBEAT_S = 1.0
LEAVING_WAIT_S = 0.2
"""Heartbeat of a host that is to go."""
HAND_BACK_S = 15.0
"""A host whose node goes gives back what it runs so long before, or in the last quarter of a shorter notice."""
MAX_CLOCK_OFFSET_S = 2.0
"""A node whose clock is further from the driver's is named."""


class Serving:
    """One task per host, from when it joins until it is lost or the run ends."""

    def __init__(
        self, board: Board, intake: Intake, lost: Callable[[Peer, HostLost], None], retire: Callable[[Peer], None]
    ) -> None:
        """One of the two is called, once, for a host that is gone or silent for its lease, or that is to go."""
        self._board, self._intake, self._lost, self._retire = board, intake, lost, retire
        self._pacing = Pacing(board)

    def add(self, handle: HostHandle) -> None:
        """A new host gets its share from now on."""
        board = self._board
        peer = Peer(handle, Link(handle.host_id, board.epoch))
        board.peers[handle.host_id] = peer
        board.scheduler.join(handle.host_id)
        board.budgets.join(handle.host_id)
        board.progress.hosts = len(board.peers)
        board.spawn(self._serve(peer), f"serve {handle.host_id}")

    async def _serve(self, peer: Peer) -> None:
        board, host = self._board, peer.link.host_id
        while True:
            self._grant(peer)
            limits = self._limits(peer)
            reply = await self._exchange(peer, limits)
            if reply is not None:
                # A host that is told to start nothing and runs nothing has sent every row that it will have.
                peer.drained = limits.paused and not reply.running
                self._take_in(peer, reply, limits.hand_back)
            if peer.unfit or (peer.leaving_at is not None and not board.scheduler.held[host]):
                self._retire(peer)
                return

    async def _exchange(self, peer: Peer, limits: HostLimits) -> Reply | None:
        """One exchange; None where it failed and should be asked again. Lost hosts end the task."""
        peer.waiting, began = True, self._board.loop.time()
        try:
            async with asyncio.timeout(limits.wait_s + EXCHANGE_GRACE_S):
                sent_at = time.time()
                reply = await peer.handle.exchange(peer.link.request(limits, sent_at))
        except HostLost as error:
            self._lost(peer, error)
            raise asyncio.CancelledError from error
        except Exception as error:
            now = self._board.loop.time()
            peer.link.silent_since = silent = peer.link.silent_since or now
            log.warning("host=%s exchange failed, asking again: %s", peer.link.host_id, describe(error))
            if now - silent > self._board.config.host.lease_s:
                self._lost(peer, HostLost(f"silent for {now - silent:.0f} s: {describe(error)}"))
                raise asyncio.CancelledError from error
            await asyncio.sleep(RETRY_PAUSE_S)
            return None
        finally:
            peer.waiting = False
        peer.link.silent_since = None
        if not peer.link.stats:
            self._compare_clocks(peer, sent_at, reply)
        now, waited_s = self._board.loop.time(), reply.stats.get("waited_s", 0.0)
        self._board.monitor.answered(peer.link.host_id, now - began, waited_s, reply.vitals, now)
        return reply

    def _compare_clocks(self, peer: Peer, sent_at: float, reply: Reply) -> None:
        """Says which node's clock is wrong. Nothing is decided by it: rows are stamped by the driver's clock."""
        ahead, error = offset(sent_at, reply.stats.get("clock", sent_at), time.time())
        if abs(ahead) - error > MAX_CLOCK_OFFSET_S:
            how = f"{abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} the driver's"
            message = (
                f"the clock of node {peer.handle.node_id[:12]} is {how}; rows carry the driver's time: set it right"
            )
            self._board.event("clock", message, peer.handle, seconds=ahead)

    def _grant(self, peer: Peer) -> None:
        board, link = self._board, peer.link
        if board.draining or peer.leaving_at is not None or link.free_slots <= 0 or board.behind:
            return
        if board.fitness.in_doubt and self._suspended(peer):
            return
        granted = board.scheduler.grant(link.host_id, self._room(peer), board.loop.time())
        board.taken(one.key for one in granted)
        for one in granted:
            spec = board.planner.spec(one)
            if link.lacks(spec.digest):
                link.bring(spec.digest, board.planner.of(one.key).body)
            link.grant(spec)
        if board.scheduler.pending < board.config.plan_ahead:
            board.plan_more.set()

    def _room(self, peer: Peer) -> int:
        """How much of what waits a host may have: nothing queues on one host that could start on another."""
        board, slots = self._board, self._board.config.host.slots
        todo = board.scheduler.todo_count
        if todo >= len(board.peers) * slots * (1 + board.config.host.prefetch):
            return peer.link.free_slots
        held = board.scheduler.held
        mine = max(slots - len(held[peer.link.host_id]), 0)
        others = [other.link for other in board.peers.values() if other is not peer and other.leaving_at is None]
        # A new host has not said yet how much fits on it.
        room = {link.host_id: max(link.free_slots, 0) if link.stats else slots for link in others}
        elsewhere = sum(min(max(slots - len(held[host]), 0), free) for host, free in room.items())
        return min(peer.link.free_slots, mine + max(todo - mine - elsewhere, 0))

    def _suspended(self, peer: Peer) -> bool:
        """Whether it is in doubt that its node has sandboxes, and others have something to run on meanwhile."""
        board, now = self._board, self._board.loop.time()
        if not board.fitness.suspended(peer.handle.node_id, now):
            return False
        return not all(board.fitness.suspended(each.handle.node_id, now) for each in board.peers.values())

    def _limits(self, peer: Peer) -> HostLimits:
        board, host = self._board, peer.link.host_id
        held = board.scheduler.in_flight_on[host]
        calls = [*held, *[sum(held)] * len(board.config.judges)]  # each rollout may come to ask a judge
        lent = board.budgets.lend(host, calls, board.loop.time())
        peer.starved = lent.starved
        # A new host says at once how much fits on it; until then it is granted nothing.
        linger_s = min(BASE_LINGER_S * len(board.peers), MAX_LINGER_S)
        wait_s = min(max(HEARTBEAT_S, linger_s), board.config.host.lease_s / 4) if peer.link.stats else 0.0
        if lent.watched:
            wait_s = min(wait_s, CONTROL_S)
        hand_back = self._hand_back(peer)
        if hand_back is not HandBack.NOTHING:
            wait_s = min(wait_s, LEAVING_WAIT_S)
        return HostLimits(lent.leases, linger_s, wait_s, board.draining or peer.leaving_at is not None, hand_back)

    def _hand_back(self, peer: Peer) -> HandBack:
        """What a host whose node goes gives up: the rest of what it runs only when there is hardly time left."""
        if peer.leaving_at is None:
            return HandBack.NOTHING
        left = peer.leaving_at - self._board.loop.time()
        return HandBack.QUEUED if left > min(HAND_BACK_S, peer.notice_s / 4) else HandBack.ALL

    def _take_in(self, peer: Peer, reply: Reply, asked: HandBack) -> None:
        board, link = self._board, peer.link
        news = link.take_in(reply)
        self._pacing.heard(peer, reply)
        board.watch.heard(link.host_id, reply.stats.get("moves", 0.0), board.loop.time())
        for seq, batch in news.batches:
            self._intake.rows(link, seq, batch)
        for digest in news.bodies:
            self._bring(link, digest)
        for trouble in reply.troubles:
            self._tell(peer, trouble)
        if news.missing and asked is not HandBack.NOTHING:
            started = asked is HandBack.ALL
            lost = board.scheduler.handed_back(link.host_id, news.missing, started=started)
            self._intake.recover(lost, link, news.missing)
        elif news.missing:
            log.warning("host=%s lacks %d rollouts that it was granted", link.host_id, len(news.missing))
            self._intake.recover(board.scheduler.missing(link.host_id, news.missing), link, news.missing)
        link.cancel_keys.update(news.strange)
        self._poke_starved()
        board.changed.set()

    def _tell(self, peer: Peer, trouble: str) -> None:
        if trouble not in peer.link.told:
            peer.link.told.add(trouble)
            handle = peer.handle
            message = f"host {handle.host_id} on node {handle.node_id[:12]}: {trouble}"
            self._board.event("trouble", message, handle)

    def _bring(self, link: Link, digest: str) -> None:
        for key in self._board.scheduler.held[link.host_id]:
            opened = self._board.planner.of(key)
            if opened.digest == digest:
                link.bring(digest, opened.body)
                return

    def _poke_starved(self) -> None:
        for peer in self._board.peers.values():
            if peer.waiting and peer.starved and self._board.budgets.has_idle_permits:
                peer.waiting = False
                peer.handle.nudge()
