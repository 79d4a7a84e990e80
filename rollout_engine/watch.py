"""When a run is stuck: pure, no I/O, no clock.

Progress is a row that arrives, a task that is planned, and on the hosts every turn and every change of phase. A run
that waits for its consumer, or for a pause of its own to end, is not stuck; a disk that takes no rows is.
"""

from __future__ import annotations

from typing import NamedTuple

from rollout_engine.config import RunConfig

GRACE_S = 60.0
"""Where no_progress_s is not set: this long after the longest deadline of any rollout."""


class Pulse(NamedTuple):
    """What the driver sees at one moment. Times are on its clock."""

    pending: int
    """Planned rollouts that no host holds."""
    held: int
    uncommitted_since: float | None = None
    """Since when the oldest row has waited for the disk."""
    unread_rows: int = 0
    """Rows that a consumer has not read, where they are so many that nothing is granted."""
    wakes_at: float | None = None
    """When something starts by itself: a back-off or a pause ends."""


class Watch:
    """Keeps when something went forward last."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._longest_s = config.limits.deadline_s
        self.progressed = 0.0
        self._moves: dict[str, float] = {}
        self._unread, self._unread_since = 0, 0.0

    @property
    def limit_s(self) -> float:
        """How long nothing may go forward."""
        return self._config.no_progress_s or self._longest_s + GRACE_S

    def planned(self, deadline_s: float, now: float) -> None:
        """A task was planned whose rollouts may take so long."""
        self._longest_s = max(self._longest_s, deadline_s)
        self.progressed = now

    def heard(self, host: str, moves: float, now: float) -> None:
        """A host says how often something has gone forward there."""
        if self._moves.get(host) != moves:
            self._moves[host] = moves
            self.progressed = now

    def lost(self, host: str) -> None:
        self._moves.pop(host, None)

    def stuck(self, pulse: Pulse, now: float) -> str | None:
        """Which limit was exceeded, in words that name it; None: the run goes on."""
        store = self._config.store
        if pulse.unread_rows != self._unread or not pulse.unread_rows:
            self._unread, self._unread_since = pulse.unread_rows, now
        if pulse.uncommitted_since is not None and now - pulse.uncommitted_since > store.commit_s:
            return f"the disk has taken no rows for {store.commit_s:g} s (store.commit_s)"
        if now - self._unread_since > store.max_unread_s:
            return f"nobody has read a row for {store.max_unread_s:g} s (store.max_unread_s)"
        waits = pulse.held == 0 and pulse.wakes_at is not None and pulse.wakes_at > now
        if not pulse.pending + pulse.held or pulse.unread_rows or waits:
            self.progressed = now
        elif now - self.progressed > self.limit_s:
            return f"nothing has gone forward for {self.limit_s:g} s (no_progress_s)"
        return None
