"""Brings a consumer's tasks to the driver, checked on the way: read on its loop, or carried there from another one."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from rollout_engine.config import RunConfig
from rollout_engine.errors import InputError
from rollout_engine.loopthread import LoopThread
from rollout_engine.specs import Task
from rollout_engine.submission import QUEUED_TASKS, ChunkFeed, QueueFeed, TaskFeed
from rollout_engine.tasks import TaskSource, check_task, iter_tasks, resolve, task_chunks

Wanted: TypeAlias = Callable[[Task], bool] | None
"""Which tasks of a source are submitted; None: all."""


def make_feed(tasks: TaskSource, config: RunConfig, wanted: Wanted) -> TaskFeed:
    """On the driver's loop. A QueueFeed has to be filled by `carry`, where the tasks' source lives."""
    if isinstance(tasks, AsyncIterable):
        return QueueFeed()
    check = resolve if isinstance(tasks, str | Path) else check_task
    return ChunkFeed(_checked(tasks, config, check, wanted))


async def _checked(
    tasks: str | Path | Iterable[Task | Mapping[str, Any]],
    config: RunConfig,
    check: Callable[[Task, RunConfig], Task],
    wanted: Wanted,
) -> AsyncGenerator[list[Task], None]:
    async with contextlib.aclosing(task_chunks(tasks, wanted)) as chunks:
        async for chunk in chunks:
            good: list[Task] = []
            try:
                good.extend(check(task, config) for task in chunk)
            except InputError:
                if good:
                    yield good
                raise
            yield good


async def carry(tasks: TaskSource, feed: QueueFeed, config: RunConfig, wanted: Wanted, driver: LoopThread) -> None:
    """Carries tasks from the caller's loop, where their source lives, to the driver's, as there is room."""
    waiting: asyncio.Queue[Task | BaseException | None] = asyncio.Queue(QUEUED_TASKS)
    sender = asyncio.create_task(_send(feed, waiting, driver))
    try:
        try:
            async for task in iter_tasks(tasks):
                if wanted is None or wanted(task):
                    await waiting.put(check_task(task, config))
            await waiting.put(None)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            await waiting.put(error)
        await sender
    finally:
        await end(sender)


async def _send(feed: QueueFeed, waiting: asyncio.Queue[Task | BaseException | None], driver: LoopThread) -> None:
    """Crosses the threads with all that has gathered at once; a crossing costs much more than a task."""
    over = False
    while not over:
        items = [await waiting.get()]
        while not waiting.empty():
            items.append(waiting.get_nowait())
        over = not isinstance(items[-1], Task)
        await driver.call(feed.put(*items))


async def end(task: asyncio.Task[None] | None) -> None:
    """Cancels what carries tasks, if there is something, and waits until it has ended."""
    if task is not None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
