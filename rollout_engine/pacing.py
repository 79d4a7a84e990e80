"""Keeps the cluster-wide limits of models moving: what hosts report goes in, new leases go out at once."""

from __future__ import annotations

from rollout_engine.board import Board, Peer
from rollout_engine.exchange import Reply


class Pacing:
    """The driver's side of limits that adapt, and of pauses that servers ask for."""

    def __init__(self, board: Board) -> None:
        self._board = board

    def heard(self, peer: Peer, reply: Reply) -> None:
        """Takes in a host's use of the budgets; a refusal and its pause reach the other hosts without delay."""
        board, now = self._board, self._board.loop.time()
        news = board.budgets.confirm(peer.link.host_id, reply.demand, now)
        if news.refused:
            self._control(now, at_once=True)
        if news.pause:
            self._tell()

    def tick(self) -> None:
        """To be called every now and then."""
        self._control(self._board.loop.time(), at_once=False)

    def _control(self, now: float, *, at_once: bool) -> None:
        board = self._board
        if board.budgets.control(now, at_once=at_once):
            board.scheduler.limit_calls(board.budgets.calls_at_once)
            board.progress.limits = board.budgets.found
            self._tell()

    def _tell(self) -> None:
        """Cuts short the exchanges that wait, so that hosts hear of their new leases."""
        for peer in self._board.peers.values():
            if peer.waiting:
                peer.waiting = False
                peer.handle.nudge()
