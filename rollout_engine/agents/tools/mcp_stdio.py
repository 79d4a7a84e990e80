"""The stdio transport of MCP over a stream of the sandbox: one JSON-RPC message a line, either way."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeAlias

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.shared.message import SessionMessage
from mcp.types import jsonrpc_message_adapter

from rollout_engine.errors import InfraError
from rollout_engine.sandboxes.base import Stream

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 8 * 2**20
"""A server that sends a longer line is not listened to any more."""
MAX_STRAY_LINES = 1000
"""Lines that are no messages; a server that writes more is not listened to any more."""
_LOOKS, _LOOK_S = 20, 0.02
Incoming: TypeAlias = SessionMessage | Exception


class Link:
    """What happened to the connection: why it ended, and a fault of the sandbox, which is no fault of the server."""

    ended: str | None = None
    fault: InfraError | None = None


@asynccontextmanager
async def stdio(
    stream: Stream, link: Link
) -> AsyncIterator[tuple[MemoryObjectReceiveStream[Incoming], MemoryObjectSendStream[SessionMessage]]]:
    """The two ends that an MCP client session takes."""
    to_client, incoming = anyio.create_memory_object_stream[Incoming](0)
    outgoing, from_client = anyio.create_memory_object_stream[SessionMessage](0)
    with to_client, incoming, outgoing, from_client:
        pumps = [
            asyncio.create_task(_receive(stream, to_client, link)),
            asyncio.create_task(_send(stream, from_client, to_client, link)),
        ]
        try:
            yield incoming, outgoing
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.wait(pumps)


async def _receive(stream: Stream, to_client: MemoryObjectSendStream[Incoming], link: Link) -> None:
    """Hands lines on until there are no more, and then ends the session's side."""
    rest, stray = bytearray(), 0
    try:
        while chunk := await stream.read():
            *lines, tail = chunk.split(b"\n")
            for line in lines:
                stray += not await _hand_on(bytes(rest + line), to_client)
                rest.clear()
            rest += tail
            if len(rest) > MAX_MESSAGE_BYTES:
                link.ended = f"it sent a message of more than {MAX_MESSAGE_BYTES >> 20} MiB"
                return
            if stray > MAX_STRAY_LINES:
                link.ended = f"it wrote more than {MAX_STRAY_LINES} lines that are no messages"
                return
        link.ended = await _ending(stream, "closed its output")
    except InfraError as fault:
        link.fault = fault
    except (anyio.BrokenResourceError, anyio.ClosedResourceError):  # the session has ended first
        pass
    finally:
        to_client.close()


async def _hand_on(line: bytes, to_client: MemoryObjectSendStream[Incoming]) -> bool:
    """Whether the line was a message."""
    try:
        message = jsonrpc_message_adapter.validate_json(line, by_name=False)
    except ValueError:
        # Servers print to their standard output what does not belong there; a lost answer meets its call's limit.
        log.debug("an MCP server wrote a line that is no message: %r", line[:200])
        return False
    await to_client.send(SessionMessage(message))
    return True


async def _ending(stream: Stream, alive: str) -> str:
    """How the server ended; `alive` where it has not."""
    for _ in range(_LOOKS):  # a program's output ends a little before the program
        status = await stream.poll()
        if status.exit_code is not None:
            break
        await asyncio.sleep(_LOOK_S)
    said = status.stderr[-500:].decode(errors="replace").strip()
    how = alive if status.exit_code is None else f"ended with exit code {status.exit_code}"
    return f"it {how}" + (f": {said}" if said else "")


async def _send(
    stream: Stream,
    from_client: MemoryObjectReceiveStream[SessionMessage],
    to_client: MemoryObjectSendStream[Incoming],
    link: Link,
) -> None:
    try:
        if not await _write_all(stream, from_client):
            # Where the server has ended the reader may see it later; one that only closed its input is no use.
            how = await _ending(stream, "reads no further")
            link.ended = link.ended or how
            to_client.close()
    except InfraError as fault:
        link.fault = fault
        to_client.close()
    finally:
        from_client.close()


async def _write_all(stream: Stream, from_client: MemoryObjectReceiveStream[SessionMessage]) -> bool:
    """Whether the server took all until the session's end."""
    try:
        async for message in from_client:
            line = message.message.model_dump_json(by_alias=True, exclude_unset=True)
            await stream.write(line.encode("utf-8", "replace") + b"\n")
    except BrokenPipeError:
        return False
    return True
