"""What tests of sandboxes need on a busy machine: limits that grow until there is something to see, and pauses of the
event loop without those in which the machine had no core for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from rollout_engine.errors import ExecTimeout
from rollout_engine.sandboxes.base import Sandbox
from rollout_engine.types import ExecResult

GROWING_S = (0.5, 2.0, 8.0, 30.0)
"""Limits of something that is to be cut off after it has begun: the first may come before."""


async def cut_off(sandbox: Sandbox, argv: Sequence[str], begun: Callable[[ExecResult], bool]) -> ExecResult:
    """What a command without an end had done when its time ended, with time enough to have begun."""
    for timeout_s in GROWING_S:
        with pytest.raises(ExecTimeout) as caught:
            await sandbox.exec(argv, timeout_s=timeout_s)
        if begun(caught.value.partial):
            break
    return caught.value.partial


class Heartbeat:
    """How long the event loop was held up at most by what this process did."""

    async def __aenter__(self) -> Heartbeat:
        self.longest = 0.0
        self._task = asyncio.create_task(self._beat())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()

    async def _beat(self) -> None:
        while True:
            began = time.monotonic() - _without_core_s()
            await asyncio.sleep(0.01)
            self.longest = max(self.longest, time.monotonic() - _without_core_s() - began)


def _without_core_s() -> float:
    """For how long this thread was ready to run, and did not; 0 where the kernel does not count it."""
    with contextlib.suppress(OSError):
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    return 0.0
