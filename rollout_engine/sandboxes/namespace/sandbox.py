"""A live box, as the contract of sandboxes wants it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import posixpath
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout_engine.errors import ExecTimeout, SandboxDied, SandboxStartError
from rollout_engine.sandboxes.base import EVERYTHING, MAX_FILES, MAX_READ_BYTES, JobStatus, Listener, SandboxSpec
from rollout_engine.sandboxes.namespace import transfer
from rollout_engine.sandboxes.namespace.channel import Channel
from rollout_engine.sandboxes.namespace.command import Command
from rollout_engine.sandboxes.namespace.faults import End, raise_error
from rollout_engine.sandboxes.namespace.helper.files import MAX_INLINE
from rollout_engine.sandboxes.namespace.helper.programs import MODULES
from rollout_engine.sandboxes.namespace.helper.wire import Closed, Message
from rollout_engine.sandboxes.paired_stream import PairedStream, open_stream
from rollout_engine.types import ExecResult

if TYPE_CHECKING:
    from rollout_engine.sandboxes.namespace.process import LauncherProcess
    from rollout_engine.sandboxes.namespace.provider import NamespaceProvider

KILL_GRACE_S = 10.0
"""A box whose first process does not report a killed command within this time is ended itself."""


class NamespaceSandbox:
    """One box. Belongs to the event loop that opened it; `NamespaceProvider.open` makes it."""

    def __init__(
        self, provider: NamespaceProvider, launcher: LauncherProcess, box: str, spec: SandboxSpec, sock: socket.socket
    ) -> None:
        self._provider, self._launcher, self.box, self.spec = provider, launcher, box, spec
        self._workdir = posixpath.normpath(spec.workdir)
        self._ready: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.channel = Channel(sock, self._on_event, self._on_channel_end)
        self.limits_enforced = "none"
        self._jobs: dict[str, Command] = {}
        self._streams: set[PairedStream[Command]] = set()
        self._closing: asyncio.Task[None] | None = None
        self._end = End()

    @property
    def isolated(self) -> bool:
        return True

    @property
    def oom_kills(self) -> int | None:
        return self._end.oom_commands if "memory:cgroup" in self.limits_enforced else None

    async def wait_ready(self, timeout_s: float) -> None:
        """For the provider: until the box can be used. Raises SandboxStartError."""
        await asyncio.wait({self._ready}, timeout=timeout_s)
        if not self._ready.done():
            raise SandboxStartError(f"the box did not start within {timeout_s} s")
        said = self._ready.result()
        if "failed" in said:
            raise SandboxStartError(f"the box did not start: {said['failed']}")
        self.limits_enforced = str(said["limits"])

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        user: str | None = None,
    ) -> ExecResult:
        await self._check_its_end()
        return await self._finish(self._start(argv, stdin, cwd, env, user, keep=False), argv[0], timeout_s)

    @property
    def python_modules(self) -> frozenset[str] | None:
        return MODULES if self._launcher.facts["library"] else None

    async def run_python(self, program: bytes, *, stdin: bytes, timeout_s: float | None = None) -> ExecResult:
        """See RunsPython: a fork of the box's first process."""
        await self._check_its_end()
        command = self._start(["python"], stdin, None, None, None, keep=False, program=program)
        return await self._finish(command, "the program", timeout_s)

    async def _finish(self, command: Command, name: str, timeout_s: float | None) -> ExecResult:
        try:
            await asyncio.wait({command.ended}, timeout=timeout_s)
            if command.ended.done():
                return await self._outcome(command)
            await self._kill(command)
        except asyncio.CancelledError:
            command.abandon()
            raise
        raise ExecTimeout(f"{name} did not end within {timeout_s} s", command.partial())

    def _start(
        self, argv: Sequence[str], stdin: bytes | None, cwd: str | None, env: Mapping[str, str] | None,
        user: str | None, *, keep: bool, talk: int | None = None, program: bytes = b"",
    ) -> Command:  # fmt: skip
        self._check_alive()
        if not argv:
            raise ValueError("a command needs at least its program")
        where = None if cwd is None else self._path(cwd)
        variables = {**self.spec.env, **(env or {})}
        return Command(
            self.channel, argv, stdin=stdin, cwd=where, env=variables, user=user,
            on_oom=self._end.count, keep=keep, talk=talk, program=program,
        )  # fmt: skip

    async def _outcome(self, command: Command) -> ExecResult:
        try:
            return command.ended.result()
        except SandboxDied as error:
            raise await self._death() from error

    async def _check_its_end(self) -> None:
        if self.channel.closed and self._closing is None:
            raise await self._death()
        self._check_alive()

    async def _death(self) -> SandboxDied:
        """How the sandbox ended, once the launcher has said it: its own socket ends a moment before."""
        await asyncio.wait({self._ended}, timeout=KILL_GRACE_S)
        return self._end.error()

    async def _kill(self, command: Command) -> None:
        command.kill()
        await asyncio.wait({command.ended}, timeout=KILL_GRACE_S)
        if not command.ended.done() or self.channel.closed:
            self.channel.close()
            raise await self._death()

    # Files.

    async def read_file(self, path: str, *, max_bytes: int = MAX_READ_BYTES) -> bytes:
        async with self._asked({"op": "read", "path": self._path(path), "max_bytes": max_bytes}) as reply:
            if not reply.fds:
                return reply.blob
            return await transfer.read_descriptor(reply.fds[0], path, max_bytes)

    async def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        header = {"op": "write", "path": self._path(path), "mode": mode}
        if len(data) <= MAX_INLINE:
            async with self._asked(header, data):
                return
        with await transfer.as_file(data) as file:
            async with self._asked(header, b"", (file.fileno(),)):
                return

    async def upload(self, source: Path, path: str) -> None:
        self._check_alive()
        with await transfer.pack(source) as file:
            async with self._asked({"op": "unpack", "path": self._path(path)}, b"", (file.fileno(),)):
                return

    async def download(
        self, path: str, target: Path, *, max_bytes: int = MAX_READ_BYTES, max_files: int = MAX_FILES
    ) -> None:
        read_end, write_end = os.pipe2(os.O_CLOEXEC)
        try:
            header = {"op": "pack", "path": self._path(path), "max_bytes": max_bytes, "max_files": max_files}
            asked = self._asked(header, b"", (write_end,))
            reader = asyncio.create_task(
                asyncio.to_thread(transfer.unpack_pipe, read_end, target, max_bytes, max_files)
            )
        except BaseException:
            os.close(read_end)
            os.close(write_end)
            raise
        try:
            async with asked:
                os.close(write_end)
                write_end = -1
                await asyncio.shield(reader)
        finally:
            if write_end >= 0:
                os.close(write_end)
            with contextlib.suppress(OSError, ValueError):
                await asyncio.shield(reader)

    @contextlib.asynccontextmanager
    async def _asked(
        self, header: dict[str, Any], blob: bytes = b"", fds: tuple[int, ...] = ()
    ) -> AsyncIterator[Message]:
        """A request of the box's first process, with what may go wrong as the contract names it."""
        await self._check_its_end()
        path = str(header.get("path", ""))
        if "\0" in path:
            raise FileNotFoundError(errno.ENOENT, "a path with a null byte", path)
        try:
            reply = await self.channel.ask(header, blob, fds)
        except Closed:
            raise await self._death() from None
        try:
            raise_error(reply.header, path)
            yield reply
        finally:
            reply.drop()

    # Background jobs.

    async def start(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> str:
        job = f"job-{len(self._jobs) + 1}"
        self._jobs[job] = self._start(argv, None, cwd, env, user, keep=True)
        return job

    async def poll(self, job: str, *, wait_s: float = 0.0) -> JobStatus:
        await self._check_its_end()
        command = self._jobs[job]
        if wait_s > 0 and not command.ended.done():
            await asyncio.wait({command.ended}, timeout=wait_s)
            await self._check_its_end()
        return self._status(command)

    def _status(self, command: Command) -> JobStatus:
        self._check_alive()
        if command.ended.done():
            try:
                result = command.ended.result()
            except SandboxDied as error:
                raise self._end.error() from error
            return JobStatus(result.exit_code, result.stdout, result.stderr)
        partial = command.partial()
        return JobStatus(None, partial.stdout, partial.stderr)

    async def stop(self, job: str) -> None:
        self._check_alive()
        await self._kill(self._jobs[job])

    async def connect(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> PairedStream[Command]:
        stream = await open_stream(
            lambda end: self._start(argv, None, cwd, env, user, keep=True, talk=end), self._status, self._end_stream
        )
        self._streams.add(stream)
        return stream

    async def _end_stream(self, stream: PairedStream[Command]) -> None:
        self._streams.discard(stream)
        with contextlib.suppress(SandboxDied):
            self._check_alive()
            await self._kill(stream.program)

    # Handing over.

    async def quiesce(self, keep: Sequence[str] = ()) -> None:
        numbers = [self._jobs[job].number for job in keep]
        async with self._asked({"op": "quiesce", "keep": numbers}):
            pass

    async def export(self, paths: Sequence[str], *, name: str | None = None) -> str:
        """The provider keeps the layer until `release`, or until too many are newer."""
        async with self._asked({"op": "freeze"}):
            pass
        wanted = [path if path == EVERYTHING else posixpath.normpath(self._path(path)) for path in paths]
        layer = await self._provider.export(self._launcher, self.box, wanted, name)
        await self.close()
        return layer

    # Network.

    async def listen(self, port: int = 0) -> Listener:
        async with self._asked({"op": "listen", "port": port}) as reply:
            sock = socket.socket(fileno=reply.fds.pop())
            return Listener(sock, int(sock.getsockname()[1]))

    # End.

    async def close(self) -> None:
        if self._closing is None:
            self._end.why = "the sandbox is closed"
            self._closing = asyncio.get_running_loop().create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        if self._launcher.channel.closed:
            self.on_ended({})
        else:
            self._launcher.channel.send({"op": "destroy", "box": self.box, "id": 0})
        self.channel.close()
        for command in (*self._jobs.values(), *(stream.program for stream in self._streams)):
            command.abandon()
        await asyncio.gather(*(stream.cut() for stream in self._streams))
        await asyncio.wait({self._ended}, timeout=KILL_GRACE_S)
        self._provider.forget(self)

    def on_ended(self, header: dict[str, Any]) -> None:
        """For the provider: the launcher has seen the end of the box, or is gone itself."""
        if self._closing is None:
            self._end.learn(int(header.get("oom", 0)))
        if "error" in header and not self._ready.done():
            self._ready.set_result({"failed": header["error"]})
        if not self._ended.done():
            self._ended.set_result(None)
        self.channel.close()

    def _check_alive(self) -> None:
        if self.channel.closed or self._closing is not None:
            raise self._end.error()

    def _path(self, path: str) -> str:
        return posixpath.join(self._workdir, path)

    def _on_event(self, message: Message) -> None:
        message.drop()
        if not self._ready.done():
            self._ready.set_result(message.header)

    def _on_channel_end(self) -> None:
        if not self._ready.done():
            self._ready.set_result({"failed": "its first process ended"})
