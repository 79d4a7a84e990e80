"""A host's share of one model's budgets: calls wait here for a permit and, where the rate is limited, a token."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque

from rollout_engine.exchange import Demand, Lease

UNLIMITED = Lease(-1, -1.0)


class Permits:
    """Hands out the leased permits in order of arrival. A lower lease takes effect as calls end."""

    def __init__(self) -> None:
        self.in_use = 0
        self.lease = Lease(0, 0.0)
        self._tokens = 0.0
        self._waiters: deque[asyncio.Future[None]] = deque()

    def renew(self, lease: Lease) -> None:
        """A new lease from the driver; its tokens add to those not used yet."""
        self.lease = lease
        self._tokens = -1.0 if lease.tokens < 0 else max(self._tokens, 0.0) + lease.tokens
        self._wake()

    @property
    def demand(self) -> Demand:
        return Demand(max(self.lease.permits, self.in_use), len(self._waiters), self._tokens)

    async def acquire(self) -> None:
        """Returns once one call may start. A cancelled waiter takes nothing."""
        if not self._waiters and self._free:
            self._take()
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self._give_back()
            else:
                with contextlib.suppress(ValueError):  # a wake-up meanwhile has passed over it
                    self._waiters.remove(waiter)
            raise

    def release(self) -> None:
        """One call has ended."""
        self.in_use -= 1
        self._wake()

    @property
    def _free(self) -> bool:
        return (self.lease.permits < 0 or self.in_use < self.lease.permits) and (self._tokens < 0 or self._tokens >= 1)

    def _take(self) -> None:
        self.in_use += 1
        if self._tokens >= 1:
            self._tokens -= 1

    def _give_back(self) -> None:
        """A call was let in and never started."""
        if self._tokens >= 0:
            self._tokens += 1
        self.release()

    def _wake(self) -> None:
        while self._waiters and self._free:
            waiter = self._waiters.popleft()
            if not waiter.done():
                self._take()
                waiter.set_result(None)
