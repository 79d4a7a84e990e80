"""A forwarder in a container: the supervisor's program once more, which listens there for the host."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine, Sequence
from typing import Any, NamedTuple

from rollout_engine.errors import SandboxError
from rollout_engine.sandboxes.docker import supply
from rollout_engine.sandboxes.docker.running import Command, Executor, Talk

FORWARD_S = 30.0
"""A forwarder says its port in milliseconds; one that cannot in this time never will."""
_MAX_ERRNO = 133


class Forwarder(NamedTuple):
    """One that listens. `said` came behind the port."""

    talk: Talk
    port: int
    said: bytes

    async def end(self) -> None:
        self.talk.cut()
        await self.talk.kill()


async def start(executor: Executor, argv: Sequence[str]) -> Forwarder:
    """Whoever calls ends it. Raises OSError where the port is taken, SandboxError where none can be started."""
    talk = await executor.connect(Command([supply.PROGRAM, *argv], "/", user="0"))
    try:
        port, said = await _port(talk)
    except BaseException:
        await Forwarder(talk, 0, b"").end()
        raise
    return Forwarder(talk, port, said)


async def _port(talk: Talk) -> tuple[int, bytes]:
    said = b""
    try:
        async with asyncio.timeout(FORWARD_S):
            while b"\n" not in said:
                piece = await talk.outlet.read()
                if not piece:
                    raise await _failure(talk)
                said += piece
    except TimeoutError as error:
        raise SandboxError(f"docker: the forwarder did not listen within {FORWARD_S:g} s") from error
    line, _, rest = said.partition(b"\n")
    return int(line), rest


async def _failure(talk: Talk) -> Exception:
    """It ends with an errno, where it is not the supervisor who could not start it."""
    code = (await talk.wait()).exit_code
    text = talk.stderr.value().decode(errors="replace").strip()
    if 0 < code <= _MAX_ERRNO and not text:
        return OSError(code, os.strerror(code))
    return SandboxError(f"docker: the forwarder ended with {code}: {text[-500:]}")


async def ended(talk: Talk) -> None:
    """Waits until one that says nothing more has ended. Raises SandboxError then, and nothing else."""
    while await talk.outlet.read():
        pass
    raise SandboxError("docker: the forwarder in the container has ended")


def watched(over: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """What says that a listener is over; nobody need look."""
    task = asyncio.ensure_future(over)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return task


async def dismiss(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])
