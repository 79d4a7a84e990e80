"""Work that may block for ever, in a thread that holds up neither a shared pool nor the end of the process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


async def in_own_thread(work: Callable[[], T], name: str) -> T:
    """Runs `work` in a daemon thread of its own. Cancelled here, it goes on there, and nobody waits for it."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(set_it: Callable[[Any], None], value: Any) -> None:
        if not done.done():
            set_it(value)

    def run() -> None:
        outcome: tuple[Callable[[Any], None], Any]
        try:
            outcome = (done.set_result, work())
        except BaseException as error:
            outcome = (done.set_exception, error)
        with suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await done
