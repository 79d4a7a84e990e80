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

BACKOFF_BASE_S = 0.5
"""Pause after the first failed try, before jitter; doubles with each further one."""
BACKOFF_MAX_S = 30.0
RETRY_AFTER_MAX_S = 300.0
"""A server that asks for more is not waited for in here: the rollout gives its slot back and starts again later."""
RETRIED = (ModelRateLimited, ModelServerError, ModelConnectionError)

T = TypeVar("T")


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
    try_once: Callable[[float], Awaitable[T | Failed]], *, retries: int, deadline: float, call_timeout_s: float
) -> T:
    """What `try_once(until)` returns, tried again where that may help and time is left; raises the last error.

    `deadline` and `until` are on the event loop's clock.
    """
    clock = asyncio.get_running_loop().time
    tries = 0
    while True:
        now = clock()
        if now >= deadline:
            raise ModelTimeout("the deadline had passed before the model was called")
        outcome = await try_once(min(deadline, now + call_timeout_s))
        if not isinstance(outcome, Failed):
            return outcome
        tries += 1
        pause = pause_s(outcome, tries, retries, deadline - clock(), random.random())
        if pause is None:
            raise outcome.error
        await asyncio.sleep(pause)
