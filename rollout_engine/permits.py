"""A host's share of one model's budgets: calls wait here for a permit, for their turn, and for the end of a pause."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

from rollout_engine.bucket import Bucket
from rollout_engine.exchange import Demand, Lease, Traffic

UNLIMITED = Lease()
BURST_S = 0.02
"""A host lets through at once one call and what its rate allows in this time: timers are late by less than that."""
TOKENS_BURST_S = 5.0
"""The same for tokens, whose calls are uneven. A call that needs more than that waits until this much is there."""


TICK_S = 0.0005
"""The shortest wait."""
RAMP_S = 0.5
"""After a pause calls begin spread over this time, or over the pause's own length where that is shorter: those that
waited would all be refused together again."""


class _Short(Enum):
    """What the first waiting call lacks."""

    PERMIT = "permit"
    CALLS = "calls"
    TOKENS = "tokens"
    PAUSE = "pause"


class _Waiter(NamedTuple):
    entered: asyncio.Future[None]
    tokens: float


class Permits:
    """Lets calls begin in order of arrival, within the lease. A lower one takes effect as calls end.

    A call that the server refuses (429) leaves its permit resting until the driver has heard of it: handed on at
    once, it would be refused again and again.
    """

    def __init__(self, on_refused: Callable[[], None] = lambda: None) -> None:
        """`on_refused` is called at a refusal of which the driver should hear at once."""
        self._on_refused = on_refused
        self.in_use = 0
        """Calls in flight."""
        self.lease = Lease(0)
        self.waits = 0
        """Calls that had to wait, since the host started."""
        self._calls: Bucket | None = None
        self._tokens: Bucket | None = None
        self._paused_until = -math.inf
        self._told_until = -math.inf
        """End of the longest pause that the server has asked this host for."""
        self._waiters: deque[_Waiter] = deque()
        self._lacked: set[_Short] = set()
        self._ramp: Bucket | None = None
        """Spaces the calls after a pause."""
        self._ramp_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._answered = self._refused = self._level = 0
        self._log_latency = self._used = 0.0

    # -- the driver's side --------------------------------------------------------------------------------------

    def renew(self, lease: Lease) -> None:
        """A new lease from the driver."""
        now = _now()
        self.lease = lease
        self._calls = _paced(self._calls, lease.calls_s, 1.0 + lease.calls_s * BURST_S, now)
        self._tokens = _paced(self._tokens, lease.tokens_s, max(1.0, lease.tokens_s * TOKENS_BURST_S), now)
        self._pause(lease.pause_s, now)
        self._wake()

    @property
    def waiting(self) -> int:
        """Calls that wait."""
        return len(self._waiters)

    def demand(self) -> Demand:
        """What the next reply says; asking it begins a new span of what calls have waited for."""
        now = _now()
        lacked, self._lacked = self._lacked, set()
        if self._waiters and (short := self._short(self._waiters[0].tokens, now)) is not None:
            lacked.add(short[0])
        return Demand(
            max(self.lease.permits, self.in_use),
            len(self._waiters),
            self.lease.calls_s,
            self.lease.tokens_s,
            self.in_use,
            max(0.0, self._told_until - now),
            _Short.PERMIT in lacked,
            _Short.CALLS in lacked,
            _Short.TOKENS in lacked,
            Traffic(self._answered, self._refused, self._log_latency, self._used, self._level),
        )

    # -- the calls' side ----------------------------------------------------------------------------------------

    @property
    def counts_tokens(self) -> bool:
        """Whether a call's tokens matter."""
        return self._tokens is not None

    def enter(self, tokens: float = 0.0) -> bool:
        """Takes a permit if one call that needs so many tokens may begin at once."""
        if self._waiters or self._short(tokens, _now()) is not None:
            return False
        self._take(tokens)
        return True

    async def acquire(self, tokens: float = 0.0, *, first: bool = False) -> None:
        """Returns once one call may begin; `first` goes in front of the others. A cancelled waiter takes nothing."""
        if self.enter(tokens):
            return
        waiter = _Waiter(asyncio.get_running_loop().create_future(), tokens)
        self._waiters.appendleft(waiter) if first else self._waiters.append(waiter)
        self.waits += 1
        self._wake()
        try:
            await waiter.entered
        except asyncio.CancelledError:
            if waiter.entered.done() and not waiter.entered.cancelled():
                self._undo(tokens)
            else:
                with contextlib.suppress(ValueError):  # a wake-up meanwhile has passed over it
                    self._waiters.remove(waiter)
            raise

    def release(self) -> None:
        """One call has ended."""
        self.in_use -= 1
        self._wake()

    def answered(self, seconds: float) -> None:
        """The call that is about to be released got an answer."""
        self._answered += 1
        self._log_latency += math.log(max(seconds, 1e-6))

    def refused(self, pause_s: float | None, tokens: float = 0.0) -> None:
        """The call that is about to be released got a 429, and the pause that it asked for."""
        now = _now()
        # Those whose permit rests already were refused above the same level.
        self._level = self.in_use
        self._refused += 1
        if self._tokens is not None:
            self._tokens.give_back(tokens, now)
        if pause_s:
            self._told_until = max(self._told_until, now + pause_s)
            self._pause(pause_s, now)
        if self._refused == self.lease.refusals_seen + 1:
            self._on_refused()

    def settle(self, estimated: float, used: float) -> None:
        """The tokens that an answer took, against what was taken for them before."""
        self._used += used
        if self._tokens is None:
            return
        if used > estimated:
            self._tokens.take(used - estimated, _now())
        else:
            self._tokens.give_back(estimated - used, _now())
            self._wake()

    # -- inside -------------------------------------------------------------------------------------------------

    @property
    def resting(self) -> int:
        """Permits of refused calls of which the driver has not heard yet."""
        return max(0, self._refused - self.lease.refusals_seen)

    def _pause(self, seconds: float, now: float) -> None:
        if seconds <= 0 or now + seconds <= self._paused_until:
            return
        self._paused_until = now + seconds
        at_once = self.lease.permits if self.lease.permits >= 0 else len(self._waiters)
        self._ramp_s = min(RAMP_S, seconds)
        self._ramp = Bucket(max(at_once, 1) / self._ramp_s, 1.0, updated=self._paused_until)

    def _short(self, tokens: float, now: float) -> tuple[_Short, float] | None:
        """What a call lacks, and for how long at least; None: it may begin."""
        if now < self._paused_until:
            return _Short.PAUSE, self._paused_until - now
        if self._ramp is not None:
            if now >= self._paused_until + self._ramp_s:
                self._ramp = None
            elif (wait := self._ramp.wait_s(1.0, now)) > 0:
                return _Short.PAUSE, wait
        permits = self.lease.permits
        if 0 <= permits <= self.in_use + (min(self.resting, permits) if permits else 0):
            return _Short.PERMIT, math.inf
        if self._calls is not None and (wait := self._calls.wait_s(1.0, now)) > 0:
            return _Short.CALLS, wait
        if self._tokens is not None and (wait := self._tokens.wait_s(tokens, now)) > 0:
            return _Short.TOKENS, wait
        return None

    def _take(self, tokens: float) -> None:
        self.in_use += 1
        if self._ramp is not None:
            self._ramp.take(1.0, _now())
        if self._calls is not None:
            self._calls.take(1.0, _now())
        if self._tokens is not None:
            self._tokens.take(tokens, _now())

    def _undo(self, tokens: float) -> None:
        """A call was let in and never began."""
        if self._calls is not None:
            self._calls.give_back(1.0, _now())
        if self._tokens is not None:
            self._tokens.give_back(tokens, _now())
        self.release()

    def _wake(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._waiters:
            waiter = self._waiters[0]
            if waiter.entered.done():
                self._waiters.popleft()
                continue
            short = self._short(waiter.tokens, _now())
            if short is not None:
                self._lacked.add(short[0])
                if short[1] < math.inf:
                    # Not sooner than clocks tick: rounding may leave a wait that no time passes in.
                    self._timer = asyncio.get_running_loop().call_later(max(short[1], TICK_S), self._wake)
                return
            self._waiters.popleft()
            self._take(waiter.tokens)
            waiter.entered.set_result(None)


def _now() -> float:
    return asyncio.get_running_loop().time()


def _paced(bucket: Bucket | None, rate: float, burst: float, now: float) -> Bucket | None:
    """The bucket for a rate, with what it owes from before; None: no limit."""
    if rate < 0:
        return None
    if bucket is None:
        return Bucket(rate, burst, level=min(1.0, burst), updated=now)
    bucket.change(now, rate=rate, burst=burst)
    return bucket
