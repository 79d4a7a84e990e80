"""Tasks on their way in, and committed rows on their way back to whoever submitted them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import pyarrow as pa

from rollout_engine.specs import Task
from rollout_engine.stream import Stream

CHUNK_TASKS = 256
"""Tasks taken from a source at once."""
CHUNK_S = 0.05
"""A slow source is not waited for longer than this once it has given a task."""


class TaskSource(Protocol):
    """Where a submission's tasks come from."""

    async def take(self) -> list[Task]:
        """Some tasks; an empty list is the end."""
        ...


class IteratorSource:
    """A plain iterator, pulled in a thread because it may block."""

    def __init__(self, tasks: Iterator[Task]) -> None:
        self._tasks = tasks

    async def take(self) -> list[Task]:
        return await asyncio.to_thread(self._chunk)

    def _chunk(self) -> list[Task]:
        chunk: list[Task] = []
        ends = 0.0
        for task in self._tasks:
            ends = ends or time.monotonic() + CHUNK_S
            chunk.append(task)
            if len(chunk) >= CHUNK_TASKS or time.monotonic() > ends:
                break
        return chunk


class FeedSource:
    """Tasks that arrive from another event loop: `feed` is called on the driver's loop, and waits for room."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Task | BaseException | None] = asyncio.Queue(CHUNK_TASKS)
        self._ended = False

    async def feed(self, item: Task | BaseException | None) -> None:
        """One task, an error to end with, or None: the end."""
        await self._queue.put(item)

    async def take(self) -> list[Task]:
        if self._ended:
            return []
        items = [await self._queue.get()]
        while not self._queue.empty():
            items.append(self._queue.get_nowait())
        tasks = [item for item in items if isinstance(item, Task)]
        self._ended = len(tasks) < len(items)
        for item in items:
            if isinstance(item, BaseException):
                raise item
        return tasks


@dataclass(eq=False, slots=True)
class Submission:
    """One stream of tasks of one round."""

    round: int
    source: TaskSource
    stream: Stream[pa.RecordBatch] | None = None
    """Where its committed rows go; None: nobody reads them."""
    total: int | None = None
    """Tasks in the source, where known."""
    open_slots: int = 0
    exhausted: bool = False
    error: BaseException | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)

    def settle(self) -> None:
        """Ends the stream once everything that was planned has its row."""
        if self.exhausted and not self.open_slots and not self.done.is_set():
            self.done.set()
            if self.stream is not None:
                self.stream.end(self.error)

    def fail(self, error: BaseException) -> None:
        """The run is over for this submission."""
        self.error, self.exhausted = error, True
        self.done.set()
        if self.stream is not None:
            self.stream.end(error)
