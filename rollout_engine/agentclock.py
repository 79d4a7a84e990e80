"""The agent's time limit, which stands still while its model calls wait at the gate of the run's budgets."""

from __future__ import annotations

import asyncio
import contextlib


class AgentClock:
    """Runs out at `ends`, put off by as long as calls have waited, but never beyond the rollout's deadline.

    Enter `limit` around the agent. Times are seconds on the event loop's clock.
    """

    def __init__(self, ends: float, deadline: float) -> None:
        self.ends = ends
        self.waited_s = 0.0
        """Time in which at least one call waited."""
        self.limit = asyncio.timeout_at(ends)
        self._deadline = deadline
        self._waiting = 0
        self._since = 0.0

    @property
    def at_deadline(self) -> bool:
        """Whether it is the rollout's deadline that ends the agent."""
        return self.ends >= self._deadline

    def stop(self) -> None:
        """A call begins to wait."""
        self._waiting += 1
        if self._waiting == 1:
            self._since = asyncio.get_running_loop().time()
            self._reschedule(self._deadline)

    def go_on(self) -> None:
        """A call waits no more."""
        self._waiting -= 1
        if not self._waiting:
            waited_s = asyncio.get_running_loop().time() - self._since
            self.waited_s += waited_s
            self.ends = min(self._deadline, self.ends + waited_s)
            self._reschedule(self.ends)

    def _reschedule(self, when: float) -> None:
        # Not entered (a judge's), reached, or the agent has ended: then there is nothing to put off.
        with contextlib.suppress(RuntimeError, AssertionError):
            self.limit.reschedule(when)
