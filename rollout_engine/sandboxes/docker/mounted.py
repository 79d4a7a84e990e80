"""Unix sockets of this host in containers: each has a folder of its own mounted, and a forwarder that leads there."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import uuid
from pathlib import Path

from rollout_engine.errors import SandboxError
from rollout_engine.heldfolder import HeldFolder
from rollout_engine.sandboxes.base import Listener
from rollout_engine.sandboxes.docker import supply
from rollout_engine.sandboxes.docker.running import Command, Executor, Talk

FOLDER = "/.rollout-sockets"
FORWARD_S = 30.0
"""A forwarder says its port in milliseconds; one that cannot in this time never will."""
BACKLOG = 128
"""Connections that the forwarder has made and the host has not accepted yet."""
_PREFIX = "rollout-sockets-"
_MAX_ERRNO = 133


class Folders:
    """One provider's folders, below a temporary one that nobody else on this host may enter.

    Whoever is in a container may use the sockets of its own folder, by whatever user id the daemon gives it outside;
    nobody else gets to them. What a killed process left is removed by the next one.
    """

    def __init__(self) -> None:
        self._base: HeldFolder | None = None

    def open(self) -> None:
        """Makes the temporary folder. Blocks: for a thread."""
        self._base = HeldFolder(_PREFIX)

    def make(self, name: str) -> Path | None:
        """A folder for the container of this name; None before `open` and after `close`."""
        if self._base is None:
            return None
        folder = self._base.path / name
        folder.mkdir()
        folder.chmod(0o711)
        return folder

    def remove(self, name: str) -> None:
        if self._base is not None:
            shutil.rmtree(self._base.path / name, ignore_errors=True)

    def close(self) -> None:
        """Removes them all; may be called twice."""
        if self._base is not None:
            self._base.remove()
            self._base = None


async def listen(executor: Executor, folder: Path, port: int) -> Listener:
    """A Unix socket in a container's folder, and a forwarder in the container that leads the port to it.

    Raises OSError where the port is taken, SandboxError where no forwarder can be started.
    """
    path = folder / uuid.uuid4().hex[:8]
    command = Command([supply.PROGRAM, "forward", str(port), f"{FOLDER}/{path.name}"], "/", user="0")
    async with contextlib.AsyncExitStack() as undo:
        sock = undo.enter_context(socket.socket(socket.AF_UNIX))
        undo.callback(path.unlink, missing_ok=True)
        _bind(sock, path)
        sock.listen(BACKLOG)
        talk = await executor.connect(command)
        undo.push_async_callback(_end, talk)
        found = await _port(talk)
        return Listener(sock, found, undo.pop_all().aclose)


def _bind(sock: socket.socket, path: Path) -> None:
    """By way of its folder's descriptor: the name that a socket is bound to has room for 107 bytes."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sock.bind(f"/proc/self/fd/{folder}/{path.name}")
    finally:
        os.close(folder)
    path.chmod(0o666)


async def _port(talk: Talk) -> int:
    said = b""
    try:
        async with asyncio.timeout(FORWARD_S):
            while not said.endswith(b"\n"):
                piece = await talk.outlet.read()
                if not piece:
                    raise await _failure(talk)
                said += piece
    except TimeoutError as error:
        raise SandboxError(f"docker: the forwarder did not listen within {FORWARD_S:g} s") from error
    return int(said)


async def _failure(talk: Talk) -> Exception:
    """It ends with an errno, where it is not the supervisor who could not start it."""
    code = (await talk.wait()).exit_code
    text = talk.stderr.value().decode(errors="replace").strip()
    if 0 < code <= _MAX_ERRNO and not text:
        return OSError(code, os.strerror(code))
    return SandboxError(f"docker: the forwarder ended with {code}: {text[-500:]}")


async def _end(talk: Talk) -> None:
    talk.cut()
    await talk.kill()
