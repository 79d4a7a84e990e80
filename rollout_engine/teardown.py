"""Removes what a rollout has made, in bounded time; what hangs or fails is tried again until it is gone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import Any, NamedTuple

from rollout_engine.errors import SandboxError, describe

log = logging.getLogger(__name__)

MIN_CLOSE_S = 0.5
"""A rollout that is past its deadline still has this long to remove what it made."""
TRIES = 8
"""How often a removal is tried again before it is left to the end of its provider."""
FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 60.0
"""Between two tries: the pause doubles."""
AT_ONCE = 8
"""Removals that are tried again at the same time."""
MAX_LEFT = 1000
"""What a host keeps trying to remove; more is left to the end of its provider."""


class Owned(NamedTuple):
    """Something that must be removed, and how; removing it twice does no harm."""

    what: str
    remove: Callable[[], Awaitable[None]]


class Kept:
    """What is being made for a rollout, a layer by its name: `end` may be owned before it is there.

    The making goes on when whoever waits for it is cancelled, so that `end` always knows what there is to release.
    """

    def __init__(self, making: Awaitable[str], release: Callable[[str], Awaitable[None]]) -> None:
        self._making, self._release = asyncio.ensure_future(_without_exit(making)), release

    async def name(self) -> str:
        return await asyncio.shield(self._making)

    async def end(self) -> None:
        await asyncio.wait([self._making])
        if not self._making.cancelled() and self._making.exception() is None:
            await self._release(self._making.result())


async def _without_exit(making: Awaitable[str]) -> str:
    """A SystemExit that left a task would end the event loop, and with it everything else."""
    try:
        return await making
    except (SystemExit, KeyboardInterrupt) as error:
        raise SandboxError(f"{type(error).__name__}: {error}") from error


class Leftovers:
    """A host's reaper: tries again to remove what did not go in time. `close` ends it; providers remove the rest."""

    def __init__(self, try_s: float) -> None:
        """`try_s`: the longest that one try takes."""
        self._try_s = try_s
        self._slots = asyncio.Semaphore(AT_ONCE)
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def take(self, owned: Owned) -> None:
        """Removes it in the background."""
        if len(self._tasks) >= MAX_LEFT:
            log.error("%s could not be removed, as %d others; left to its provider's end", owned.what, MAX_LEFT)
            return
        task = asyncio.create_task(self._remove(owned), name=f"remove {owned.what}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _remove(self, owned: Owned) -> None:
        pause, why = FIRST_PAUSE_S, ""
        for _ in range(TRIES):
            try:
                async with self._slots, asyncio.timeout(self._try_s):
                    await owned.remove()
                log.warning("%s was removed late", owned.what)
                return
            except TimeoutError:
                why = f"not done within {self._try_s:g} s"
            except Exception as error:
                why = describe(error)
            await asyncio.sleep(pause)
            pause = min(pause * 2, MAX_PAUSE_S)
        log.error("%s could not be removed %d times (%s); left to its provider's end", owned.what, TRIES, why)

    async def close(self) -> None:
        """Ends the tries."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self._try_s)


async def remove_all(owned: Iterable[Owned], seconds: float, leftovers: Leftovers) -> None:
    """Removes all at the same time, also while being cancelled; what is not gone after `seconds` is left over."""
    removals = [(each, asyncio.ensure_future(each.remove())) for each in owned]
    cancelled = await _settled([task for _, task in removals], seconds)
    for each, task in removals:
        if not _succeeded(task):
            leftovers.take(each)
    if cancelled:
        raise asyncio.CancelledError


async def finish(work: Awaitable[object], seconds: float) -> bool:
    """Lets a teardown end under cancellation, for at most `seconds`; says whether it did without an error."""
    task = asyncio.ensure_future(work)
    cancelled = await _settled([task], seconds)
    done = _succeeded(task)
    if cancelled:
        raise asyncio.CancelledError
    return done


async def _settled(tasks: Collection[asyncio.Future[Any]], seconds: float) -> bool:
    """Waits until all are done, or for `seconds`; says whether the waiting task was cancelled meanwhile."""
    clock = asyncio.get_running_loop().time
    ends, cancelled = clock() + seconds, False
    while any(not task.done() for task in tasks) and (left := ends - clock()) > 0:
        try:
            await asyncio.wait(tasks, timeout=left)
        except asyncio.CancelledError:
            cancelled = True
    return cancelled


def _succeeded(task: asyncio.Future[Any]) -> bool:
    if not task.done():
        task.cancel()
        return False
    return not task.cancelled() and task.exception() is None
