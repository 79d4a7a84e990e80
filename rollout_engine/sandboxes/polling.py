"""Waits for a background job, and lives through faults of the provider that pass."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

from rollout_engine.errors import ExecTimeout, SandboxDied, SandboxError
from rollout_engine.sandboxes.base import JobStatus, Sandbox
from rollout_engine.types import ExecResult

T = TypeVar("T")
log = logging.getLogger(__name__)

LOOK_S = 60.0
"""The longest single wait for a job's end, which is seen at once."""
MAX_FAULTS = 5
"""Looks in a row that may fail; the next one's fault is raised."""
FAULT_PAUSE_S = 0.1
"""After the first fault; twice that after the second, and so on."""


class Patience:
    """Bears with a provider that fails to answer a few times in a row; a sandbox that has died is told at once."""

    def __init__(self) -> None:
        self._faults = 0

    async def ask(self, question: Callable[[], Awaitable[T]]) -> T | None:
        """The answer, or after a pause None. Raises SandboxDied; SandboxError after MAX_FAULTS in a row."""
        try:
            answer = await question()
        except SandboxDied:
            raise
        except SandboxError as error:
            self._faults += 1
            if self._faults > MAX_FAULTS:
                raise
            log.info("a sandbox did not answer (%d of %d times in a row): %s", self._faults, MAX_FAULTS, error)
            await asyncio.sleep(self._faults * FAULT_PAUSE_S)
            return None
        self._faults = 0
        return answer


async def finished(sandbox: Sandbox, job: str, *, timeout_s: float | None = None) -> JobStatus:
    """How a job ended. Raises ExecTimeout with its output so far after stopping it, SandboxError."""
    clock, patience, status = asyncio.get_running_loop().time, Patience(), JobStatus(None)
    began = clock()
    while True:
        left_s = LOOK_S if timeout_s is None else max(timeout_s - (clock() - began), 0.0)
        status = await patience.ask(partial(sandbox.poll, job, wait_s=min(left_s, LOOK_S))) or status
        if status.exit_code is not None:
            return status
        ran_s = clock() - began
        if timeout_s is not None and ran_s >= timeout_s:
            await sandbox.stop(job)
            partly = ExecResult(-9, status.stdout, status.stderr, duration_s=ran_s)
            raise ExecTimeout(f"{job} did not end within {timeout_s:g} s", partly)
