"""A connection to the daemon that was turned into a stream both ways, and its multiplexed frames."""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
from typing import NamedTuple

from rollout_engine.errors import SandboxAway, SandboxError
from rollout_engine.sandboxes.docker.failures import UNREACHABLE_FIX

STDOUT, STDERR = 1, 2
_HEADER = struct.Struct(">BxxxL")
_READ_BYTES = 256 * 1024


class Address(NamedTuple):
    """Where a daemon listens: a socket's path, or host and port."""

    path: str | None = None
    host: str = ""
    port: int = 0


class HijackRefused(SandboxError):
    """The daemon answered a stream request with an error status."""

    def __init__(self, message: str = "", status: int = 0) -> None:
        super().__init__(message, status)
        self.status = status

    def __str__(self) -> str:
        return str(self.args[0])


class Hijacked:
    """An open stream. `frames` yields (stream, data) until the daemon ends it; whoever opened it closes it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, address: Address, path: str, body: object = None) -> Hijacked:
        try:
            reader, writer = await _connect(address)
        except OSError as error:
            raise SandboxAway(f"docker: the daemon cannot be reached ({error}); {UNREACHABLE_FIX}") from error
        try:
            writer.write(_request(path, body))
            await _accept(reader, path)
        except (OSError, EOFError) as error:
            writer.close()
            raise SandboxAway(f"docker: the daemon closed the connection; {UNREACHABLE_FIX}") from error
        except BaseException:
            writer.close()
            raise
        return cls(reader, writer)

    async def frame(self) -> tuple[int, bytes] | None:
        """The next frame, or None at the end of the stream (also where it is cut)."""
        try:
            stream, size = _HEADER.unpack(await self._reader.readexactly(_HEADER.size))
            return stream, await self._reader.readexactly(size)
        except (OSError, EOFError):
            return None

    async def send(self, data: bytes | memoryview) -> None:
        """Writes; a reader that has gone is no error here, its exit code says what happened."""
        with contextlib.suppress(OSError):
            await self.write(data)

    async def write(self, data: bytes | memoryview) -> None:
        """Writes. Raises OSError where the connection is gone."""
        self._writer.write(data)
        await self._writer.drain()

    def send_eof(self) -> None:
        try:
            self._writer.write_eof()
        except OSError:
            return

    def close(self) -> None:
        """At once: what was not sent yet would wait for a reader that may never come."""
        self._writer.transport.abort()


async def _connect(address: Address) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if address.path is not None:
        return await asyncio.open_unix_connection(address.path, limit=_READ_BYTES)
    return await asyncio.open_connection(address.host, address.port, limit=_READ_BYTES)


def _request(path: str, body: object) -> bytes:
    data = json.dumps(body).encode() if body is not None else b""
    head = f"POST {path} HTTP/1.1\r\nHost: docker\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n"
    return f"{head}Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


async def _accept(reader: asyncio.StreamReader, path: str) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    status = int(head.split(b" ", 2)[1])
    if status not in (101, 200):
        message = (await reader.read(2_000)).decode(errors="replace").strip()
        raise HijackRefused(f"docker: POST {path.split('?')[0]}: {status} {message}", status)
