"""Commands by a supervisor that is the container's first process: exact, and a tenth of the price of an exec.

It is reached over the daemon's attach stream, so it needs no port, no file of the image and no daemon on this
machine, and every command has the container's own confinement. When the stream ends (this process died), so does the
container.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import struct
from collections.abc import Awaitable, Callable, Mapping

from docker import APIClient
from docker.errors import APIError, NotFound

from rollout_engine.errors import SandboxError, SandboxStartError
from rollout_engine.sandboxes.docker import files
from rollout_engine.sandboxes.docker.capture import Tail
from rollout_engine.sandboxes.docker.engine import Engine
from rollout_engine.sandboxes.docker.failures import died, translate
from rollout_engine.sandboxes.docker.hijack import STDOUT, Hijacked
from rollout_engine.sandboxes.docker.running import Command, Ending, Running
from rollout_engine.sandboxes.files import plain_errors

_RUN, _KILL = 1, 2
_HELLO, _OUT, _ERR, _EXIT, _FAIL = range(5)
_STAGE_USER, _STAGE_CWD, _STAGE_EXEC = 1, 2, 3
_HEAD = struct.Struct("=IBI")
_COUNTS = struct.Struct("=IIB")
_ENDING = struct.Struct("=iBi")
_GROUP = struct.Struct("=i")
_FAILURE = struct.Struct("=Bi")
_SLICE_BYTES = 256 * 1024
_HELLO_S = 60.0
_BUILT_IN_S = 120.0
_KILL_S = 5.0
_NAME_CHARS = 500
MAX_INPUT_BYTES = 64 * 2**20
"""More than this goes by the archive API: the supervisor holds an input in the sandbox's own memory."""


class SupervisedExecutor:
    """One container's supervisor. `open` attaches, lets the caller start the container, and waits for its hello."""

    def __init__(self, engine: Engine, stream: Hijacked, container: str, name: str, user: str, env: Mapping[str, str]):
        self._engine, self._stream, self._container, self._name = engine, stream, container, name
        self._user, self._env = user, dict(env)
        self._commands: dict[int, _Supervised] = {}
        self._ids = itertools.count(1)
        self._hello: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lost: SandboxError | None = None
        self._outbox: asyncio.Queue[bytes] = asyncio.Queue()
        self._tasks = asyncio.create_task(self._listen()), asyncio.create_task(self._talk())

    @classmethod
    async def open(
        cls,
        engine: Engine,
        container: str,
        name: str,
        *,
        user: str,
        env: Mapping[str, str],
        start: Callable[[], Awaitable[None]],
    ) -> SupervisedExecutor:
        stream = await engine.hijack(f"/containers/{container}/attach?stream=1&stdin=1&stdout=1&stderr=1")
        made = cls(engine, stream, container, name, user, env)
        try:
            await start()
            async with asyncio.timeout(_HELLO_S):
                await asyncio.shield(made._hello)
        except TimeoutError as error:
            await made.close()
            raise SandboxStartError(f"docker: {name}: its first process said nothing in {_HELLO_S:g} s") from error
        except BaseException:
            await made.close()
            raise
        return made

    async def spawn(self, command: Command) -> Running:
        env = {**self._env, **command.env}
        argv = [os.fsencode(part) for part in command.argv]
        return self._order(argv, command.cwd, env, command.user or self._user, command.stdin, Tail())

    async def read(self, path: str, max_bytes: int) -> bytes:
        running = self._built_in([b"\x01get", os.fsencode(path), b"%d" % max_bytes], None, Tail(max_bytes + 1))
        if not await self._served(running, path, max_bytes):
            return await self._archive("read", lambda api: files.read(api, self._container, path, max_bytes))
        return running.stdout.value()

    async def write(self, path: str, data: bytes, mode: int) -> bool:
        if len(data) > MAX_INPUT_BYTES:
            return False
        running = self._built_in([b"\x01put", os.fsencode(path), b"%o" % mode], data, Tail())
        return await self._served(running, path, 0)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._stream.close()
        self._end(died(self._name, "it was closed"))

    def kill(self, number: int, group: int = 0) -> None:
        """Kills a command's group; `group` names it where the command itself has ended."""
        if self._lost is None:
            self._send(_KILL, number, _GROUP.pack(group))

    def _built_in(self, argv: list[bytes], stdin: bytes | None, stdout: Tail) -> _Supervised:
        return self._order(argv, "/", {}, self._user, stdin, stdout)

    async def _archive(self, what: str, function: Callable[[APIClient], bytes]) -> bytes:
        try:
            return await self._engine.call(what, function)
        except NotFound as error:
            raise died(self._name) from error
        except APIError as error:
            raise translate(error, what) from error

    async def _served(self, running: _Supervised, path: str, max_bytes: int) -> bool:
        """A built-in ends with an errno. False: no process is left for it, so the archive API must do."""
        try:
            async with asyncio.timeout(_BUILT_IN_S):
                code = (await running.wait()).exit_code
        except TimeoutError as error:
            await running.kill()
            raise SandboxError(f"docker: {self._name}: {path} was not read or written in {_BUILT_IN_S:g} s") from error
        if running.refused:
            return False
        if code == errno.EFBIG and max_bytes:
            raise ValueError(f"{path} has more than the {max_bytes} bytes allowed")
        with plain_errors(path):
            if code:
                raise OSError(code, os.strerror(code) if code > 0 else "killed while it was read or written", path)
        return True

    def _order(
        self, argv: list[bytes], cwd: str, env: Mapping[str, str], user: str, stdin: bytes | None, stdout: Tail
    ) -> _Supervised:
        if self._lost is not None:
            raise self._lost
        settings = [os.fsencode(f"{name}={value}") for name, value in env.items()]
        parts = [os.fsencode(user), os.fsencode(cwd), *argv, *settings]
        number = next(self._ids)
        running = _Supervised(self, number, stdout, (os.fsdecode(argv[0]), cwd, user))
        if any(b"\0" in part for part in parts):
            running.cannot_start(_STAGE_EXEC, errno.EINVAL)
            return running
        self._commands[number] = running
        counts = _COUNTS.pack(len(argv), len(settings), stdin is not None)
        self._send(_RUN, number, counts + b"\0".join(parts) + b"\0", stdin or b"")
        return running

    def _send(self, kind: int, number: int, payload: bytes, more: bytes = b"") -> None:
        """Puts a message in line; a cancelled caller can then not leave half of one on the wire."""
        size = _HEAD.size - 4 + len(payload) + len(more)
        self._outbox.put_nowait(_HEAD.pack(size, kind, number) + payload)
        if more:
            self._outbox.put_nowait(more)

    async def _talk(self) -> None:
        while True:
            data = memoryview(await self._outbox.get())
            for start in range(0, len(data), _SLICE_BYTES):
                await self._stream.send(data[start : start + _SLICE_BYTES])

    async def _listen(self) -> None:
        held = bytearray()
        while (frame := await self._stream.frame()) is not None:
            stream, data = frame
            if stream != STDOUT:
                continue
            held += data
            at = 0
            while len(held) - at >= _HEAD.size:
                rest, kind, number = _HEAD.unpack_from(held, at)
                if len(held) - at - 4 < rest:
                    break
                self._hear(kind, number, bytes(held[at + _HEAD.size : at + 4 + rest]))
                at += 4 + rest
            del held[:at]
        self._end(await self._why())

    def _hear(self, kind: int, number: int, payload: bytes) -> None:
        if kind == _HELLO and not self._hello.done():
            self._hello.set_result(None)
        running = self._commands.get(number)
        if running is None:
            return
        if kind in (_OUT, _ERR):
            (running.stdout if kind == _OUT else running.stderr).append(payload)
            return
        del self._commands[number]
        if kind == _EXIT:
            code, oom, group = _ENDING.unpack(payload)
            running.finish(Ending(code, bool(oom)), group)
        elif kind == _FAIL:
            running.cannot_start(*_FAILURE.unpack(payload))

    async def _why(self) -> SandboxError:
        """The stream ended: the container did, or the daemon."""
        try:
            found = await self._engine.ask(
                "inspect", lambda api: api.containers(all=True, filters={"id": self._container})
            )
        except SandboxError as error:
            return error
        return died(self._name, found[0]["Status"] if found else "its container is gone")

    def _end(self, why: SandboxError) -> None:
        self._lost = self._lost or why
        if not self._hello.done():
            self._hello.set_exception(self._lost)
            self._hello.exception()
        for running in self._commands.values():
            running.lose(self._lost)
        self._commands.clear()


class _Supervised:
    """A command under way at a supervisor."""

    def __init__(self, executor: SupervisedExecutor, number: int, stdout: Tail, names: tuple[str, str, str]) -> None:
        self.stdout, self.stderr = stdout, Tail()
        self._executor, self._number, self._names = executor, number, names
        self._group = 0
        self.refused = False
        self._done: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()

    async def wait(self) -> Ending:
        return await asyncio.shield(self._done)

    def ending(self) -> Ending | None:
        return self._done.result() if self._done.done() else None

    async def kill(self) -> None:
        if not self._done.done():
            self._executor.kill(self._number)
            await asyncio.wait([self._done], timeout=_KILL_S)
        elif self._group:
            self._executor.kill(self._number, self._group)

    def finish(self, ending: Ending, group: int = 0) -> None:
        self._group = group
        if not self._done.done():
            self._done.set_result(ending)

    def cannot_start(self, stage: int, error: int) -> None:
        """A result, as in a shell: 127 for a program that is not there, else 126."""
        self.refused = True
        program, cwd, user = self._names
        what = {_STAGE_CWD: f"working directory {cwd}", _STAGE_USER: f"user {user}"}.get(stage, program)
        self.stderr.append(os.fsencode(f"cannot run: {what[:_NAME_CHARS]}: {os.strerror(error)}\n"))
        self.finish(Ending(127 if (stage, error) == (_STAGE_EXEC, errno.ENOENT) else 126))

    def lose(self, why: Exception) -> None:
        if not self._done.done():
            self._done.set_exception(why)
            self._done.exception()
