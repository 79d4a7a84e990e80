"""Judges whether a server has become slow by what is asked of it: pure, told the time."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rollout_engine.knob import DECREASE

PATIENCE_S = 5.0
"""A cap is raised without a judgement where calls are too few for one in this time."""
FEW_SAMPLES = 10
"""Calls whose typical latency may be the server's usual one."""
MIN_SAMPLES = 30
"""Calls whose typical latency is taken for that of the server."""
RECENT = 16
"""Calls that the latency of late is a mean of."""


@dataclass(slots=True)
class Latency:
    """Judges whether a server has become slow by what is asked of it.

    Calls that take `factor` times as long as they did once may be longer ones: so the cap is cut on trial, and where
    that does not help, the cut is taken back and this is the new normal.
    """

    factor: float | None
    typical: float = 0.0
    recent: float = 0.0
    """Typical seconds of the last calls; 0 before the first."""
    _normal: float = math.inf
    _all_count: int = 0
    """Samples of whatever cap: the lowest latency may be the first, of when there were few calls."""
    _all_logs: float = 0.0
    _count: int = 0
    _logs: float = 0.0
    _trial: tuple[float, float] | None = None
    """(cap, typical latency) before the cut."""
    _until: float = -math.inf
    _judged: bool = True
    """Since the cap was changed."""

    def add(self, count: int, latency_s: float | None) -> None:
        if count and latency_s is not None and latency_s > 0:
            weight = min(1.0, count / RECENT) if self.recent else 1.0
            self.recent = math.exp((1 - weight) * math.log(self.recent or 1.0) + weight * math.log(latency_s))
            self._count += count
            self._logs += count * math.log(latency_s)
            self._all_count += count
            self._all_logs += count * math.log(latency_s)
            if self._all_count >= FEW_SAMPLES:
                self._normal = min(self._normal, math.exp(self._all_logs / self._all_count))
                self._all_count, self._all_logs = 0, 0.0

    def changed(self, now: float) -> None:
        """The cap is another one: calls that began before say nothing of it."""
        self._until = max(self._until, now + 2 * self.typical)
        self._judged = self.factor is None

    def allows_growth(self, now: float) -> bool:
        """Whether the cap of now has been judged, or too few calls end to wait for that."""
        return self._trial is None and (self._judged or now >= self._until + PATIENCE_S)

    def judge(self, cap: float, in_flight: int, now: float) -> float | None:
        """Another cap, or None to leave it as it is."""
        if now < self._until:
            self._count, self._logs = 0, 0.0  # calls that began before the cut
            return None
        if self._count < MIN_SAMPLES:
            return None
        self.typical = math.exp(self._logs / self._count)
        self._count, self._logs = 0, 0.0
        if self.factor is None:
            return None
        if self._trial is not None:
            before, self._trial = self._trial, None
            if self.typical > before[1] * (1 + DECREASE) / 2:
                self._normal = max(self._normal, self.typical)
                return before[0]
        self._judged = True
        if self.typical > self.factor * self._normal:
            self._trial = (cap, self.typical)
            self._until = now + 2 * self.typical
            return min(cap, in_flight) * DECREASE
        return None
