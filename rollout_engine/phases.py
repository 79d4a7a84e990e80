"""What ends a phase of a rollout before its time: its limit, or an error, which is its own or the rollout's."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from rollout_engine.types import Boundary

BOUNDARY_OF_PHASE = {
    "start": Boundary.SANDBOX,
    "setup": Boundary.SETUP,
    "agent": Boundary.AGENT,
    "verify": Boundary.VERIFIER,
}
"""Where an error belongs that does not say so itself."""


def asked_to_end(error: BaseException) -> bool:
    """Whether this is a cancellation of the rollout itself; user code may raise a CancelledError of its own."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


@contextlib.asynccontextmanager
async def phase_limit(seconds: float, late: Exception) -> AsyncIterator[None]:
    """Bounds a phase; raises `late` when it, and not somebody else's limit, is what expired."""
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            yield
    except TimeoutError:
        if limit.expired():
            raise late from None
        raise
