"""The thread that writes: rows become durable here, many batches to one sync, and then the driver hears of it."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")

WINDOW_S = 0.05
"""Writes begin at least this far apart, so that under load many batches share one sync; the first does not wait."""


class Seal(NamedTuple, Generic[T]):
    """When what has gathered is written: at an age, or at a size before that."""

    window_s: float
    bytes: int
    """0: whatever the size."""
    size: Callable[[T], int]


class Committer(Generic[T]):
    """Hands what was submitted to `write`, in order, all that has gathered at once; then to `done` on the loop.

    `idle` runs in the same thread between writes, at least every `idle_s` (heartbeat, live tables). An error of
    either goes to `failed` on the loop, and nothing is written after it.
    """

    def __init__(
        self,
        write: Callable[[list[T]], None],
        done: Callable[[list[T]], None],
        failed: Callable[[BaseException], None],
        idle: Callable[[], None],
        idle_s: float,
        seal: Seal[T] | None = None,
    ) -> None:
        self._write, self._done, self._failed, self._idle, self._idle_s = write, done, failed, idle, idle_s
        self._seal = seal or Seal(WINDOW_S, 0, _nothing)
        self._queue: queue.SimpleQueue[T | None] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._thread = threading.Thread(target=self._work, name="committer", daemon=True)
        self._thread.start()

    def submit(self, item: T) -> None:
        self._queue.put(item)

    async def close(self, seconds: float) -> bool:
        """Returns once everything submitted has been written and told; False where that took longer."""
        self._queue.put(None)
        try:
            async with asyncio.timeout(seconds):
                await self._ended.wait()
        except TimeoutError:
            return False
        return True

    def _work(self) -> None:
        try:
            open_, next_write = True, 0.0
            while open_:
                items, open_ = self._gather()
                if items:
                    while open_ and (early := next_write - time.monotonic()) > 0 and not self._full(items):
                        time.sleep(min(early, WINDOW_S))
                        more, open_ = self._gather(wait=False)
                        items += more
                    next_write = time.monotonic() + self._seal.window_s
                    self._write(items)
                    self._tell(self._done, items)
                self._idle()
        except BaseException as error:
            self._tell(self._failed, error)
        finally:
            self._tell(self._ended.set)

    def _tell(self, callback: Callable[..., None], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits for a disk that hung any more
            self._loop.call_soon_threadsafe(callback, *arguments)

    def _full(self, items: list[T]) -> bool:
        limit = self._seal.bytes
        return limit > 0 and sum(map(self._seal.size, items)) >= limit

    def _gather(self, wait: bool = True) -> tuple[list[T], bool]:
        """Waits for something, then takes all there is; False once the end was seen."""
        items: list[T] = []
        try:
            item = self._queue.get(wait, self._idle_s)
            while item is not None:
                items.append(item)
                item = self._queue.get_nowait()
        except queue.Empty:
            return items, True
        return items, False


def _nothing(item: object) -> int:
    return 0
