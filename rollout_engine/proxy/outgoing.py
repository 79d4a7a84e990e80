"""Sends a streamed answer, and keeps it alive while the model thinks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

from aiohttp import web

from rollout_engine.errors import RolloutEngineError

EVENTS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-store"}


@dataclass(frozen=True, slots=True)
class KeepAlive:
    """When a stream that has nothing to say yet says that it lives."""

    begin_s: float = 5.0
    """The response begins after this long without a first piece; until then an error has a status of its own."""
    every_s: float = 10.0


class Outgoing:
    """One streamed response."""

    def __init__(self, request: web.BaseRequest, ping: bytes, keep: KeepAlive, headers: dict[str, str]) -> None:
        self._request, self._ping, self._keep = request, ping, keep
        self._response = web.StreamResponse(headers=headers)
        self._beginning = asyncio.Lock()
        self._whole = True
        """The last bytes that were sent end an event, so that a ping may follow."""
        self._quiet = True

    async def send(
        self, frames: AsyncGenerator[bytes, None], failed: Callable[[RolloutEngineError], bytes]
    ) -> web.StreamResponse:
        """Sends the frames to their end. An error before the first byte is raised, a later one sent."""
        keeper = asyncio.create_task(self._keep_alive())
        try:
            async with contextlib.aclosing(frames):
                try:
                    async for frame in frames:
                        await self._write(frame)
                except RolloutEngineError as error:
                    if not self._response.prepared:
                        raise
                    await self._write((b"" if self._whole else b"\n\n") + failed(error))
            await self._begin()
            await self._response.write_eof()
        finally:
            keeper.cancel()
        return self._response

    async def _write(self, frame: bytes) -> None:
        if not frame:
            return
        if not self._response.prepared:
            await self._begin()
        self._whole = frame.endswith((b"\n\n", b"\n\r\n"))
        self._quiet = False
        await self._response.write(frame)

    async def _begin(self) -> None:
        async with self._beginning:
            if not self._response.prepared:
                await self._response.prepare(self._request)

    async def _keep_alive(self) -> None:
        with contextlib.suppress(ConnectionError):  # the handler itself meets the same one
            await asyncio.sleep(self._keep.begin_s)
            while True:
                await self._begin()
                if self._quiet and self._whole and self._ping:
                    await self._response.write(self._ping)
                self._quiet = True
                await asyncio.sleep(self._keep.every_s)
