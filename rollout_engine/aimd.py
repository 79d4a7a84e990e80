"""Finds how many calls, at once and per second, a model's server takes: pure, told what was seen and the time.

Two knobs: `cap` (calls in flight) and `rate` (calls begun per second; None while it does not matter). A
knob that binds is raised step by step; a refusal (429) takes back the last raise, and where there was none, cuts both.
What a probe may cost is budgeted: above the proven level it goes only when refusals are few and pauses were short.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from rollout_engine.config import AdaptiveSpec
from rollout_engine.knob import LATE_START, PROBE, PROBE_BACK, SLOW_START, Knob
from rollout_engine.latency import Latency

STEP_S = 1.0
"""Shortest time between two raises, and half of it before the first refusal; at least three calls long."""
COOLDOWN_S = 1.0
"""Refusals for so long after a cut belong to its episode: calls that were on their way."""
PROBE_S = 5.0
"""Shortest time between a refused probe and the next one."""
REFUSED_SHARE = 0.01
"""Of the calls so many may be refused by probes: the next one waits until they are this few again."""
PAUSED_SHARE = 0.02
"""Of the time so much may be spent in pauses that probes caused."""
MAX_QUIET_S = 60.0
"""At least so often a knob that binds is probed, whatever that costs: a limit may have been raised."""
RATE_WINDOW_S = 2.0
"""The rate that a server was seen to take is measured over this time."""
MIN_RATE = 0.2
"""Calls per second that a model is never cut below."""
DEAD_RATE = 1.0
"""Calls per second to a server that refuses all of them."""
COARSE = 0.1
"""A step of the cap that is larger than this part of it is probed under a rate: that tells which of them is refused."""
FORGET_RATE_S = 30.0
"""A rate that has not bound for so long is dropped."""
SAFE_S = 30.0
"""For so long what a server took counts as proof that it is not too much."""
NEARLY = 0.8
"""A knob binds where calls wait for it and so much of it is in use."""


class Seen(NamedTuple):
    """What happened over the whole cluster since the last time."""

    answered: int = 0
    """Calls that got an answer; errors that are no 429 (5xx, cuts) count nowhere."""
    refused: int = 0
    """Calls that ended by a 429."""
    level: int = 0
    """Calls in flight when one was refused, that one included; 0 where none was."""
    in_flight: int = 0
    """Calls in flight now."""
    wants_permits: bool = False
    """Calls wait because `cap` calls are in flight."""
    wants_rate: bool = False
    """Calls wait for their turn at `rate`."""
    latency_s: float | None = None
    """Typical (geometric mean) seconds of the calls that were answered."""
    pause_s: float = 0.0
    """Longest pause that a refusal has asked for, as left now."""


@dataclass(slots=True)
class Controller:
    """One model's limits over the whole cluster. `now` is seconds on the caller's clock."""

    spec: AdaptiveSpec
    _cap: Knob = field(init=False)
    _rate: Knob | None = None
    _raised: Knob | None = None
    """The knob that the next refusal is put down to."""
    _quiet_until: float = -math.inf
    _step_at: float = -math.inf
    _probe_at: float = -math.inf
    _cut_at: float = -math.inf
    _probed: bool = False
    """Whether a probe has caused the last episode of refusals."""
    _debt: float = 0.0
    """Calls that must be answered before the next probe."""
    _answers: deque[tuple[float, int]] = field(default_factory=deque)
    _peaks: deque[tuple[float, float]] = field(default_factory=deque)
    """(until when it counts, calls per second that were taken), the highest first."""
    _usual: float = 0.0
    """Calls in flight of late."""
    _safe: deque[tuple[float, float]] = field(default_factory=deque)
    """(until when it counts, calls in flight that were taken), the highest first."""
    _rate_bound_at: float = -math.inf
    _latency: Latency = field(init=False)

    def __post_init__(self) -> None:
        spec = self.spec
        self._cap = Knob(min(max(spec.start, spec.floor), spec.ceiling), spec.floor, spec.ceiling, 1.0)
        self._rate = Knob(float(spec.start), MIN_RATE, math.inf, MIN_RATE)
        self._latency = Latency(spec.latency_factor)

    @property
    def cap(self) -> int:
        """Calls that may be in flight: between floor and ceiling."""
        return int(self._cap.value + 1e-9)

    @property
    def rate(self) -> float | None:
        """Calls that may begin per second; None: no limit is known."""
        return None if self._rate is None else self._rate.value

    def observe(self, seen: Seen, now: float) -> None:
        """Takes in what was seen since the last time, and moves the limits."""
        accepted = self._measure(seen, now)
        binds = seen.wants_permits and seen.in_flight >= NEARLY * self.cap
        rate_binds = self._rate is not None and seen.wants_rate and accepted >= NEARLY * self._rate.value
        if rate_binds or self._rate_bound_at == -math.inf:
            self._rate_bound_at = now
        elif self._rate is not None and now - self._rate_bound_at > FORGET_RATE_S and binds:
            self._rate = None
        if seen.refused:
            self._refused(seen, accepted, now)
        elif now >= self._quiet_until:
            verdict = self._latency.judge(self._cap.value, seen.in_flight, now)
            if verdict is not None:
                self._cap.settle(verdict)
                self._probe_at = now + PROBE_S
                self._pause_steps(now)
            elif now >= self._step_at and self._latency.allows_growth(now):
                self._grow(binds, rate_binds, accepted, now)

    def _measure(self, seen: Seen, now: float) -> float:
        """Notes what the server took; calls per second of late."""
        self._debt = max(0.0, self._debt - seen.answered)
        self._latency.add(seen.answered, seen.latency_s)
        weight = 1 - math.exp(-min(1.0, now - self._answers[-1][0]) / RATE_WINDOW_S) if self._answers else 1.0
        self._usual += weight * (seen.in_flight - self._usual)
        self._answers.append((now, seen.answered))
        while len(self._answers) > 2 and self._answers[1][0] <= now - RATE_WINDOW_S:
            self._answers.popleft()
        _best(self._safe, now, seen.in_flight if seen.answered and not seen.refused else 0)
        span = now - self._answers[0][0]
        accepted = sum(count for at, count in list(self._answers)[1:]) / span if span > 0 else 0.0
        _best(self._peaks, now, accepted if span >= RATE_WINDOW_S else 0)
        return accepted

    def _refused(self, seen: Seen, accepted: float, now: float) -> None:
        early = now < self._quiet_until
        if not early:
            self._probed = self._raised is not None and self._raised.value > self._raised.proven
        if self._probed:
            # Only what probes cost is held against further ones: a server that refuses what it took is another case.
            self._debt = min(self._debt + seen.refused / REFUSED_SHARE, max(accepted, 1.0) * MAX_QUIET_S)
            self._probe_at = max(self._probe_at, now + min(max(PROBE_S, seen.pause_s / PAUSED_SHARE), MAX_QUIET_S))
        if not early:
            self._quiet_until = now + COOLDOWN_S + seen.pause_s
            knob, self._raised, self._cut_at = self._raised, None, now
            self._cut(knob, max(seen.level, 1), accepted)

    def _cut(self, raised: Knob | None, level: int, accepted: float) -> None:
        """Takes back the last raise; where that cannot have been it, or there was none, cuts both knobs."""
        safe = self._safe[0][1] if self._safe else 0
        too_many = level >= NEARLY * safe
        # A cap that does not bind is worth nothing, and may hide that it is what was refused.
        idle = self._cap.value - max(level - 1, math.ceil(self._usual), self._cap.floor)
        if raised is self._cap and too_many:
            self._cut_cap(level)
        elif raised is not None and raised is self._rate:
            if idle >= 1:
                self._cap.settle(self._cap.value - idle)  # if it was not that, the rate is cut next time
            else:
                raised.cut()
        else:
            if too_many:
                self._cut_cap(level)
            self._cut_rate(accepted)

    def _cut_rate(self, accepted: float) -> None:
        if self._rate is None:
            # What a server takes while it refuses more is what it takes.
            measured = max(self._peaks[0][1] if self._peaks else accepted, MIN_RATE)
            self._rate = Knob(max(PROBE_BACK * measured, MIN_RATE), MIN_RATE, math.inf, MIN_RATE, measured)
            self._rate_bound_at = self._cut_at
            return
        self._rate.cut()
        if not accepted:
            self._rate.value = min(self._rate.value, DEAD_RATE)

    def _cut_cap(self, level: int) -> None:
        self._cap.cut(max(level - 1, self.spec.floor))
        self._safe.clear()

    def _grow(self, binds: bool, rate_binds: bool, accepted: float, now: float) -> None:
        """Raises one knob that binds: one below its proven level first, then the one that was not raised last."""
        knobs = [self._cap] if binds and self._cap.value < self._cap.ceiling else []
        if rate_binds and self._rate is not None:
            knobs.append(self._rate)
        may_probe = (self._debt <= 0 and now >= self._probe_at) or now >= self._cut_at + MAX_QUIET_S
        knobs = [knob for knob in knobs if may_probe or not knob.probing or math.isinf(knob.proven)]
        if not knobs:
            return
        knob = min(knobs, key=lambda knob: (knob.probing, knob is self._raised))
        fine = knob is not self._cap or not knob.probing or knob.unit <= COARSE * knob.value
        if not fine and self._rate is None and math.isfinite(knob.proven) and accepted > 0:
            self._rate = Knob(accepted * (1 + PROBE), MIN_RATE, math.inf, MIN_RATE, accepted)
            self._rate_bound_at = now
        knob.step(SLOW_START if self._cut_at == -math.inf else LATE_START)
        self._raised = knob
        self._pause_steps(now)

    def _pause_steps(self, now: float) -> None:
        self._latency.changed(now)
        starting = self._cut_at == -math.inf
        self._step_at = now + max(STEP_S / 2 if starting else STEP_S, 3 * self._latency.typical)


def _best(best: deque[tuple[float, float]], now: float, value: float) -> None:
    """Keeps the highest of the values that were added in the last SAFE_S in front."""
    while best and best[0][0] <= now:
        best.popleft()
    if value > 0:
        while best and best[-1][1] <= value:
            best.pop()
        best.append((now + SAFE_S, value))
