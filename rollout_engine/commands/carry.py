"""Carries a run out from the command line: the engine, the display, and what Ctrl-C does to both."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from rollout_engine.commands.console import INTERRUPTED, OK, SOME_FAILED, say, say_error
from rollout_engine.commands.display import LIVE_S, Display, NoteHandler
from rollout_engine.engine import RolloutEngine
from rollout_engine.errors import RunError, describe
from rollout_engine.specs import Task

DRAINING = "draining: what runs may end, nothing more is started; Ctrl-C again cancels it"
CANCELLING = "cancelling: stopping what runs"


@dataclass(frozen=True, slots=True)
class Batch:
    """Tasks of one round; `total` where their number is known."""

    tasks: Iterable[Task]
    round: int
    total: int | None = None
    go_on: bool = False
    """Of a resumed run: first what its plan holds, then those of the tasks that it does not."""


Opened: TypeAlias = Callable[[Path], None]
"""Called with the run directory once it is this run's."""


class Stop:
    """How often the user has asked for the end."""

    def __init__(self) -> None:
        self.first, self.second = asyncio.Event(), asyncio.Event()

    def ask(self) -> None:
        if self.second.is_set():
            say("still cleaning up; this takes less than a minute")
        elif self.first.is_set():
            self.second.set()
        else:
            self.first.set()

    def drain(self) -> None:
        """SIGTERM, however often it comes, is one Ctrl-C: a supervisor may send it to the group and to us."""
        self.first.set()


@asynccontextmanager
async def signals() -> AsyncIterator[Stop]:
    """SIGINT and SIGTERM as events, for as long as the context lasts."""
    stop, loop = Stop(), asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, stop.ask)
    loop.add_signal_handler(signal.SIGTERM, stop.drain)
    try:
        yield stop
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        loop.remove_signal_handler(signal.SIGTERM)


def carry_out(engine: RolloutEngine, batches: list[Batch], display: Display, opened: Opened) -> int:
    """Runs everything, and returns OK, SOME_FAILED (the run ended early) or INTERRUPTED. Raises InputError."""
    logger, handler = logging.getLogger(), NoteHandler(display)
    logger.addHandler(handler)
    try:
        return asyncio.run(_carry_out(engine, batches, display, handler, opened))
    except RunError as error:
        display.close()
        if not handler.has_said(describe(error)):
            say_error(error)
        return SOME_FAILED
    finally:
        logger.removeHandler(handler)
        display.close()


async def _carry_out(
    engine: RolloutEngine, batches: list[Batch], display: Display, notes: NoteHandler, opened: Opened
) -> int:
    async with signals() as stop:
        if not await _open(engine, display, stop):
            say("interrupted before it started: nothing was run, and nothing is written")
            return INTERRUPTED
        try:
            opened(engine.run_dir)
            if engine.metrics_url is not None:
                display.note(f"metrics: {engine.metrics_url}")
            display.state("running")
            watcher = asyncio.create_task(_watch(engine, display, notes))
            try:
                return await _work(engine, batches, display, stop)
            finally:
                watcher.cancel()
                with suppress(asyncio.CancelledError):
                    await watcher
        finally:
            display.state("committing")
            await engine.__aexit__(None, None, None)


async def _open(engine: RolloutEngine, display: Display, stop: Stop) -> bool:
    """Brings the engine up; False where the user gave up on that."""
    opening, asked = asyncio.create_task(engine.__aenter__()), asyncio.create_task(stop.first.wait())
    await asyncio.wait({opening, asked}, return_when=asyncio.FIRST_COMPLETED)
    asked.cancel()
    if opening.done():
        opening.result()
        return True
    display.state("stopping before it has started")
    opening.cancel()
    await asyncio.wait({opening})
    if not opening.cancelled() and opening.exception() is None:
        await engine.__aexit__(None, None, None)
    return False


async def _work(engine: RolloutEngine, batches: list[Batch], display: Display, stop: Stop) -> int:
    work = asyncio.create_task(_finish(engine, batches))
    try:
        if await _first_of(work, stop.first):
            work.result()
            if engine.cancelled_by is None:
                return OK
            display.note(f"note: cancelled by {engine.cancelled_by}")
            return INTERRUPTED
        display.state(DRAINING)
        draining = asyncio.create_task(engine.drain())
        if not await _first_of(draining, stop.second):
            display.state(CANCELLING)
            draining.cancel()
        return INTERRUPTED
    finally:
        work.cancel()
        # Its own error, if it has one, is raised above; after a cancellation there is nothing more to learn.
        await asyncio.wait({work})


async def _finish(engine: RolloutEngine, batches: list[Batch]) -> None:
    for batch in batches:
        if engine.cancelled_by is not None:
            break
        await engine.finish(batch.tasks, round=batch.round, total=batch.total, go_on=batch.go_on)


async def _first_of(work: asyncio.Task[None], event: asyncio.Event) -> bool:
    """Whether the work ended before the event came."""
    waiting = asyncio.create_task(event.wait())
    await asyncio.wait({work, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    return work.done()


async def _watch(engine: RolloutEngine, display: Display, notes: NoteHandler) -> None:
    """Shows where the run stands, until it is cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        progress = engine.progress
        for message in list(progress.notes):
            notes.once(message)
        display.show(progress, loop.time())
        await asyncio.sleep(LIVE_S)
