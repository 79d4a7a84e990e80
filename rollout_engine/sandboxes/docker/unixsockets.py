"""Unix sockets of this host in private folders: where a container's connections come in, by whichever forwarder."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from rollout_engine.heldfolder import HeldFolder

BACKLOG = 128
"""Connections that a forwarder has made and the host has not accepted yet."""
CONNECT_S = 30.0
"""A connection of the container's that nobody here accepts for so long is broken."""
_CONNECT_PAUSE_S = 0.01
_PREFIX = "rollout-sockets-"


class Folders:
    """One provider's folders, below a temporary one that nobody else on this host may enter.

    Whoever is in a container may use the sockets of its own folder where that is mounted, by whatever user id the
    daemon gives it outside; nobody else gets to them. What a killed process left is removed by the next one.
    """

    def __init__(self) -> None:
        self._base: HeldFolder | None = None

    @property
    def are_open(self) -> bool:
        return self._base is not None

    def open(self) -> None:
        """Makes the temporary folder. Blocks: for a thread."""
        self._base = HeldFolder(_PREFIX)

    def make(self, name: str) -> Path | None:
        """The folder for the container of this name; None before `open` and after `close`."""
        if self._base is None:
            return None
        folder = self._base.path / name
        folder.mkdir(exist_ok=True)
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


def bound(path: Path) -> socket.socket:
    """A listening socket there, for whoever gets to it."""
    sock = socket.socket(socket.AF_UNIX)
    try:
        with _short(path) as name:
            sock.bind(name)
        path.chmod(0o666)
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


async def connected(path: Path) -> socket.socket:
    """A connection to it that does not block. Raises OSError, TimeoutError where nobody accepts within CONNECT_S."""
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.setblocking(False)
        async with asyncio.timeout(CONNECT_S):
            # The event loop cannot wait for this: a full backlog says EAGAIN, and never when there is room.
            while not _connects(sock, path):
                await asyncio.sleep(_CONNECT_PAUSE_S)
    except BaseException:
        sock.close()
        raise
    return sock


def _connects(sock: socket.socket, path: Path) -> bool:
    with _short(path) as name:
        try:
            sock.connect(name)
        except BlockingIOError:
            return False
    return True


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """By way of its folder's descriptor: a socket's name has room for 107 bytes."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
