"""Finds how many calls, at once and per second, a model's server takes: pure, told what was seen and the time.

Two knobs: `cap` (calls in flight) and `rate` (calls begun per second; None while it does not matter). A
knob that binds is raised step by step; a refusal (429) takes back the last raise, and where there was none, cuts both.
What a probe may cost is budgeted: above the proven level it goes only when refusals are few and pauses were short.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from rollout_engine.config import AdaptiveSpec
from rollout_engine.knob import LATE_START, PROBE, SLOW_START, Knob
from rollout_engine.latency import Latency
from rollout_engine.taken import Taken

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
"""At least so often a knob that binds is probed, whatever the pauses cost: a limit may have been raised."""
MAX_QUIET_PAUSES = 20.0
"""That time is longer after a longer pause: so many times its length."""
LONE = 100
"""A refusal after so many answers is a lone one: it costs a level that was fine before little."""
RATE_BACK, RATE_GENTLE = 0.95, 0.9
"""What a server saved up let a rate above its limit stand for a while, and is used up now."""
CAP_GENTLE = 0.98
MIN_RATE = 0.2
"""Calls per second that a model is never cut below."""
EPISODE = 0.5
"""One episode of refusals leaves at least so much of a cap: how many were in flight is known roughly."""
DEAD_RATE = 1.0
"""Calls per second to a server that refuses all of them."""
COARSE = 0.1
"""A step of the cap that is larger than this part of it is probed under a rate: that tells which of them is refused."""
DOUBT = 4
"""Every so many refused probes it is asked again which of the knobs is refused."""
FORGET_RATE_S = 30.0
"""A rate that has not bound for so long is dropped."""
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
    _trial: bool = True
    """The rate is there to tell which of the knobs is refused, and was not itself refused so far."""
    _cap_refused: bool = False
    """What was refused last was the number of calls at once."""
    _sure: bool = False
    """And so many of them as the time before: no rate is needed to tell."""
    _raised: Knob | None = None
    """The knob that the next refusal is put down to."""
    _quiet_until: float = -math.inf
    _step_at: float = -math.inf
    _probe_at: float = -math.inf
    _cut_at: float = -math.inf
    _probed: bool = False
    """Whether a probe has caused the last episode of refusals."""
    _charged: bool = False
    """Whether further probes have to wait for what that episode cost."""
    _least: float = 0.0
    """Calls at once that an episode of refusals cuts no deeper than."""
    _failed: int = 0
    """Probes that were refused, one after the other."""
    _debt: float = 0.0
    """Calls that must be answered before the next probe."""
    _taken: Taken = field(default_factory=Taken)
    _rate_bound_at: float = -math.inf
    _latency: Latency = field(init=False)

    def __post_init__(self) -> None:
        spec = self.spec
        start = min(max(spec.start, spec.floor), spec.ceiling)
        self._cap = Knob(start, spec.floor, spec.ceiling, unit=1.0, back=1.0, gentle=CAP_GENTLE)
        self._rate = _rate_knob(float(spec.start))
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
        self._debt = max(0.0, self._debt - seen.answered)
        self._latency.add(seen.answered, seen.latency_s)
        call_s = self._latency.recent
        # Of those that are in flight after a refusal some began before it.
        in_flight = seen.in_flight if seen.answered and now >= max(self._quiet_until, self._cut_at + 2 * call_s) else 0
        self._taken.see(seen.answered, 0 if seen.refused else in_flight, call_s, now)
        binds = seen.wants_permits and seen.in_flight >= NEARLY * self.cap
        rate_binds = self._rate is not None and seen.wants_rate and self._taken.per_s >= NEARLY * self._rate.value
        if rate_binds or self._rate_bound_at == -math.inf:
            self._rate_bound_at = now
        elif self._rate is not None and now - self._rate_bound_at > FORGET_RATE_S and binds:
            self._rate = None
        if seen.refused:
            self._refused(seen, now)
        elif now >= self._quiet_until:
            self._move(seen, binds, rate_binds, now)

    def _move(self, seen: Seen, binds: bool, rate_binds: bool, now: float) -> None:
        verdict = self._latency.judge(self._cap.value, seen.in_flight, now)
        if verdict is not None:
            self._cap.settle(verdict)
            self._probe_at = now + PROBE_S
            self._pause_steps(now)
        elif now >= self._step_at and self._latency.allows_growth(now):
            self._grow(binds, rate_binds, now)

    def _refused(self, seen: Seen, now: float) -> None:
        early, lone = now < self._quiet_until, self._taken.since_refused >= LONE
        self._taken.since_refused = 0
        if not early:
            self._probed = self._raised is not None and self._raised.value > self._raised.proven
            self._charged = self._probed or lone
        if self._charged:
            self._charge(seen, not early, now)
        level = max(seen.level, 1)
        if not early:
            self._quiet_until = now + COOLDOWN_S + seen.pause_s
            knob, self._raised, self._cut_at = self._raised, None, now
            self._cut(knob, level, lone)
        elif self._cap_refused and level - 1 < self._cap.value:
            self._cap.lower(max(level - 1, self._taken.most, self._least))
            if not self._probed:
                # The server takes less than it did: what is known of it is coarse, and soon to be made finer.
                self._failed, self._probe_at = 0, now + seen.pause_s + PROBE_S

    def _charge(self, seen: Seen, anew: bool, now: float) -> None:
        """What the probes to come have to wait for. A server that refuses many of what it took is another case."""
        most = max(LONE, self._taken.per_s * MAX_QUIET_S)
        self._debt = min(self._debt + seen.refused / REFUSED_SHARE, most)
        longest_s = max(MAX_QUIET_S, seen.pause_s * MAX_QUIET_PAUSES)
        usual_s = min(PROBE_S * 2 ** min(self._failed, 16), seen.pause_s / PAUSED_SHARE, longest_s)
        self._probe_at = max(self._probe_at, now + max(PROBE_S, usual_s))
        self._failed += anew

    def _cut(self, raised: Knob | None, level: int, lone: bool) -> None:
        """Takes back the last raise; where that cannot have been it, or there was none, cuts both knobs."""
        most = self._taken.most
        too_many, first = level >= NEARLY * most, math.isinf(self._cap.proven)
        # A cap that does not bind is worth nothing, and may hide that it is what was refused.
        used, before = max(level - 1, math.ceil(most), self._cap.floor), self._cap.proven
        if self._cap.value > before and level > before:
            used = before  # so many at once have not stood before
        if raised is not None and raised is self._rate and self._cap.value < used + 1:
            self._cut_rate(lone)
        elif raised is not None and raised is self._rate:
            self._cap.settle(used)  # if it was not that, the rate is cut next time
            self._blame_cap(before)
        elif too_many and (raised is self._cap or (self._trial and (lone or first))):
            self._cut_cap(level, lone)
            self._blame_cap(before)
        else:
            if too_many:
                self._cut_cap(level, lone)
            self._cut_rate(lone)

    def _blame_cap(self, before: float) -> None:
        """`before`: what was proven."""
        self._sure = abs(self._cap.proven - before) <= max(self._cap.unit, PROBE * before)
        self._cap_refused = True
        if self._trial:
            self._rate = None

    def _cut_rate(self, lone: bool) -> None:
        self._cap_refused = self._sure = self._trial = False
        if self._rate is None:
            # What a server takes while it refuses more is what it takes.
            measured = max(self._taken.fastest, MIN_RATE)
            self._rate = _rate_knob(RATE_BACK * measured, measured)
            self._rate_bound_at = self._cut_at
            return
        if lone:
            self._rate.falls = 0
        self._rate.cut()
        if not self._taken.per_s:
            self._rate.value = min(self._rate.value, DEAD_RATE)

    def _cut_cap(self, level: int, lone: bool) -> None:
        if lone:
            self._cap.falls = 0
        self._least = EPISODE * self._cap.value
        self._cap.cut(max(level - 1, self._taken.most, self._least))
        self._taken.doubt()

    def _grow(self, binds: bool, rate_binds: bool, now: float) -> None:
        """Raises one knob that binds: one below its proven level first, then the one that was not refused last."""
        knobs = [self._cap] if binds and self._cap.value < self._cap.ceiling else []
        if rate_binds and self._rate is not None:
            knobs.append(self._rate)
        may_probe = self._debt <= 0 and now >= self._probe_at
        knobs = [knob for knob in knobs if may_probe or not knob.probing or math.isinf(knob.proven)]
        if not knobs:
            return
        starting = self._cut_at == -math.inf
        last = self._raised if starting else self._cap if self._cap_refused else self._rate
        knob = min(knobs, key=lambda knob: (knob.probing, knob is last))
        if knob is self._cap and not self._pace_probe(now):
            return
        if knob.value > knob.proven:
            self._failed = 0  # the last probe stood
        clear = knob is self._rate and self._cap_refused  # it only hinders: well out of the way, or refused
        knob.step(SLOW_START if starting else LATE_START, 1 / NEARLY - 1 if clear else PROBE)
        self._raised = knob
        self._pause_steps(now)

    def _pace_probe(self, now: float) -> bool:
        """One call more at once is many more per second where they are few: a rate tells which of them is refused.

        False: how many there are is not known yet.
        """
        cap, per_s = self._cap, self._taken.per_s
        known = self._sure and self._failed % DOUBT
        fine = known or not cap.probing or math.isinf(cap.proven) or cap.unit <= COARSE * cap.value
        if not fine and self._rate is None:
            if not per_s:
                return False
            self._rate, self._trial = _rate_knob(per_s * (1 + PROBE), per_s), True
            self._rate_bound_at = now
        return True

    def _pause_steps(self, now: float) -> None:
        self._latency.changed(now)
        starting = self._cut_at == -math.inf
        self._step_at = now + max(STEP_S / 2 if starting else STEP_S, 3 * self._latency.typical)


def _rate_knob(value: float, proven: float = math.inf) -> Knob:
    return Knob(max(value, MIN_RATE), MIN_RATE, math.inf, MIN_RATE, RATE_BACK, RATE_GENTLE, proven)
