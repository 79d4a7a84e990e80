"""Rollouts in back-off: each waits after a failure before it is tried again. Pure; times are the caller's seconds."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from rollout_engine.config import RetrySpec
from rollout_engine.exchange import scramble
from rollout_engine.tries import Try


class Backoff:
    """Begins with a failure, and ends by itself."""

    def __init__(self, retry: RetrySpec) -> None:
        self._retry = retry
        self.waiting: dict[int, Try] = {}
        """By key."""
        self._ends: list[tuple[float, int]] = []
        """When, and whose; those that were taken out meanwhile are still among them."""

    def add(self, one: Try, now: float) -> None:
        """Doubles with each failure, and is jittered between half and all of it."""
        full = min(self._retry.backoff_s * 2 ** max(one.failures - 1, 0), self._retry.backoff_max_s)
        pause = full * (0.5 + 0.5 * scramble(one.key * 64 + one.retry) / 2**64)
        self.waiting[one.key] = one
        heapq.heappush(self._ends, (now + pause, one.key))

    def over(self, now: float) -> Iterator[Try]:
        """Takes out those whose back-off has ended."""
        while self._ends and self._ends[0][0] <= now:
            _, key = heapq.heappop(self._ends)
            one = self.waiting.pop(key, None)
            if one is not None:
                yield one

    def drop(self, keys: set[int]) -> list[Try]:
        """Takes out those of them that are here."""
        return [self.waiting.pop(key) for key in keys & self.waiting.keys()]

    def next_end(self) -> float | None:
        """None: nothing waits. May be too early, never too late."""
        return self._ends[0][0] if self._ends else None
