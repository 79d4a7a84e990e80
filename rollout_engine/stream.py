"""Committed rows on their way to a consumer on another event loop: bounded by the driver, never lost, in order."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Stream(Generic[T]):
    """The driver puts from its thread; one consumer iterates on its own loop. `unread_*` is what the driver bounds."""

    def __init__(self) -> None:
        self._items: deque[tuple[T, int, int]] = deque()
        self._lock = threading.Lock()
        self._ready = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._error: BaseException | None = None
        self._ended = False
        self.unread_rows = 0
        self.unread_bytes = 0

    def put(self, item: T, rows: int, size: int) -> None:
        with self._lock:
            self._items.append((item, rows, size))
            self.unread_rows += rows
            self.unread_bytes += size
        self._tell()

    def end(self, error: BaseException | None = None) -> None:
        """No more items; `error` is raised to the consumer after the last one."""
        with self._lock:  # or the consumer could see the end before the error
            self._ended, self._error = True, error
        self._tell()

    def _tell(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._ready.set)
        except RuntimeError:  # the consumer's loop is closed: nobody reads any more
            self._ended = True

    def __aiter__(self) -> Stream[T]:
        return self

    async def __anext__(self) -> T:
        while True:
            with self._lock:
                if self._items:
                    item, rows, size = self._items.popleft()
                    self.unread_rows -= rows
                    self.unread_bytes -= size
                    return item
                ended = self._ended
                self._ready.clear()
            if ended:
                if self._error is not None:
                    raise self._error
                raise StopAsyncIteration
            await self._ready.wait()
