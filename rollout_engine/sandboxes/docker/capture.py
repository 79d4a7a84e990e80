"""The output of one command: the tail of a stream, bounded, or all of it, as fast as it is read."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable

from rollout_engine.sandboxes.base import MAX_CHUNK_BYTES, MAX_OUTPUT_BYTES


class Tail:
    """Keeps the last `limit` bytes; trimmed only when twice as many are held, so appends stay cheap."""

    def __init__(self, limit: int = MAX_OUTPUT_BYTES) -> None:
        self._limit = limit
        self._held = bytearray()
        self.truncated = False

    def append(self, data: bytes) -> None:
        self._held += data
        if len(self._held) > 2 * self._limit:
            self._trim()

    def value(self) -> bytes:
        self._trim()
        return bytes(self._held)

    def _trim(self) -> None:
        surplus = len(self._held) - self._limit
        if surplus > 0:
            del self._held[:surplus]
            self.truncated = True


class Outlet:
    """Output on its way to its reader. `taken` hears how much was read, so that the sender can hold back."""

    def __init__(self, taken: Callable[[int], None]) -> None:
        self._taken = taken
        self._held: collections.deque[bytes] = collections.deque()
        self._lost: Exception | None = None
        self._news = asyncio.Event()
        self.ended = False

    def append(self, data: bytes) -> None:
        if not self.ended:
            self._held += [data[at : at + MAX_CHUNK_BYTES] for at in range(0, len(data), MAX_CHUNK_BYTES)]
            self._news.set()

    def end(self, *, drop: bool = False) -> None:
        self.ended = True
        if drop:
            self._held.clear()
        self._news.set()

    def lose(self, why: Exception) -> None:
        if not self.ended:
            self._lost = why
            self._news.set()

    @property
    def held(self) -> int:
        return sum(map(len, self._held))

    async def read(self) -> bytes:
        while not self._held:
            if self._lost is not None:
                raise self._lost
            if self.ended:
                return b""
            self._news.clear()
            await self._news.wait()
        chunk = self._held.popleft()
        self._taken(len(chunk))
        return chunk
