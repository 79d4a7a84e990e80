"""Tasks on their way in, and committed rows on their way back to whoever submitted them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Protocol

import pyarrow as pa

from rollout_engine.specs import Task
from rollout_engine.stream import Stream

QUEUED_TASKS = 256
"""Tasks that wait between a caller's event loop and the driver's."""


class TaskFeed(Protocol):
    """Where a submission's tasks come from."""

    async def take(self) -> list[Task]:
        """Some tasks; an empty list is the end. Raises what the source raised, after the tasks before it."""
        ...

    async def close(self) -> None:
        """No more tasks are wanted."""
        ...


class ChunkFeed:
    """Tasks that the driver's own loop reads."""

    def __init__(self, chunks: AsyncGenerator[list[Task], None]) -> None:
        self._chunks = chunks

    async def take(self) -> list[Task]:
        return await anext(self._chunks, [])

    async def close(self) -> None:
        await self._chunks.aclose()


class QueueFeed:
    """Tasks that arrive from another event loop: `put` is called on the driver's loop, and waits for room."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Task | BaseException | None] = asyncio.Queue(QUEUED_TASKS)
        self._ended = False
        self._error: BaseException | None = None

    async def put(self, *items: Task | BaseException | None) -> None:
        """Tasks, at the end an error to end with, or None."""
        for item in items:
            await self._queue.put(item)

    async def take(self) -> list[Task]:
        tasks: list[Task] = []
        while not self._ended and not (tasks and self._queue.empty()):
            item = await self._queue.get()
            if isinstance(item, Task):
                tasks.append(item)
            else:
                self._ended, self._error = True, item
        if not tasks and self._error is not None:
            raise self._error
        return tasks

    async def close(self) -> None:
        self._ended = True


@dataclass(eq=False, slots=True)
class Submission:
    """One stream of tasks of one round."""

    round: int
    feed: TaskFeed
    stream: Stream[pa.RecordBatch] | None = None
    """Where its committed rows go; None: nobody reads them."""
    go_on: bool = False
    """First comes what earlier epochs planned and did not finish; the feed gives only what they did not plan."""
    open_slots: int = 0
    exhausted: bool = False
    error: BaseException | None = None
    done: asyncio.Event = field(default_factory=asyncio.Event)
    planning: asyncio.Task[None] | None = None

    def settle(self) -> None:
        """Ends the stream once everything that was planned has its row."""
        if self.exhausted and not self.open_slots and not self.done.is_set():
            self.done.set()
            if self.stream is not None:
                self.stream.end(self.error)

    def fail(self, error: BaseException) -> None:
        """The run is over for this submission, unless it was done before."""
        if self.done.is_set():
            return
        self.error, self.exhausted = error, True
        self.done.set()
        if self.stream is not None:
            self.stream.end(error)
