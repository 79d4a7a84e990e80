"""One limit that is searched for by additive increase and multiplicative decrease: pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

DECREASE = 0.8
"""A knob is cut to so much of itself by refusals that follow on others, at a level that was fine before."""
SLOW_START = 1.5
"""Factor of each step before the first refusal."""
LATE_START = 1.1
"""The same for a knob that was never refused, once the other one was."""
RECOVER = 0.05
"""Step below the proven level, as a part of it."""
PROBE = 0.02
"""First step above the proven level, as a part of it; doubles with each two that stand."""


@dataclass(slots=True)
class Knob:
    """One limit that is searched for: where it stands, and the highest level that has proven itself."""

    value: float
    floor: float
    ceiling: float
    unit: float
    """Its smallest step."""
    back: float
    """A refused probe takes it back to so much of the proven level."""
    gentle: float
    """The first refusal at a level that was fine before cuts it to so much of itself."""
    proven: float = math.inf
    """Infinite before the first refusal."""
    probes: int = 0
    """Steps above the proven level that stood, one after the other."""
    falls: int = 0
    """Cuts since then, but for those of refused probes."""

    @property
    def probing(self) -> bool:
        return math.isinf(self.proven) or self.value >= self.proven

    def step(self, slow_start: float = SLOW_START, probe: float = PROBE) -> None:
        """One raise; before the first refusal by the factor `slow_start`, above what is proven by the part `probe`."""
        if math.isinf(self.proven):
            self._to(max(self.value + self.unit, self.value * slow_start))
        elif self.value < self.proven:
            self._to(min(self.proven, self.value + max(self.unit, RECOVER * self.proven)))
        else:
            self.proven, self.falls = self.value, 0
            self._to(self.value + max(self.unit, probe * self.value) * 2 ** (self.probes // 2))
            self.probes = min(self.probes + 1, 16)

    def cut(self, at_most: float = math.inf) -> None:
        """One refusal: back to what was proven, or below it where that is no longer true."""
        if self.value > self.proven or math.isinf(self.proven):
            self.proven = min(self.proven, self.value, at_most)
            self._to(self.back * self.proven)
        else:
            fallen = min((DECREASE if self.falls else self.gentle) * self.value, self.value - self.unit)
            self.falls += 1
            self.proven = min((self.value + fallen) / 2, at_most)
            self._to(min(fallen, self.proven))
        self.proven = min(max(self.proven, self.floor), self.ceiling)
        self.probes = 0

    def lower(self, at_most: float) -> None:
        """More of the same refusal: it says that the proven level is no higher than this."""
        self.proven = max(min(self.proven, at_most), self.floor)
        self._to(min(self.value, self.proven))

    def settle(self, value: float) -> None:
        """Goes there, and takes it for proven."""
        self._to(value)
        self.proven, self.probes = self.value, 0

    def _to(self, value: float) -> None:
        self.value = min(max(value, self.floor), self.ceiling)
