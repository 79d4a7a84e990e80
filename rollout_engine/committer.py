"""The thread that writes: rows become durable here, many batches to one sync, and then the driver hears of it."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

WINDOW_S = 0.05
"""Writes begin at least this far apart, so that under load many batches share one sync; the first does not wait."""


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
    ) -> None:
        self._write, self._done, self._failed, self._idle, self._idle_s = write, done, failed, idle, idle_s
        self._queue: queue.SimpleQueue[T | None] = queue.SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._work, name="committer", daemon=True)
        self._thread.start()

    def submit(self, item: T) -> None:
        self._queue.put(item)

    async def close(self) -> None:
        """Returns once everything submitted has been written and told."""
        self._queue.put(None)
        await asyncio.to_thread(self._thread.join)
        await asyncio.sleep(0)

    def _work(self) -> None:
        try:
            open_, next_write = True, 0.0
            while open_:
                items, open_ = self._gather()
                if items:
                    if open_ and (early := next_write - time.monotonic()) > 0:
                        time.sleep(early)
                        more, open_ = self._gather(wait=False)
                        items += more
                    next_write = time.monotonic() + WINDOW_S
                    self._write(items)
                    self._loop.call_soon_threadsafe(self._done, items)
                self._idle()
        except BaseException as error:
            self._loop.call_soon_threadsafe(self._failed, error)

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
