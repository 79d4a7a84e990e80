"""Waits for a background job: looks at it at pauses that grow, and lives through faults of the provider that pass."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from rollout_engine.errors import ExecTimeout, SandboxDied, SandboxError
from rollout_engine.sandboxes.base import JobStatus, Sandbox
from rollout_engine.types import ExecResult

T = TypeVar("T")
log = logging.getLogger(__name__)

MIN_PAUSE_S, MAX_PAUSE_S, PAUSE_SHARE = 0.01, 0.5, 0.05
"""Between two looks at a job: a share of the time that it has run."""
MAX_FAULTS = 5
"""Looks in a row that may fail; the next one's fault is raised."""


def pause_s(ran_s: float) -> float:
    """How long to wait before the next look at a job that has run so long."""
    return min(max(ran_s * PAUSE_SHARE, MIN_PAUSE_S), MAX_PAUSE_S)


class Patience:
    """Bears with a provider that fails to answer a few times in a row; a sandbox that has died is told at once."""

    def __init__(self) -> None:
        self._faults = 0

    async def ask(self, question: Callable[[], Awaitable[T]]) -> T | None:
        """The answer, or None where there was none this time. Raises SandboxDied; SandboxError after MAX_FAULTS."""
        try:
            answer = await question()
        except SandboxDied:
            raise
        except SandboxError as error:
            self._faults += 1
            if self._faults > MAX_FAULTS:
                raise
            log.info("a sandbox did not answer (%d of %d times in a row): %s", self._faults, MAX_FAULTS, error)
            return None
        self._faults = 0
        return answer


async def finished(sandbox: Sandbox, job: str, *, timeout_s: float | None = None) -> JobStatus:
    """How a job ended. Raises ExecTimeout with its output so far after stopping it, SandboxError."""
    clock, patience, status = asyncio.get_running_loop().time, Patience(), JobStatus(None)
    began = clock()
    while True:
        status = await patience.ask(lambda: sandbox.poll(job)) or status
        if status.exit_code is not None:
            return status
        ran_s = clock() - began
        if timeout_s is not None and ran_s >= timeout_s:
            await sandbox.stop(job)
            partial = ExecResult(-9, status.stdout, status.stderr, duration_s=ran_s)
            raise ExecTimeout(f"{job} did not end within {timeout_s:g} s", partial)
        left_s = pause_s(ran_s) if timeout_s is None else min(pause_s(ran_s), timeout_s - ran_s)
        await asyncio.sleep(left_s)
