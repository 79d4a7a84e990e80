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
from collections.abc import Awaitable, Callable, Mapping, Sequence

from docker import APIClient
from docker.errors import APIError, NotFound

from rollout_engine.errors import SandboxError, SandboxStartError, TooLarge
from rollout_engine.sandboxes.docker import files
from rollout_engine.sandboxes.docker.capture import Tail
from rollout_engine.sandboxes.docker.endings import why_ended
from rollout_engine.sandboxes.docker.engine import Engine
from rollout_engine.sandboxes.docker.failures import died, translate
from rollout_engine.sandboxes.docker.hijack import STDOUT, Hijacked
from rollout_engine.sandboxes.docker.running import Command, Ending, Running, Talk
from rollout_engine.sandboxes.docker.supervised_command import STAGE_EXEC, Supervised, SupervisedTalk
from rollout_engine.sandboxes.files import plain_errors

_RUN, _KILL, _FEED, _GRANT, _QUIESCE = range(1, 6)
_HELLO, _OUT, _ERR, _EXIT, _FAIL, _TAKEN, _SHUT, _QUIET = range(8)
_NO_INPUT, _ALL_INPUT, _TALKS = range(3)
_HEAD = struct.Struct("=IBI")
_COUNTS = struct.Struct("=IIB")
_ENDING = struct.Struct("=iBi")
_GROUP = struct.Struct("=i")
_NUMBER = struct.Struct("=I")
_FAILURE = struct.Struct("=Bi")
_SLICE_BYTES = 256 * 1024
_HELLO_S = 60.0
_BUILT_IN_S = 120.0
_QUIESCE_S = 30.0
MAX_INPUT_BYTES = 64 * 2**20
_INPUT_SHARE = 8
"""A file larger than this, or than one part in so many of the sandbox's memory, goes by the archive API: the supervisor
holds what it writes in that memory, and shall not be what goes beyond its limit."""


class SupervisedExecutor:
    """One container's supervisor. `open` attaches, lets the caller start the container, and waits for its hello."""

    def __init__(
        self,
        engine: Engine,
        stream: Hijacked,
        container: str,
        name: str,
        user: str,
        env: Mapping[str, str],
        memory: int,
    ) -> None:
        self._engine, self._stream, self._container, self._name = engine, stream, container, name
        self._user, self._env = user, dict(env)
        self._max_input = min(MAX_INPUT_BYTES, memory // _INPUT_SHARE)
        self._commands: dict[int, Supervised] = {}
        self._quiets: dict[int, asyncio.Future[int]] = {}
        self._ids = itertools.count(1)
        self._hello: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._lost: SandboxError | None = None
        self.oom_kills = 0
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
        memory: int,
        start: Callable[[], Awaitable[None]],
    ) -> SupervisedExecutor:
        stream = await engine.hijack(f"/containers/{container}/attach?stream=1&stdin=1&stdout=1&stderr=1")
        made = cls(engine, stream, container, name, user, env, memory)
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
        running = Supervised(self, next(self._ids), self._names(command))
        self._order(running, command, _NO_INPUT if command.stdin is None else _ALL_INPUT)
        return running

    async def connect(self, command: Command) -> Talk:
        talk = SupervisedTalk(self, next(self._ids), self._names(command))
        self._order(talk, command, _TALKS)
        return talk

    async def read(self, path: str, max_bytes: int) -> bytes:
        running = self._built_in(["\x01get", path, str(max_bytes)], None, stdout=Tail(max_bytes + 1))
        if not await self._served(running, path, max_bytes):
            return await self._archive("read", lambda api: files.read(api, self._container, path, max_bytes))
        return running.stdout.value()

    async def write(self, path: str, data: bytes, mode: int) -> bool:
        if len(data) > self._max_input:
            return False
        return await self._served(self._built_in(["\x01put", path, f"{mode:o}"], data), path, 0)

    async def cut(self, paths: Sequence[str]) -> None:
        """Removes whatever is at these paths."""
        listed = b"".join(os.fsencode(path) + b"\0" for path in paths)
        if not await self._served(self._built_in(["\x01cut"], listed, user="0"), "its layers' paths", 0):
            raise SandboxStartError(f"docker: {self._name}: no process could be started in it")

    async def quiesce(self, keep: Sequence[Running]) -> None:
        self._check()
        kept = {id(running) for running in keep}
        numbers = [number for number, running in self._commands.items() if id(running) in kept]
        if keep and not numbers:
            numbers = [0]  # those to keep have ended: there is nobody to keep
        asked = next(self._ids)
        self._quiets[asked] = asyncio.get_running_loop().create_future()
        self._send(_QUIESCE, asked, b"".join(map(_NUMBER.pack, numbers)))
        try:
            async with asyncio.timeout(_QUIESCE_S):
                left = await self._quiets[asked]
        except TimeoutError as error:
            raise SandboxError(f"docker: {self._name}: its supervisor did not answer") from error
        finally:
            del self._quiets[asked]
        if left:
            raise SandboxError(f"docker: {self._name}: {left} processes could not be ended")

    async def freeze(self) -> None:
        """Ends whatever runs, so that the files stay as they are."""
        await self.quiesce([])

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._stream.close()
        self._end(died(self._name, "it was closed"))

    def kill(self, number: int, group: int = 0) -> None:
        """Kills a command's group; `group` names it where the command itself has ended."""
        if self._lost is None:
            self._send(_KILL, number, _GROUP.pack(group))

    def feed(self, number: int, data: bytes) -> None:
        self._send(_FEED, number, data)

    def grant(self, number: int, count: int) -> None:
        if self._lost is None:
            self._send(_GRANT, number, _NUMBER.pack(count))

    def forget(self, number: int) -> None:
        self._commands.pop(number, None)

    def _built_in(
        self, argv: list[str], stdin: bytes | None, *, stdout: Tail | None = None, user: str = ""
    ) -> Supervised:
        command = Command(argv, "/", user=user, stdin=stdin)
        running = Supervised(self, next(self._ids), self._names(command), stdout)
        self._order(running, command, _NO_INPUT if stdin is None else _ALL_INPUT, env={})
        return running

    def _names(self, command: Command) -> tuple[str, str, str]:
        return command.argv[0], command.cwd, command.user or self._user

    async def _archive(self, what: str, function: Callable[[APIClient], bytes]) -> bytes:
        try:
            return await self._engine.call(what, function)
        except NotFound as error:
            raise died(self._name) from error
        except APIError as error:
            raise translate(error, what) from error

    async def _served(self, running: Supervised, path: str, max_bytes: int) -> bool:
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
            raise TooLarge(f"{path} has more than the {max_bytes} bytes allowed")
        with plain_errors(path):
            if code:
                raise OSError(code, os.strerror(code) if code > 0 else "killed while it was read or written", path)
        return True

    def _order(
        self, running: Supervised, command: Command, input_kind: int, env: Mapping[str, str] | None = None
    ) -> None:
        self._check()
        variables = {**self._env, **command.env} if env is None else env
        settings = [os.fsencode(f"{name}={value}") for name, value in variables.items()]
        places = [os.fsencode(command.user or self._user), os.fsencode(command.cwd)]
        parts = [*places, *(os.fsencode(part) for part in command.argv), *settings]
        if any(b"\0" in part for part in parts):
            running.cannot_start(STAGE_EXEC, errno.EINVAL)
            return
        self._commands[running.number] = running
        counts = _COUNTS.pack(len(command.argv), len(settings), input_kind)
        self._send(_RUN, running.number, counts + b"\0".join(parts) + b"\0", command.stdin or b"")

    def _check(self) -> None:
        if self._lost is not None:
            raise self._lost

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
        self._end(await why_ended(self._engine, self._container, self._name))

    def _hear(self, kind: int, number: int, payload: bytes) -> None:
        if kind == _HELLO and not self._hello.done():
            self._hello.set_result(None)
        if kind == _QUIET and (quiet := self._quiets.get(number)) is not None and not quiet.done():
            quiet.set_result(_NUMBER.unpack(payload)[0])
        running = self._commands.get(number)
        if running is None:
            return
        if kind == _OUT:
            running.output(payload)
        elif kind == _ERR:
            running.stderr.append(payload)
        elif kind == _EXIT:
            code, oom, group = _ENDING.unpack(payload)
            self.oom_kills += oom
            running.finish(Ending(code, bool(oom)), group)
        elif kind == _FAIL:
            running.cannot_start(*_FAILURE.unpack(payload))
        elif isinstance(running, SupervisedTalk):
            self._hear_talk(kind, running, payload)
        if running.over:
            running.leave()
            self.forget(number)

    def _hear_talk(self, kind: int, talk: SupervisedTalk, payload: bytes) -> None:
        if kind == _TAKEN:
            talk.taken(payload)
        elif kind == _SHUT:
            talk.shut()

    def _end(self, why: SandboxError) -> None:
        self._lost = self._lost or why
        if not self._hello.done():
            self._hello.set_exception(self._lost)
            self._hello.exception()
        for running in self._commands.values():
            running.lose(self._lost)
        self._commands.clear()
        for quiet in self._quiets.values():
            if not quiet.done():
                quiet.set_exception(self._lost)
