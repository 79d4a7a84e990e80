"""A program to talk to whose standard input and output are one end of a socket pair; the host has the other."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from rollout_engine.sandboxes.base import MAX_CHUNK_BYTES, JobStatus

P = TypeVar("P")


class PairedStream(Generic[P]):
    """The host's end of the talk with a program, as its backend knows it (`P`); made by `open_stream`."""

    def __init__(
        self,
        program: P,
        ends: tuple[asyncio.StreamReader, asyncio.StreamWriter],
        status: Callable[[P], JobStatus],
        kill: Callable[[PairedStream[P]], Awaitable[None]],
    ) -> None:
        """`status` and `kill` are the sandbox's: it knows whether it lives, and which processes are its own."""
        self.program, self._status, self._kill = program, status, kill
        self._reader, self._writer = ends
        self._cut = False

    async def read(self) -> bytes:
        # A program that ends with its input unread resets the connection; what it wrote before has come by then.
        with contextlib.suppress(ConnectionError):
            chunk = await self._reader.read(MAX_CHUNK_BYTES)
            if chunk:
                return chunk
        self._status(self.program)
        return b""

    async def write(self, data: bytes) -> None:
        self._status(self.program)
        try:
            if not self._cut:
                self._writer.write(data)
                await self._writer.drain()
        except ConnectionError as error:
            raise BrokenPipeError("the program reads no further") from error
        if self._cut:  # also by somebody else, while this waited
            self._status(self.program)
            raise BrokenPipeError("the stream is closed")

    async def poll(self) -> JobStatus:
        return self._status(self.program)

    async def close(self) -> None:
        await self.cut()
        await self._kill(self)

    async def cut(self) -> None:
        """Ends both streams and leaves the program to whoever calls."""
        self._cut = True
        self._writer.transport.abort()  # what nobody has read is dropped: a close would wait for its reader
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


async def open_stream(
    spawn: Callable[[int], P],
    status: Callable[[P], JobStatus],
    kill: Callable[[PairedStream[P]], Awaitable[None]],
) -> PairedStream[P]:
    """Starts the program with its end of a socket pair: half the descriptors of two pipes, and flow control."""
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            ends = await asyncio.open_unix_connection(sock=ours)
        except BaseException:
            ours.close()
            raise
        try:
            program = spawn(theirs.fileno())  # and no await after it: nothing can cancel a program that nobody holds
        except BaseException:
            ends[1].transport.abort()
            raise
    return PairedStream(program, ends, status, kill)
