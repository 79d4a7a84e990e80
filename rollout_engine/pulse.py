"""How late an event loop is: a timer that looks at the clock when it is let."""

from __future__ import annotations

import asyncio

BEAT_S = 0.25
"""How often the loop is looked at; it costs some 20 µs."""


class Pulse:
    """`start` on the loop that is meant; `stop` before it ends."""

    def __init__(self) -> None:
        self._worst = 0.0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._beat(), name="pulse")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    def worst(self) -> float:
        """Seconds that the loop was late at most, since this was asked last."""
        worst, self._worst = self._worst, 0.0
        return worst

    async def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time() + BEAT_S
        while True:
            await asyncio.sleep(due - loop.time())
            now = loop.time()
            self._worst = max(self._worst, now - due)
            due = max(due, now) + BEAT_S
