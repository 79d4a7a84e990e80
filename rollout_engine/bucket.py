"""A leaky bucket that spaces what may happen at a limited rate: pure, told the time by its caller."""

from __future__ import annotations

import math
from dataclasses import dataclass

_EPSILON = 1e-9
"""Of an amount, so much may be missing: sums of floats never quite meet."""


@dataclass(slots=True)
class Bucket:
    """Fills by `rate` units a second up to `burst`; whoever needs more than there is waits.

    In any T seconds no more than `rate * T + burst` units are let through, and one amount that is larger than `burst`.
    Times are seconds on the caller's clock, which must not run backwards.
    """

    rate: float
    """Units per second; 0: nothing comes any more."""
    burst: float = 1.0
    """The most that is saved up, and what it begins with. Above 0."""
    level: float = math.nan
    """Units there are now; below 0 where more was taken than there was."""
    updated: float = -math.inf

    def __post_init__(self) -> None:
        if math.isnan(self.level):
            self.level = self.burst

    def wait_s(self, amount: float, now: float) -> float:
        """Seconds until this much may be taken, 0 where it may now; infinite at rate 0.

        More than `burst` is let through once the bucket is full, or it would never be.
        """
        self._fill(now)
        missing = min(amount, self.burst) - self.level
        if missing <= _EPSILON * max(1.0, amount):
            return 0.0
        return missing / self.rate if self.rate > 0 else math.inf

    def take(self, amount: float, now: float) -> None:
        """Takes it, also where there is less: the debt is paid before anything else is let through."""
        self._fill(now)
        self.level -= amount

    def give_back(self, amount: float, now: float) -> None:
        """Returns what was taken and not needed; what does not fit is lost."""
        self._fill(now)
        self.level = min(self.burst, self.level + amount)

    def change(self, now: float, *, rate: float, burst: float | None = None) -> None:
        """Another rate from now on; what is saved up or owed stays."""
        self._fill(now)
        self.rate = rate
        if burst is not None:
            self.burst = burst
            self.level = min(self.level, burst)

    def _fill(self, now: float) -> None:
        if now > self.updated:
            if self.updated > -math.inf:
                self.level = min(self.burst, self.level + (now - self.updated) * self.rate)
            self.updated = now
