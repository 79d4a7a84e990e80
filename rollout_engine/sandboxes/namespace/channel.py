"""The event loop's side of a message socket: requests and their replies, matched by number."""

from __future__ import annotations

import asyncio
import collections
import os
import socket
from collections.abc import Callable
from typing import Any

from rollout_engine.sandboxes.namespace.helper import wire
from rollout_engine.sandboxes.namespace.helper.wire import Closed, Message

_PER_WAKE = 64
"""Messages taken at once, before other callbacks get their turn."""


class Channel:
    """One socket. `on_event` gets what is no reply; `on_close` is called once, when the other side is gone."""

    def __init__(self, sock: socket.socket, on_event: Callable[[Message], None], on_close: Callable[[], None]) -> None:
        sock.setblocking(False)
        self._sock, self._on_event, self._on_close = sock, on_event, on_close
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[int, asyncio.Future[Message]] = {}
        self._queue: collections.deque[tuple[dict[str, Any], bytes, list[int]]] = collections.deque()
        self._next = 0
        self.closed = False
        self._loop.add_reader(sock.fileno(), self._readable)

    def request(self, header: dict[str, Any], blob: bytes = b"", fds: tuple[int, ...] = ()) -> asyncio.Future[Message]:
        """Sends a request; its future has the reply, or raises Closed. The caller keeps its descriptors."""
        self._next += 1
        future: asyncio.Future[Message] = self._loop.create_future()
        self._waiting[self._next] = future
        self.send({"id": self._next, **header}, blob, fds)
        return future

    async def ask(self, header: dict[str, Any], blob: bytes = b"", fds: tuple[int, ...] = ()) -> Message:
        """A request and its reply. Where the caller is cancelled as the reply comes, its descriptors are closed."""
        future = self.request(header, blob, fds)
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                future.result().drop()
            raise

    @property
    def last(self) -> int:
        """The number of the latest request."""
        return self._next

    def send(self, header: dict[str, Any], blob: bytes = b"", fds: tuple[int, ...] = ()) -> None:
        """Sends, or queues where the socket is full. What cannot be sent any more is dropped."""
        if self.closed:
            self._fail_waiting()
            return
        if self._queue:
            self._queue.append((header, blob, [os.dup(fd) for fd in fds]))
            return
        try:
            wire.order(self._sock, header, blob, fds)
        except BlockingIOError:
            self._queue.append((header, blob, [os.dup(fd) for fd in fds]))
            self._loop.add_writer(self._sock.fileno(), self._writable)
        except Closed:
            self.close()

    def _writable(self) -> None:
        while self._queue:
            header, blob, fds = self._queue[0]
            try:
                wire.order(self._sock, header, blob, tuple(fds))
            except BlockingIOError:
                return
            except Closed:
                self.close()
                return
            self._queue.popleft()
            for fd in fds:
                os.close(fd)
        self._loop.remove_writer(self._sock.fileno())

    def _readable(self) -> None:
        for _ in range(_PER_WAKE):
            if self.closed:
                return
            try:
                self._dispatch(wire.receive(self._sock))
            except BlockingIOError:
                return
            except (Closed, wire.BadMessage):
                self.close()

    def _dispatch(self, message: Message) -> None:
        number = message.header.get("id")
        if number is None:
            self._on_event(message)
            return
        future = self._waiting.pop(number, None)
        if future is None or future.done():
            message.drop()
        else:
            future.set_result(message)

    def _fail_waiting(self) -> None:
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(Closed())
                future.exception()  # a caller that was cancelled does not come for it
        self._waiting.clear()

    def close(self) -> None:
        """Closes the socket, which ends a box; whoever waits for a reply gets Closed."""
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        self._sock.close()
        for _, _, fds in self._queue:
            for fd in fds:
                os.close(fd)
        self._queue.clear()
        self._fail_waiting()
        self._on_close()
