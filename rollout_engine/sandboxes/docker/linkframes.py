"""The messages that carry connections over one stream: their form, the same both ways (see supervisor/carry.c)."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from rollout_engine.errors import SandboxError

OPENS, DATA, GRANTS, ENDS, BREAKS = range(1, 6)
WINDOW_BYTES = 64 * 1024
"""Of one connection, in one direction, so much is on its way: nobody sends more than the other has room for."""
PIECE_BYTES = 32 * 1024
"""At most so much of one connection before the next has its turn."""
LINKS = 256
"""Connections at once."""
_HEAD = struct.Struct("=IBI")
_COUNT = struct.Struct("=I")
_SIZE = 4
"""The first number counts what is behind it."""


class Frame(NamedTuple):
    kind: int
    number: int
    """Of the connection."""
    payload: bytes

    @property
    def granted(self) -> int:
        """A GRANTS' bytes. Raises SandboxError."""
        if len(self.payload) != _COUNT.size:
            raise SandboxError(f"docker: the forwarder grants with {len(self.payload)} bytes")
        return int(_COUNT.unpack(self.payload)[0])


def packed(kind: int, number: int, payload: bytes = b"") -> bytes:
    return _HEAD.pack(_HEAD.size - _SIZE + len(payload), kind, number) + payload


def granted(number: int, count: int) -> bytes:
    return packed(GRANTS, number, _COUNT.pack(count))


class Frames:
    """Cuts what comes into messages, however it comes; holds less than one."""

    def __init__(self) -> None:
        self._held = bytearray()

    def cut(self, data: bytes) -> Iterator[Frame]:
        """Raises SandboxError for a message that is larger, or smaller, than any may be."""
        self._held += data
        while len(self._held) >= _HEAD.size:
            rest, kind, number = _HEAD.unpack_from(self._held)
            if not _HEAD.size - _SIZE <= rest <= _HEAD.size - _SIZE + WINDOW_BYTES:
                raise SandboxError(f"docker: the forwarder sends a message of {rest} bytes")
            if len(self._held) - _SIZE < rest:
                return
            payload = bytes(self._held[_HEAD.size : _SIZE + rest])
            del self._held[: _SIZE + rest]
            yield Frame(kind, number, payload)
