"""A circuit breaker for one model, as a pure state machine: closed -> open -> half-open -> closed, or dead.

Closed: all may start. Open: nothing starts until `opens_at`. Half-open: one probe. A success at any time closes it
again; a failed probe opens it for twice as long; after `trips` openings without a success it is dead.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from rollout_engine.config import RetrySpec


class BreakerState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"
    DEAD = "dead"


@dataclass(slots=True)
class Breaker:
    """Judges a model by the consecutive failures of one kind among its rollouts."""

    rules: RetrySpec
    state: BreakerState = BreakerState.CLOSED
    kind: str = ""
    """The kind of failure that is being counted, or that opened the breaker."""
    count: int = 0
    trips: int = 0
    opens_at: float = 0.0
    probe: int | None = None

    def allowance(self, now: float) -> int | None:
        """How many rollouts may start now; None: no limit."""
        if self.state is BreakerState.OPEN and now >= self.opens_at:
            self.state, self.probe = BreakerState.HALF_OPEN, None
        if self.state is BreakerState.CLOSED:
            return None
        return int(self.state is BreakerState.HALF_OPEN and self.probe is None)

    def started(self, key: int) -> None:
        """A rollout was granted; in the half-open state it is the probe."""
        if self.state is BreakerState.HALF_OPEN:
            self.probe = key

    def succeeded(self) -> None:
        """A rollout of the model was not failed by infrastructure."""
        if self.state is not BreakerState.DEAD:
            self.state, self.count, self.trips, self.probe = BreakerState.CLOSED, 0, 0, None

    def failed(self, key: int, kind: str, now: float) -> None:
        """A rollout of the model was failed by infrastructure."""
        if self.state is BreakerState.CLOSED:
            self.count = self.count + 1 if kind == self.kind else 1
            self.kind = kind
            if 0 < self.rules.breaker_failures <= self.count:
                self._open(now)
        elif self.state is BreakerState.HALF_OPEN and key == self.probe:
            self._open(now)

    def forget(self, key: int) -> None:
        """A rollout ended without a finding about the model (cancelled, its host lost)."""
        if key == self.probe:
            self.probe = None

    def _open(self, now: float) -> None:
        self.trips += 1
        self.count, self.probe = 0, None
        if self.trips > self.rules.breaker_trips:
            self.state = BreakerState.DEAD
        else:
            self.state = BreakerState.OPEN
            self.opens_at = now + self.rules.breaker_pause_s * 2 ** (self.trips - 1)
