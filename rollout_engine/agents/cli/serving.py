"""A rollout's proxy on a socket of its sandbox: the listener, and the door behind it, belong to that rollout alone."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import AsyncIterator

from rollout_engine.proxy.door import Door
from rollout_engine.proxy.rollout_session import RolloutSession
from rollout_engine.sandboxes.base import Sandbox

SHUTDOWN_S = 1.0
"""Connections that are still open at the end have this long."""


@contextlib.asynccontextmanager
async def proxied(session: RolloutSession, sandbox: Sandbox, port: int, token: str) -> AsyncIterator[str]:
    """The address of the rollout's proxy, as the programs in its sandbox reach it. Ends every call with itself."""
    loop = asyncio.get_running_loop()
    door = Door(session, token)
    factory = door.server()
    listener = await _listener(sandbox, port)
    try:
        server = await loop.create_server(factory, sock=listener)
    except BaseException:
        listener.close()
        raise
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/r/{token}"
    finally:
        door.close()
        session.end("the rollout has ended")
        server.close()
        await factory.shutdown(SHUTDOWN_S)


async def _listener(sandbox: Sandbox, port: int) -> socket.socket:
    """At the port that is documented, or a free one where a sandbox shares its network and the port is taken."""
    try:
        return await sandbox.listen(port)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return await sandbox.listen(0)
