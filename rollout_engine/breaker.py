"""A circuit breaker as a pure state machine: closed -> open -> half-open -> closed, or dead.

Closed: all may start. Open: nothing starts until `opens_at`. Half-open: one probe. A success at any time closes it
again; a failed probe opens it for twice as long; after `trips` openings without a success it is dead, or, where it is
not mortal, goes on being probed at the longest pause.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from rollout_engine.config import RetrySpec


class BreakerState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"
    DEAD = "dead"


@dataclass(slots=True)
class Breaker:
    """Judges something by the consecutive failures of one kind among the rollouts that depend on it."""

    rules: RetrySpec
    mortal: bool = True
    failures: int = -1
    """Consecutive failures that open it; 0: never; -1: `rules.breaker_failures`."""
    state: BreakerState = BreakerState.CLOSED
    kind: str = ""
    """The kind of failure that is being counted, or that opened the breaker."""
    count: int = 0
    trips: int = 0
    opens_at: float = 0.0
    probe: int | None = None
    sources: set[int] = field(default_factory=set)
    """Where the failures came from that are being counted, for those that count once for each source."""

    def __post_init__(self) -> None:
        if self.failures < 0:
            self.failures = self.rules.breaker_failures

    @property
    def exhausted(self) -> bool:
        """Whether it has had all its pauses without a success."""
        return self.trips > self.rules.breaker_trips

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
        """A rollout ended well, as far as this is concerned."""
        if self.state is not BreakerState.DEAD:
            self.state, self.count, self.trips, self.probe = BreakerState.CLOSED, 0, 0, None
            self.sources.clear()

    def failed(self, key: int, kind: str, now: float, source: int | None = None, *, patient: bool = False) -> None:
        """A rollout was failed by this. Failures of one `source` count once in a row.

        `patient`: it comes back by itself. One failure opens the breaker, and its pauses are not counted as its last.
        """
        if self.state is BreakerState.CLOSED:
            if kind != self.kind:
                self.kind, self.count = kind, 0
                self.sources.clear()
            self._count(source)
            if self.failures and (patient or self.failures <= self.count):
                self._open(now, patient)
        elif self.state is BreakerState.HALF_OPEN and key == self.probe:
            self._open(now, patient)

    def forget(self, key: int) -> None:
        """A rollout ended without a finding about this (cancelled, its host lost)."""
        if key == self.probe:
            self.probe = None

    def _count(self, source: int | None) -> None:
        if source is None:
            self.count += 1
        elif source not in self.sources:
            self.count += 1
            if len(self.sources) < self.failures:
                self.sources.add(source)

    def _open(self, now: float, patient: bool) -> None:
        self.trips = min(self.trips + 1, self.rules.breaker_trips) if patient else self.trips + 1
        self.count, self.probe = 0, None
        self.sources.clear()
        if self.exhausted and self.mortal:
            self.state = BreakerState.DEAD
        else:
            self.state = BreakerState.OPEN
            self.opens_at = now + self.rules.breaker_pause_s * 2 ** min(self.trips - 1, self.rules.breaker_trips)
