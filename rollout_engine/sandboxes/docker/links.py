"""All connections of one container's forwarder: each goes on in a connection to a Unix socket of this host."""

from __future__ import annotations

import asyncio
import collections
from pathlib import Path

from rollout_engine.errors import SandboxError, describe
from rollout_engine.sandboxes.docker.link import Link
from rollout_engine.sandboxes.docker.linkframes import BREAKS, LINKS, OPENS, Frame, Frames, packed
from rollout_engine.sandboxes.docker.running import Talk
from rollout_engine.sandboxes.docker.unixsockets import connected


class Links:
    """Reads what the forwarder says at all times, so that it never waits to say it; each connection waits for itself.

    At most LINKS at once; more are broken at their start.
    """

    def __init__(self, talk: Talk, path: Path) -> None:
        self._talk, self._path = talk, path
        self._links: dict[int, Link] = {}
        self._turns: dict[int, Link] = {}  # those that may have something to say, in the order of their turns
        self._refused: collections.deque[int] = collections.deque()
        self._connecting: set[asyncio.Task[None]] = set()
        self._news = asyncio.Event()

    async def carry(self, said: bytes) -> None:
        """Until it is cancelled, or raises SandboxError at the forwarder's end: all connections end with it."""
        parts = [asyncio.ensure_future(self._hear(said)), asyncio.ensure_future(self._say())]
        try:
            await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            await next(part for part in parts if part.done())
        except (OSError, ValueError) as error:
            raise SandboxError(f"docker: the forwarder in the container is lost: {describe(error)}") from error
        finally:
            for task in (*parts, *self._connecting):
                task.cancel()
            for link in list(self._links.values()):
                link.cut()
            await asyncio.gather(*parts, *self._connecting, return_exceptions=True)

    async def _hear(self, said: bytes) -> None:
        frames = Frames()
        while True:
            for frame in frames.cut(said):
                self._take(frame)
            said = await self._talk.outlet.read()
            if not said:
                raise SandboxError("docker: the forwarder in the container has ended")

    def _take(self, frame: Frame) -> None:
        """Of a connection that is not known any more, nothing is taken: the forwarder could not know yet."""
        if frame.kind == OPENS:
            self._open(frame.number)
        elif (link := self._links.get(frame.number)) is not None:
            link.hear(frame)

    def _open(self, number: int) -> None:
        if number in self._links or len(self._refused) > LINKS:
            raise SandboxError("docker: the forwarder opens what it may not")
        if len(self._links) >= LINKS:
            self._refused.append(number)
            self._news.set()
            return
        link = self._links[number] = Link(number, self._ready, self._gone)
        task = asyncio.ensure_future(self._connect(link))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _connect(self, link: Link) -> None:
        try:
            sock = await connected(self._path)
            await asyncio.get_running_loop().create_unix_connection(lambda: link, sock=sock)
        except OSError as error:  # nobody listens, or accepts, here
            link.connection_lost(error)

    def _ready(self, link: Link) -> None:
        if link.number in self._links:
            self._turns[link.number] = link
            self._news.set()

    def _gone(self, link: Link) -> None:
        self._links.pop(link.number, None)

    async def _say(self) -> None:
        while True:
            self._news.clear()
            while (message := self._next()) is not None:
                await self._talk.write(message)
            await self._news.wait()

    def _next(self) -> bytes | None:
        if self._refused:
            return packed(BREAKS, self._refused.popleft())
        while self._turns:
            number = next(iter(self._turns))
            link = self._turns.pop(number)
            message = link.next()
            if message is not None:
                self._turns[number] = link
                return message
        return None
