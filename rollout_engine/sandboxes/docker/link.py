"""One connection that is carried: what waits on its way, and what is to be sent next."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from rollout_engine.errors import SandboxError
from rollout_engine.sandboxes.docker.linkframes import (
    BREAKS,
    DATA,
    ENDS,
    GRANTS,
    PIECE_BYTES,
    WINDOW_BYTES,
    Frame,
    granted,
    packed,
)

_GRANT_AT_BYTES = WINDOW_BYTES // 4


class Link(asyncio.BufferedProtocol):
    """The host's end of a container's connection: the protocol of a connection to whoever accepts here.

    `hear` takes what the container says, `next` gives what is to be said to it. In either direction at most
    WINDOW_BYTES and one read wait here. `ready` hears that there may be something to say, `gone` that it is over.
    """

    def __init__(self, number: int, ready: Callable[[Link], None], gone: Callable[[Link], None]) -> None:
        self.number, self._ready, self._gone = number, ready, gone
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray(PIECE_BYTES)
        self._early = bytearray()  # for a connection that is not made yet
        self._choked = True  # whoever accepted does not read, or has not accepted
        self._room = WINDOW_BYTES  # for what the container sends
        self._owed = 0  # of it, handed on and not granted again
        self._held = bytearray()  # for the container
        self._credit = WINDOW_BYTES  # what it has room for
        self._lost = False  # the connection here
        self._last = self._ended = False  # nothing more comes from here; and the container was told
        self._closed = False  # nothing more comes from the container
        self._over = False  # nothing more is said, either way

    # -- the container's words ----------------------------------------------------------------------------------

    def hear(self, frame: Frame) -> None:
        """Raises SandboxError for what a sound forwarder does not say."""
        if self._over:
            return
        if frame.kind == DATA:
            self._take(frame.payload)
        elif frame.kind == GRANTS:
            self._credit += frame.granted
            if self._credit > WINDOW_BYTES:
                raise SandboxError("docker: the forwarder grants more than it has room for")
        elif frame.kind == ENDS:
            self._closed = True
            if self._transport is not None and not self._transport.is_closing():
                self._transport.write_eof()
            self._finish()
        elif frame.kind == BREAKS:
            self.cut()
        self._ready(self)

    def _take(self, data: bytes) -> None:
        self._room -= len(data)
        if self._room < 0 or self._closed:
            raise SandboxError("docker: the forwarder sends more than there is room for")
        self._owed += len(data)
        if self._transport is None:
            self._early += data
        elif not self._transport.is_closing():
            self._transport.write(data)

    # -- what it is told ----------------------------------------------------------------------------------------

    def next(self) -> bytes | None:
        """One message; None: there is none for now."""
        if self._over:
            return None
        if self._owed >= _GRANT_AT_BYTES and not self._choked and not self._closed and not self._lost:
            count, self._owed = self._owed, 0
            self._room += count
            return granted(self.number, count)
        if self._held:
            return self._piece()
        if self._lost:
            self._over = True
            self._gone(self)
            return packed(BREAKS, self.number)
        if self._last and not self._ended:
            self._ended = True
            self._finish()
            return packed(ENDS, self.number)
        return None

    def _piece(self) -> bytes | None:
        if not self._credit:
            return None
        piece = bytes(self._held[: min(PIECE_BYTES, self._credit)])
        del self._held[: len(piece)]
        self._credit -= len(piece)
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()
        return packed(DATA, self.number, piece)

    # -- the connection here ------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = made = cast(asyncio.Transport, transport)
        if self._over:
            made.abort()
            return
        made.set_write_buffer_limits(high=0)  # to be told when all is on its way
        self._choked = False
        if self._early:
            made.write(bytes(self._early))
            self._early.clear()
        if self._closed:
            made.write_eof()
        self._ready(self)

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._held += self._buffer[:nbytes]
        if len(self._held) >= WINDOW_BYTES and self._transport is not None:
            self._transport.pause_reading()
        self._ready(self)

    def eof_received(self) -> bool:
        self._last = True
        self._ready(self)
        return True  # the other direction stays open

    def pause_writing(self) -> None:
        self._choked = True

    def resume_writing(self) -> None:
        self._choked = False
        self._ready(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Also of one that could not be made."""
        self._lost = True
        if self._over:
            self._gone(self)
        else:
            self._ready(self)

    # -- the end ------------------------------------------------------------------------------------------------

    def cut(self) -> None:
        """At once, and without a word to the container."""
        self._over = True
        self._held.clear()
        self._early.clear()
        if self._lost:
            self._gone(self)
        elif self._transport is not None:
            self._transport.abort()

    def _finish(self) -> None:
        """Once both directions have ended; what is on its way to whoever accepted still goes there."""
        if self._ended and self._closed:
            self._over = True
            if self._lost:
                self._gone(self)
            elif self._transport is not None:
                self._transport.close()
