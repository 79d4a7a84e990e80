"""When a model call is tried again: one owner, the same decision for every client."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable
from datetime import UTC
from email.utils import parsedate_to_datetime
from typing import NamedTuple, TypeVar

from rollout_engine.errors import (
    LimitReached,
    ModelConnectionError,
    ModelError,
    ModelRateLimited,
    ModelServerError,
    ModelTimeout,
)
from rollout_engine.types import CallGate

BACKOFF_BASE_S = 0.5
"""Pause after the first failed try, before jitter; doubles with each further one."""
BACKOFF_MAX_S = 30.0
RETRY_AFTER_MAX_S = 300.0
"""A server that asks for more is not waited for in here: the rollout gives its slot back and starts again later."""
RETRY_AFTER_MIN_S = 0.05
"""A 429 that asks for less says no more than "later": its call backs off, and the model is not paused."""
MAX_REFUSALS = 20
"""429s of one call, where its host paces the calls: each is a wait at the gate, not a failed try."""
RETRIED = (ModelRateLimited, ModelServerError, ModelConnectionError)

T = TypeVar("T")


class TryCounts:
    """What a client's tries came to, since it was made."""

    __slots__ = ("rate_limited", "retries")

    def __init__(self) -> None:
        self.rate_limited = 0
        self.retries = 0


class Failed(NamedTuple):
    """A try that failed. A value, not a raise, so that no error carries the request (and its key) as its context."""

    error: ModelError | LimitReached
    retry_after_s: float | None = None
    """What the server asked for."""


def retry_after_s(value: str | None, now: float) -> float | None:
    """The seconds that a Retry-After header asks for (a number or an HTTP date); None where it says nothing usable.

    `now` is the wall clock.
    """
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            moment = parsedate_to_datetime(value)
            seconds = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() - now
        except (ValueError, OverflowError):
            return None
    return max(0.0, seconds) if math.isfinite(seconds) else None


def pause_s(failed: Failed, tries: int, retries: int, left_s: float, jitter: float) -> float | None:
    """How long to wait before the next try, or None to give up. `tries` failed so far, `jitter` is in [0, 1)."""
    if tries > retries or not isinstance(failed.error, RETRIED):
        return None
    backoff = min(BACKOFF_MAX_S, BACKOFF_BASE_S * 2.0 ** min(tries - 1, 32)) * (0.5 + jitter / 2)
    asked = failed.retry_after_s
    if asked is not None and asked > RETRY_AFTER_MAX_S:
        return None
    # Spread over up to half as long again: those who were told the same second must not come back in it together.
    pause = backoff if asked is None else asked + min(asked, BACKOFF_BASE_S) * jitter / 2
    return pause if pause < left_s else None


async def call_with_retries(
    try_once: Callable[[float], Awaitable[T | Failed]],
    *,
    retries: int,
    deadline: float,
    call_timeout_s: float,
    counts: TryCounts | None = None,
    gate: CallGate | None = None,
) -> T:
    """What `try_once(until)` returns, tried again where that may help and time is left; raises the last error.

    `deadline` and `until` are on the event loop's clock; with a gate, waits there put the deadline off.
    """
    clock = asyncio.get_running_loop().time
    counts = counts or TryCounts()
    tries = refusals = 0
    while True:
        now = clock()
        if now >= deadline:
            raise ModelTimeout("the deadline had passed before the model was called")
        outcome = await try_once(min(deadline, now + call_timeout_s))
        if gate is not None:
            if isinstance(outcome, Failed) and (outcome.retry_after_s or 0.0) < RETRY_AFTER_MIN_S:
                outcome = outcome._replace(retry_after_s=None)
            _tell(gate, outcome)
        if not isinstance(outcome, Failed):
            return outcome
        left_s = deadline - clock() if gate is None else math.inf
        refused = isinstance(outcome.error, ModelRateLimited)
        counts.rate_limited += refused
        if gate is not None and refused:
            refusals += 1
            pause = pause_s(outcome, refusals, MAX_REFUSALS if retries else 0, left_s, random.random())
        else:
            tries += 1
            pause = pause_s(outcome, tries, retries, left_s, random.random())
        if pause is None:
            raise outcome.error
        counts.retries += 1
        deadline += await _wait(gate, outcome, pause)


def _tell(gate: CallGate, outcome: object) -> None:
    if isinstance(outcome, Failed) and isinstance(outcome.error, ModelRateLimited):
        asked = outcome.retry_after_s
        gate.refused(None if asked is None or asked > RETRY_AFTER_MAX_S else asked)
    elif isinstance(outcome, Failed):
        gate.failed()
    else:
        gate.answered()


async def _wait(gate: CallGate | None, failed: Failed, pause: float) -> float:
    """Waits between two tries; the seconds by which that puts the deadline off."""
    if gate is None:
        await asyncio.sleep(pause)
        return 0.0
    clock = asyncio.get_running_loop().time
    began = clock()
    # The pause that a 429 asks for is kept by all calls at the gate: on top of it this one need not wait.
    rate_limited = isinstance(failed.error, ModelRateLimited) and failed.retry_after_s is not None
    await gate.pause(0.0 if rate_limited else pause)
    return clock() - began
