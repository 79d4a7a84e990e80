"""Hands out what a generator that blocks gives, some at a time: it is read in a thread, and the loop goes on."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Generator
from typing import Generic, TypeVar

from rollout_engine.threads import in_own_thread

T = TypeVar("T")

CHUNK_ITEMS = 256
CHUNK_S = 0.02
"""An item that its source has given waits at most about this long for more to come."""
CLOSE_S = 5.0
"""An abandoned source that blocks in its thread is waited for this long."""


async def chunks_of(items: Generator[T, None, None]) -> AsyncGenerator[list[T], None]:
    """What `items` gives, also that before an item that is long in coming; a chunk may be empty.

    What it raises is raised here, after all that came before. It is closed at the end, unless it still blocks then.
    """
    shelf, running = _Shelf[T](), None
    try:
        over = False
        while not over:
            running = asyncio.ensure_future(in_own_thread(lambda: shelf.fill(items), "tasks"))
            running.add_done_callback(lambda _: shelf.news.set())
            while not running.done():
                await shelf.news.wait()
                shelf.news.clear()
                await asyncio.wait({running}, timeout=CHUNK_S)
                yield shelf.empty()
            over = running.result()
            yield shelf.empty()
        if shelf.error is not None:
            raise shelf.error
    finally:
        if running is not None:
            await asyncio.wait({running}, timeout=CLOSE_S)
        if running is None or running.done():
            items.close()


class _Shelf(Generic[T]):
    """Filled in a thread, emptied on the loop that it is made on."""

    def __init__(self) -> None:
        self.news = asyncio.Event()
        """Set once there is something on it."""
        self.error: BaseException | None = None
        """What its source raised in the end."""
        self._loop = asyncio.get_running_loop()
        self._taken: list[T] = []
        self._lock = threading.Lock()

    def fill(self, items: Generator[T, None, None]) -> bool:
        """Until there is enough; whether that was the end."""
        end = time.monotonic() + CHUNK_S
        try:
            for item in items:
                with self._lock:
                    self._taken.append(item)
                    count = len(self._taken)
                if count == 1:
                    self._loop.call_soon_threadsafe(self.news.set)
                if count >= CHUNK_ITEMS or time.monotonic() > end:
                    return False
        except BaseException as error:  # what came before it is handed out first
            self.error = error
        return True

    def empty(self) -> list[T]:
        with self._lock:
            taken, self._taken = self._taken, []
        return taken
