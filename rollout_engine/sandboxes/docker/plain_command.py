"""Commands under way by the Engine's exec, as the engine sees them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from typing import Any, Protocol

from rollout_engine.sandboxes.docker.capture import Outlet, Tail
from rollout_engine.sandboxes.docker.failures import died
from rollout_engine.sandboxes.docker.hijack import STDERR, Hijacked
from rollout_engine.sandboxes.docker.running import Ending, exit_code
from rollout_engine.sandboxes.polling import Patience

_INSPECT_PAUSES_S = (0.005, 0.02, 0.05, 0.1, 0.2)
_KILL_S = 10.0
_MOST_HELD_BYTES = 256 * 1024
_SLICE_BYTES = 64 * 1024


class Daemon(Protocol):
    """What a command needs of its executor."""

    name: str

    async def kill_group(self, pid: int) -> None: ...

    async def was_oom(self) -> bool: ...

    async def inspect(self, exec_id: str) -> dict[str, Any]: ...

    async def state(self) -> dict[str, Any]: ...


class Refused:
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


class PlainRunning:
    """A command under way."""

    def __init__(self, executor: Daemon, exec_id: str, stream: Hijacked) -> None:
        self.stdout, self.stderr = Tail(), Tail()
        self._executor, self._exec_id, self._stream = executor, exec_id, stream
        self._pid: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._head = b""
        self._feeding: asyncio.Task[None] | None = None
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(lambda task: task.cancelled() or task.exception())  # a job may never be asked

    @property
    def pid(self) -> int:
        """Inside the container; 0 where it did not start yet, or cannot."""
        return self._pid.result() if self._pid.done() else 0

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
                await self._have_room()
            return await self._ending()
        finally:
            if self._feeding is not None:
                self._feeding.cancel()
            self._stream.close()

    async def _have_room(self) -> None:
        """Holds the daemon back where output is not read."""

    def _output(self, data: bytes) -> None:
        self.stdout.append(data)

    def _take(self, stream: int, data: bytes) -> None:
        if stream != STDERR:
            self._output(data)
        elif self._pid.done():
            self.stderr.append(data)
        else:
            self._head += data
            line, newline, rest = self._head.partition(b"\n")
            if newline and line.isdigit():
                self._pid.set_result(int(line))
                self.stderr.append(rest)

    async def _exit_status(self) -> int:
        """The stream may end before the command does: it closed its output, or the daemon is a moment late."""
        patience = Patience()
        for attempt in itertools.count():
            found = await patience.ask(lambda: self._executor.inspect(self._exec_id))
            if found is not None and not found["Running"] and found["ExitCode"] is not None:
                return int(found["ExitCode"])
            await asyncio.sleep(_INSPECT_PAUSES_S[min(attempt, len(_INSPECT_PAUSES_S) - 1)])
        raise AssertionError("unreachable: it counts for ever")

    async def _ending(self) -> Ending:
        code = exit_code(await self._exit_status())
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


class PlainTalk(PlainRunning):
    """A command that is talked to over the attached exec."""

    def __init__(self, executor: Daemon, exec_id: str, stream: Hijacked) -> None:
        self._read, self._cut = asyncio.Event(), asyncio.Event()
        self.outlet = Outlet(lambda count: self._read.set())
        self._writing = asyncio.Lock()
        super().__init__(executor, exec_id, stream)
        self._task.add_done_callback(self._ended)

    async def write(self, data: bytes) -> None:
        async with self._writing:
            for start in range(0, len(data), _SLICE_BYTES):
                await self._write(data[start : start + _SLICE_BYTES])

    async def _write(self, data: bytes) -> None:
        """Until it is sent, the program has ended, or this side is cut, whichever comes first."""
        sending, cutting = asyncio.ensure_future(self._stream.write(data)), asyncio.ensure_future(self._cut.wait())
        try:
            await asyncio.wait({sending, cutting, self._task}, return_when=asyncio.FIRST_COMPLETED)
            if self._task.done():
                self._task.result()  # raises where the sandbox has died
            if self._task.done() or self._cut.is_set() or sending.exception() is not None:
                raise BrokenPipeError("the program reads no further")
        finally:
            sending.cancel()
            cutting.cancel()

    def cut(self) -> None:
        self._cut.set()
        self._read.set()
        self.outlet.end(drop=True)

    def _output(self, data: bytes) -> None:
        self.outlet.append(data)

    async def _have_room(self) -> None:
        while self.outlet.held > _MOST_HELD_BYTES and not self._cut.is_set():
            self._read.clear()
            await self._read.wait()

    def _ended(self, task: asyncio.Task[Ending]) -> None:
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            self.outlet.lose(error)
        else:
            self.outlet.end()


class RefusedTalk(Refused):
    """As `Refused`, for one that was to be talked to."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.outlet = Outlet(lambda count: None)
        self.outlet.end()

    async def write(self, data: bytes) -> None:
        raise BrokenPipeError("the program did not start")

    def cut(self) -> None:
        """There is nothing to cut."""
