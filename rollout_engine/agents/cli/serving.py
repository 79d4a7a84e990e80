"""A rollout's proxy on a socket of its sandbox: the listener, and the door behind it, belong to that rollout alone."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import AsyncIterator
from functools import partial

from rollout_engine.errors import SandboxError
from rollout_engine.proxy.door import Door
from rollout_engine.proxy.rollout_session import RolloutSession
from rollout_engine.sandboxes.base import Listener, Sandbox

SHUTDOWN_S = 1.0
"""Connections that are still open at the end have this long."""


@contextlib.asynccontextmanager
async def proxied(session: RolloutSession, sandbox: Sandbox, port: int, token: str) -> AsyncIterator[str]:
    """The address of the rollout's proxy, as the programs in its sandbox reach it. Ends every call with itself."""
    loop = asyncio.get_running_loop()
    door = Door(session, token)
    factory = door.server()
    async with contextlib.AsyncExitStack() as ending:
        listener = await _listener(sandbox, port)
        ending.push_async_callback(_leave, listener)
        if listener.over is not None:
            listener.over.add_done_callback(partial(_tell, session))
        make = loop.create_unix_server if listener.sock.family == socket.AF_UNIX else loop.create_server
        server = await make(factory, sock=listener.sock)
        try:
            yield f"http://127.0.0.1:{listener.port}/r/{token}"
        finally:
            door.close()
            session.end("the rollout has ended")
            server.close()
            await factory.shutdown(SHUTDOWN_S)


def _tell(session: RolloutSession, over: asyncio.Future[None]) -> None:
    """A note and no failure: whoever is root in a container could end its forwarder to escape a score.

    Where the daemon is lost, the agent's own process is lost, and that is told as what it is.
    """
    error = None if over.cancelled() else over.exception()
    if error is not None:
        session.refused(str(error))


async def _leave(listener: Listener) -> None:
    with contextlib.suppress(SandboxError):  # a sandbox that has ended has taken its part with it
        await listener.close()


async def _listener(sandbox: Sandbox, port: int) -> Listener:
    """At the port that is documented, or a free one where a sandbox shares its network and the port is taken."""
    try:
        return await sandbox.listen(port)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return await sandbox.listen(0)
