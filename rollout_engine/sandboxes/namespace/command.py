"""A command that runs in a box: its pipes, the tails of its output, and its end."""

from __future__ import annotations

import asyncio
import collections
import errno
import fcntl
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollout_engine.errors import SandboxDied, SandboxUnavailable
from rollout_engine.sandboxes.base import MAX_OUTPUT_BYTES
from rollout_engine.sandboxes.namespace.channel import Channel
from rollout_engine.sandboxes.namespace.helper.wire import Closed, Message
from rollout_engine.types import ExecResult

_CHUNK = 2**16
_PER_WAKE = 8
_LAST_DRAIN = 2**20
"""No pipe holds more; what lies in it when the command ends was written before."""
_PACE_S = 0.01
"""Pause between reads once a stream is over its cap: an endless one shall not eat the host."""


class Tail:
    """The last bytes of a stream."""

    def __init__(self, cap: int = MAX_OUTPUT_BYTES) -> None:
        self._chunks: collections.deque[bytes] = collections.deque()
        self._size, self._cap = 0, cap
        self.truncated = False

    def add(self, chunk: bytes) -> None:
        self._chunks.append(chunk)
        self._size += len(chunk)
        while self._size - len(self._chunks[0]) >= self._cap:
            self._size -= len(self._chunks.popleft())
            self.truncated = True

    def bytes(self) -> bytes:
        joined = b"".join(self._chunks)
        self.truncated = self.truncated or len(joined) > self._cap
        return joined[-self._cap :]


class _Stream:
    """The reading end of a command's output."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self.tail = loop, Tail()
        self.fd, self.write_end = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self.fd, False)
        self.open = True
        self._pause: asyncio.TimerHandle | None = None
        loop.add_reader(self.fd, self._readable)

    def _readable(self) -> None:
        if self.read(_PER_WAKE * _CHUNK) and self.tail.truncated:
            self._loop.remove_reader(self.fd)
            self._pause = self._loop.call_later(_PACE_S, self._go_on)

    def _go_on(self) -> None:
        self._pause = None
        self._loop.add_reader(self.fd, self._readable)

    def read(self, most: int) -> bool:
        """Takes what is there; says whether there may be more to come."""
        while self.open and most > 0:
            try:
                chunk = os.read(self.fd, _CHUNK)
            except BlockingIOError:
                return True
            if not chunk:
                self.close()
                return False
            self.tail.add(chunk)
            most -= len(chunk)
        return self.open

    def close(self) -> None:
        if self.open:
            self.open = False
            self.stop_reading()
            os.close(self.fd)

    def stop_reading(self) -> None:
        self._loop.remove_reader(self.fd)
        if self._pause is not None:
            self._pause.cancel()


class Command:
    """One command. `ended` resolves to its result however it ends, or raises SandboxDied or SandboxUnavailable."""

    def __init__(
        self, channel: Channel, argv: Sequence[str], *, stdin: bytes | None, cwd: str | None,
        env: Mapping[str, str], user: str | None, on_oom: Callable[[int], None], keep: bool = False,
        talk: int | None = None, program: bytes = b"",
    ) -> None:  # fmt: skip
        """`on_oom` hears how often the kernel killed for memory since the end of the command before.

        `talk`: a descriptor that becomes its standard input and output; the caller closes it. `program`: marshalled
        Python that a fork of the box's first process runs; `argv` then only names it.
        """
        loop = asyncio.get_running_loop()
        self._channel, self._argv, self._cwd, self._keep = channel, list(argv), cwd, keep
        self.ended: asyncio.Future[ExecResult] = loop.create_future()
        self._on_oom = on_oom
        self._started = loop.time()
        self.stdout, self.stderr = _Stream(loop), _Stream(loop)
        source = _stdin(stdin)
        fds = (source, self.stdout.write_end, self.stderr.write_end)
        passed = fds if talk is None else (talk, talk, self.stderr.write_end)
        header = {"op": "exec", "argv": self._argv, "cwd": cwd, "env": dict(env), "user": user, "keep": keep}
        try:
            reply = channel.request(header, program, passed)
        finally:
            for fd in fds:
                os.close(fd)
        self.number = channel.last
        reply.add_done_callback(self._on_reply)

    def kill(self) -> None:
        """Kills the command's process group; `ended` follows."""
        if self._keep or not self.ended.done():
            self._channel.send({"op": "kill", "job": self.number, "id": 0})

    def abandon(self) -> None:
        """For a caller that will not wait: kills, and forgets the output."""
        self.kill()
        self.stdout.close()
        self.stderr.close()

    def output(self) -> dict[str, Any]:
        """The output so far, as a result's fields."""
        fields: dict[str, Any] = {"stdout": self.stdout.tail.bytes(), "stderr": self.stderr.tail.bytes()}
        return {**fields, "truncated": self.stdout.tail.truncated or self.stderr.tail.truncated}

    def partial(self) -> ExecResult:
        """What there is of a command that was killed, or is still running."""
        oom = self.ended.done() and self.ended.exception() is None and self.ended.result().oom
        return ExecResult(-9, **self.output(), oom=oom, duration_s=asyncio.get_running_loop().time() - self._started)

    def _on_reply(self, reply: asyncio.Future[Message]) -> None:
        self._finish_output()
        try:
            header = reply.result().header
            result = self._result(header)
        except (Closed, asyncio.CancelledError):
            self._fail(SandboxDied("the sandbox ended while a command ran in it"))
        except SandboxUnavailable as error:
            self._fail(error)
        else:
            if not self.ended.done():
                self.ended.set_result(result)

    def _fail(self, error: Exception) -> None:
        if not self.ended.done():
            self.ended.set_exception(error)
            self.ended.exception()

    def _result(self, header: dict[str, Any]) -> ExecResult:
        if header.get("error") == "user":
            raise SandboxUnavailable(str(header["text"]))
        if "error" in header:
            return ExecResult(126, stderr=os.fsencode(f"{self._argv[0]}: {header['text']}\n"))
        if "errno" in header:
            return self._not_started(header)
        if header["oom"]:
            self._on_oom(int(header["oom"]))
        return ExecResult(
            int(header["code"]), **self.output(), oom=bool(header["oom"]), duration_s=float(header["seconds"])
        )

    def _not_started(self, header: dict[str, Any]) -> ExecResult:
        """As a shell says it: 127 where there is no such program, 126 where it cannot be run."""
        at = header.get("at") or self._argv[0]
        code = 127 if header["errno"] == errno.ENOENT and at != self._cwd else 126
        text = os.fsencode(f"{at}: {header['text']}\n")
        return ExecResult(code, stderr=text, crowded=header["errno"] == errno.EAGAIN)

    def _finish_output(self) -> None:
        """Takes the last of it. Where a child of the command still holds the pipe, the box goes on emptying it."""
        held = [stream for stream in (self.stdout, self.stderr) if stream.open and stream.read(_LAST_DRAIN)]
        if held and not self._channel.closed:
            self._channel.send({"op": "sink", "id": 0}, b"", tuple(stream.fd for stream in held))
        for stream in held:
            stream.close()


def _stdin(data: bytes | None) -> int:
    """A descriptor to read the input from: no writer is needed, however slowly it is read."""
    if not data:
        return os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
    if len(data) <= _CHUNK:
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        os.write(write_end, data)
        os.close(write_end)
        return read_end
    file = os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]
    os.lseek(file, 0, os.SEEK_SET)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    return file
