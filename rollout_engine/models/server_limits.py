"""What a model server takes before it answers 429: pure, told the time and the calls in flight."""

from __future__ import annotations

from collections import deque
from typing import Literal

from pydantic import Field

from rollout_engine.bucket import Bucket
from rollout_engine.specs import Spec

BUSY_RETRY_AFTER_S = 1.0
"""What a server with too many calls at once asks for: it cannot know when one will end."""


class ServerLimits(Spec):
    """Limits of a server, of which its clients are not told."""

    concurrency: int | None = Field(default=None, gt=0)
    """Calls at once."""
    per_second: float | None = Field(default=None, gt=0)
    """Calls per second, as a bucket of `burst`."""
    burst: float = Field(default=1.0, gt=0)
    per_window: int | None = Field(default=None, gt=0)
    """Calls in any `window_s` seconds."""
    window_s: float = Field(default=60.0, gt=0)
    slots: int | None = Field(default=None, gt=0)
    """Calls answered at full speed; more of them share it, and each takes longer."""
    retry_after: Literal["seconds", "date", "none"] = "seconds"
    """The form of the Retry-After header of a 429. A date has whole seconds."""


class Admission:
    """Decides call by call. Times are seconds on the caller's clock."""

    def __init__(self, limits: ServerLimits) -> None:
        self.limits = limits
        self._bucket = None if limits.per_second is None else Bucket(limits.per_second, limits.burst)
        self._window: deque[float] = deque()

    def admit(self, now: float, in_flight: int) -> float | None:
        """None lets a call in; else the seconds after which one may be."""
        limits = self.limits
        if limits.concurrency is not None and in_flight >= limits.concurrency:
            return BUSY_RETRY_AFTER_S
        while self._window and self._window[0] <= now - limits.window_s:
            self._window.popleft()
        if limits.per_window is not None and len(self._window) >= limits.per_window:
            return self._window[0] + limits.window_s - now
        if self._bucket is not None:
            if (wait := self._bucket.wait_s(1.0, now)) > 0:
                return wait
            self._bucket.take(1.0, now)
        if limits.per_window is not None:
            self._window.append(now)
        return None

    def slowness(self, in_flight: int) -> float:
        """By how much a call takes longer with so many in flight."""
        return 1.0 if self.limits.slots is None else max(1.0, in_flight / self.limits.slots)
