"""The driver's clock: back-offs, breakers and progress are looked at, and a run that is stuck is ended."""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from rollout_engine.board import Board
from rollout_engine.dump import ask_hosts, excerpt, text_of
from rollout_engine.errors import StuckError, describe
from rollout_engine.intake import Intake
from rollout_engine.link import Link
from rollout_engine.pacing import Pacing
from rollout_engine.threads import in_own_thread
from rollout_engine.watch import Pulse

log = logging.getLogger(__name__)

TICK_S = 0.1
"""How often back-offs, breakers, leases and the watchdog are looked at."""
DUMP_S = 10.0
"""The longest that writing the state of a stuck run takes: its disk may be what is stuck."""
UNREAD_NOTE_S = 60.0
"""A run that has waited so long for its consumer says so."""


class Ticking:
    """What happens because time passes."""

    def __init__(self, board: Board, intake: Intake) -> None:
        self._board, self._intake, self._pacing = board, intake, Pacing(board)
        self._unread_since: float | None = None

    async def tick(self) -> None:
        """Until it is cancelled. Raises StuckError once nothing has gone forward for too long."""
        board, behind = self._board, False
        while True:
            await asyncio.sleep(TICK_S)
            was_behind, behind = behind, board.behind
            now = board.loop.time()
            board.progress.now = now
            board.progress.pending = board.scheduler.pending
            board.progress.running = sum(self._running_on(peer.link) for peer in board.peers.values())
            self._intake.tell_breakers()
            self._pacing.tick()
            if board.monitor.is_due(now):
                board.monitor.show(board.glance())
            wake = board.scheduler.next_wakeup()
            if (wake is not None and wake <= now) or (was_behind and not behind):
                board.poke()
            self._tell_unread(now)
            why = board.watch.stuck(self._pulse(wake), now)
            if why is not None:
                await self._stuck(why)

    def _running_on(self, link: Link) -> int:
        """What a host said last, or what it has surely started since: it replies only when there is news."""
        return max(link.running, min(len(self._board.scheduler.held[link.host_id]), self._board.config.host.slots))

    def _pulse(self, wakes_at: float | None) -> Pulse:
        board = self._board
        return Pulse(
            pending=board.scheduler.pending,
            held=board.scheduler.held_count,
            uncommitted_since=board.commits.waiting_since,
            unread_rows=board.unread_rows,
            wakes_at=wakes_at,
        )

    def _tell_unread(self, now: float) -> None:
        if not self._board.unread_rows:
            self._unread_since = None
        elif self._unread_since is None:
            self._unread_since = now
        elif now - self._unread_since > UNREAD_NOTE_S:
            self._board.note(f"nothing is started for want of a reader: {self._board.unread_rows:,} rows are not read")

    async def _stuck(self, why: str) -> None:
        """Says what everything waits for, and ends the run; what has no row yet is for a resume."""
        hosts = await ask_hosts(self._board.peers.values())
        try:
            async with asyncio.timeout(DUMP_S):
                text = text_of(self._board, why, hosts)
                path = await in_own_thread(partial(self._board.store.dump, text), "dump state")
        except Exception as error:  # nothing may hide why the run ends
            log.warning("the state of the run could not be written: %s", describe(error))
            path = ""
        where = f"; the whole state is in {path}" if path else ""
        raise StuckError(f"{why}{where}\nwaiting for:\n{excerpt(self._board, hosts)}")
