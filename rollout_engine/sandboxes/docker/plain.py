"""Commands by the Engine's own exec: works with every daemon, needs `/bin/sh` in the image.

What the Engine cannot tell: an exit code of 128 + n from a signal n. Where a background child holds the output
open, it reports the end two seconds late. A command that kills everything ends the sandbox.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
from collections.abc import Callable
from typing import Any, TypeVar

from docker import APIClient
from docker.errors import APIError, NotFound

from rollout_engine.sandboxes.docker import files
from rollout_engine.sandboxes.docker.capture import Tail
from rollout_engine.sandboxes.docker.engine import Engine
from rollout_engine.sandboxes.docker.failures import died, translate
from rollout_engine.sandboxes.docker.hijack import STDERR, Hijacked, HijackRefused
from rollout_engine.sandboxes.docker.running import Command, Ending, Running, exit_code

T = TypeVar("T")

# The first line of stderr is the pid inside, which the API does not tell and a kill needs; exec keeps it.
_HEADED = ["/bin/sh", "-c", 'echo $$ >&2; exec "$@"', "sh"]
_INSPECT_PAUSES_S = (0.005, 0.02, 0.05, 0.1, 0.2)
_OOM_COUNTS = "echo ran; cat /sys/fs/cgroup/memory.events /sys/fs/cgroup/memory/memory.oom_control 2>/dev/null"
_KILL_S = 10.0


class PlainExecutor:
    """Runs each command by exec create, start and inspect."""

    def __init__(self, engine: Engine, container: str, name: str, user: str) -> None:
        self._engine, self._container, self.name, self._user = engine, container, name, user
        self._oom_kills = 0

    async def spawn(self, command: Command) -> Running:
        if any("\0" in part for part in command.argv):
            return _Refused("an argument with a null byte")
        exec_id = await self._create([*_HEADED, *command.argv], command)
        stream = await self._start(exec_id)
        running = _PlainRunning(self, exec_id, stream)
        if command.stdin is not None:
            running.feed(command.stdin)
        return running

    async def read(self, path: str, max_bytes: int) -> bytes:
        return await self._call("read", lambda api: files.read(api, self._container, path, max_bytes))

    async def write(self, path: str, data: bytes, mode: int) -> bool:
        return False

    async def close(self) -> None:
        """Nothing is held between commands."""

    async def kill_group(self, pid: int) -> None:
        await self._ask(f"kill -9 -{pid}")

    async def was_oom(self) -> bool:
        """Whether the kernel killed for memory since this was last asked; asked only after a SIGKILL.

        Raises SandboxDied where nothing runs any more: the kill was the whole container's, and the daemon is late.
        """
        text = await self._ask(_OOM_COUNTS)
        if not text.startswith(b"ran\n"):
            raise died(self.name, "its container was killed")
        kills = sum(int(count) for count in re.findall(rb"^oom_kill (\d+)$", text, re.MULTILINE))
        known, self._oom_kills = self._oom_kills, kills
        return kills > known

    async def _ask(self, script: str) -> bytes:
        """A command of ours, as root; its output."""
        order = ["/bin/sh", "-c", script]
        exec_id = await self._create(order, Command(order, "/", user="0"))
        stream = await self._start(exec_id)
        said = Tail()
        try:
            while (frame := await stream.frame()) is not None:
                said.append(frame[1])
        finally:
            stream.close()
        return said.value()

    async def inspect(self, exec_id: str) -> dict[str, Any]:
        return await self._call("inspect exec", lambda api: api.exec_inspect(exec_id))

    async def state(self) -> dict[str, Any]:
        found = await self._call("inspect", lambda api: api.inspect_container(self._container))
        state: dict[str, Any] = found["State"]
        return state

    async def _create(self, argv: list[str], command: Command) -> str:
        def create(api: APIClient) -> dict[str, Any]:
            return api.exec_create(
                self._container,
                argv,
                stdin=command.stdin is not None,
                environment=dict(command.env),
                workdir=command.cwd,
                user=command.user or self._user,
            )

        made: str = (await self._call("create exec", create))["Id"]
        return made

    async def _start(self, exec_id: str) -> Hijacked:
        try:
            return await self._engine.hijack(f"/exec/{exec_id}/start", {"Detach": False, "Tty": False})
        except HijackRefused as error:
            state = await self.state()
            if not state["Running"]:
                raise died(self.name, f"its container is {state['Status']}") from error
            raise

    async def _call(self, what: str, function: Callable[[APIClient], T]) -> T:
        try:
            return await self._engine.call(what, function)
        except NotFound as error:
            raise died(self.name) from error
        except APIError as error:
            if error.status_code == 409:
                raise died(self.name, "its container does not run") from error
            raise translate(error, what) from error


class _Refused:
    """A command that no program can get."""

    def __init__(self, reason: str) -> None:
        self.stdout, self.stderr = Tail(), Tail()
        self.stderr.append(f"cannot run: {reason}\n".encode())

    async def wait(self) -> Ending:
        return Ending(126)

    def ending(self) -> Ending | None:
        return Ending(126)

    async def kill(self) -> None:
        """There is nothing to kill."""


class _PlainRunning:
    def __init__(self, executor: PlainExecutor, exec_id: str, stream: Hijacked) -> None:
        self.stdout, self.stderr = Tail(), Tail()
        self._executor, self._exec_id, self._stream = executor, exec_id, stream
        self._pid: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._head = b""
        self._feeding: asyncio.Task[None] | None = None
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(lambda task: task.cancelled() or task.exception())  # a job may never be asked

    def feed(self, data: bytes) -> None:
        self._feeding = asyncio.create_task(self._feed(data))

    async def wait(self) -> Ending:
        return await asyncio.shield(self._task)

    def ending(self) -> Ending | None:
        return self._task.result() if self._task.done() else None

    async def kill(self) -> None:
        """Nothing to kill where the command ended, or never came to run."""
        with contextlib.suppress(TimeoutError, asyncio.InvalidStateError):
            async with asyncio.timeout(_KILL_S):
                started: list[asyncio.Future[Any]] = [self._task, self._pid]
                await asyncio.wait(started, return_when=asyncio.FIRST_COMPLETED)
                await self._executor.kill_group(self._pid.result())
                await asyncio.wait([self._task])

    async def _feed(self, data: bytes) -> None:
        await self._stream.send(data)
        self._stream.send_eof()

    async def _run(self) -> Ending:
        try:
            while (frame := await self._stream.frame()) is not None:
                self._take(*frame)
            return await self._ending()
        finally:
            if self._feeding is not None:
                self._feeding.cancel()
            self._stream.close()

    def _take(self, stream: int, data: bytes) -> None:
        if stream != STDERR:
            self.stdout.append(data)
        elif self._pid.done():
            self.stderr.append(data)
        else:
            self._head += data
            line, newline, rest = self._head.partition(b"\n")
            if newline and line.isdigit():
                self._pid.set_result(int(line))
                self.stderr.append(rest)

    async def _ending(self) -> Ending:
        """The stream may end before the command does: it closed its output, or the daemon is a moment late."""
        for attempt in itertools.count():
            found = await self._executor.inspect(self._exec_id)
            if not found["Running"] and found["ExitCode"] is not None:
                break
            await asyncio.sleep(_INSPECT_PAUSES_S[min(attempt, len(_INSPECT_PAUSES_S) - 1)])
        code = exit_code(int(found["ExitCode"]))
        if code >= 0 and self._pid.done():
            return Ending(code)
        state = await self._executor.state()
        if not state["Running"]:
            raise died(self._executor.name, f"its container exited with {state['ExitCode']}")
        if not self._pid.done():
            self.stderr.append(self.stdout.value() + self._head)  # the runtime's own words
            self.stdout = Tail()
            return Ending(126)
        return Ending(code, oom=code == -9 and await self._executor.was_oom())
