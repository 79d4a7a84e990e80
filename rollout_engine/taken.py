"""What a server was seen to take of late, without refusing any: pure, told the time."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

RATE_WINDOW_S = 2.0
"""The rate that a server takes is measured over this time, or over three calls where they are longer."""
SAFE_S = 30.0
"""For so long what a server took counts as proof that it is not too much; at least five calls long."""


@dataclass(slots=True)
class Taken:
    """Calls in flight and calls per second. `now` is seconds on the caller's clock, `call_s` what a call takes."""

    per_s: float = 0.0
    """Calls answered per second of late."""
    since_refused: int = 0
    """Calls answered since the last refusal."""
    _answers: deque[tuple[float, int]] = field(default_factory=deque)
    _rates: deque[tuple[float, float]] = field(default_factory=deque)
    """(until when it counts, calls per second), the highest first."""
    _levels: deque[tuple[float, float]] = field(default_factory=deque)
    """(until when it counts, calls in flight), the highest first."""

    def see(self, answered: int, in_flight: int, call_s: float, now: float) -> None:
        """What happened since the last time; `in_flight` is 0 where it proves nothing."""
        self.since_refused += answered
        window_s, safe_s = max(RATE_WINDOW_S, 3 * call_s), max(SAFE_S, 5 * call_s)
        self._answers.append((now, answered))
        while len(self._answers) > 2 and self._answers[1][0] <= now - window_s:
            self._answers.popleft()
        span = now - self._answers[0][0]
        self.per_s = sum(count for at, count in list(self._answers)[1:]) / span if span > 0 else 0.0
        _best(self._levels, now, safe_s, in_flight)
        _best(self._rates, now, safe_s, self.per_s if span >= window_s else 0)

    @property
    def most(self) -> float:
        """Calls in flight, the most that were taken."""
        return self._levels[0][1] if self._levels else 0.0

    @property
    def fastest(self) -> float:
        """Calls per second, the most that were taken."""
        return self._rates[0][1] if self._rates else self.per_s

    def doubt(self) -> None:
        """So many calls at once were refused: that fewer than these were taken is to be seen anew."""
        self._levels.clear()


def _best(best: deque[tuple[float, float]], now: float, for_s: float, value: float) -> None:
    """Keeps the highest of the values of late in front."""
    while best and best[0][0] <= now:
        best.popleft()
    if value > 0:
        while best and best[-1][1] <= value:
            best.pop()
        best.append((now + for_s, value))
