"""An event loop in a thread of its own, called from other loops."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

STOP_S = 30.0
"""What does not let itself be cancelled, or cleans up for longer than this, is left behind."""


def new_event_loop() -> asyncio.AbstractEventLoop:
    """uvloop's where it is there: it halves the cost of a socket event."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


class LoopThread:
    """Started at once; `stop` ends it."""

    def __init__(self, name: str) -> None:
        self._loop = new_event_loop()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
        finally:
            self._loop.close()

    async def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work` there and waits for it here; cancelled here, it is cancelled there."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def soon(self, function: Callable[[], None]) -> None:
        """Has it called there, from any thread; does not wait."""
        self._loop.call_soon_threadsafe(function)

    async def stop(self) -> None:
        """Ends the loop. What still runs on it is cancelled first."""
        if self._thread.is_alive():
            await self.call(_cancel_others())
            self._loop.call_soon_threadsafe(self._loop.stop)
            await asyncio.to_thread(self._thread.join)


async def _cancel_others() -> None:
    # What is being cancelled already may be cleaning up, and need the tasks beside it for that.
    if ending := [task for task in _others() if task.cancelling()]:
        await asyncio.wait(ending, timeout=STOP_S)
    others = _others()
    for task in others:
        task.cancel()
    if others:
        done, _ = await asyncio.wait(others, timeout=STOP_S)
        await asyncio.gather(*done, return_exceptions=True)


def _others() -> list[asyncio.Task[Any]]:
    return [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
