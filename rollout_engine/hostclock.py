"""The driver's wall clock as a host knows it, so that all rows of a run are stamped by one clock.

A node's own clock may be hours off. Every request says when it was sent; the one that travelled fastest tells best
how far the host's monotonic clock is from the driver's wall clock.
"""

from __future__ import annotations

import time


class DriverClock:
    """Wrong by no more than the fastest request took to arrive; before the first one it is the node's own clock."""

    def __init__(self) -> None:
        self._base: float | None = None

    def heard(self, sent_at: float) -> None:
        """A request arrived that the driver sent at `sent_at` of its clock (seconds since 1970)."""
        base = time.monotonic() - sent_at
        self._base = base if self._base is None else min(self._base, base)

    def now(self) -> float:
        """Seconds since 1970 on the driver's clock."""
        return time.time() if self._base is None else time.monotonic() - self._base


def offset(sent_at: float, host_clock: float, received_at: float) -> tuple[float, float]:
    """(how far a host's clock is ahead of the driver's, how wrong that may be), in seconds, from one exchange."""
    return host_clock - (sent_at + received_at) / 2, (received_at - sent_at) / 2
