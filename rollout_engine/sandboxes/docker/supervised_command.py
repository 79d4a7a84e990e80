"""Commands under way at a supervisor, as the engine sees them."""

from __future__ import annotations

import asyncio
import errno
import os
import struct
from typing import Protocol

from rollout_engine.sandboxes.docker.capture import Outlet, Tail
from rollout_engine.sandboxes.docker.running import Ending

STAGE_USER, STAGE_CWD, STAGE_EXEC, STAGE_START = 1, 2, 3, 4
WINDOW_BYTES = 256 * 1024
"""What is on its way to a program that is talked to, and from it; as in supervisor.h."""
_SLICE_BYTES = 64 * 1024
_COUNT = struct.Struct("=I")
_KILL_S = 5.0
_NAME_CHARS = 500


class Wire(Protocol):
    """What a command needs of its executor."""

    def kill(self, number: int, group: int = 0) -> None: ...

    def feed(self, number: int, data: bytes) -> None: ...

    def grant(self, number: int, count: int) -> None: ...

    def forget(self, number: int) -> None: ...


class Supervised:
    """A command under way."""

    def __init__(self, wire: Wire, number: int, names: tuple[str, str, str], stdout: Tail | None = None) -> None:
        """`names`: the program, its working directory, its user."""
        self.stdout, self.stderr = stdout or Tail(), Tail()
        self._wire, self.number, self._names = wire, number, names
        self._group = 0
        self.refused = False
        self._done: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()

    @property
    def over(self) -> bool:
        """Whether nothing more will be heard of it."""
        return self._done.done()

    async def wait(self) -> Ending:
        return await asyncio.shield(self._done)

    def ending(self) -> Ending | None:
        return self._done.result() if self._done.done() else None

    async def kill(self) -> None:
        if not self._done.done():
            self._wire.kill(self.number)
            await asyncio.wait([self._done], timeout=_KILL_S)
        elif self._group:
            self._wire.kill(self.number, self._group)

    def output(self, data: bytes) -> None:
        self.stdout.append(data)

    def finish(self, ending: Ending, group: int = 0) -> None:
        self._group = group
        if not self._done.done():
            self._done.set_result(ending)

    def cannot_start(self, stage: int, error: int) -> None:
        """A result, as in a shell: 127 for a program that is not there, else 126."""
        self.refused = True
        program, cwd, user = self._names
        what = {STAGE_CWD: f"working directory {cwd}", STAGE_USER: f"user {user}"}.get(stage, program)
        self.stderr.append(os.fsencode(f"cannot run: {what[:_NAME_CHARS]}: {os.strerror(error)}\n"))
        crowded = (stage, error) == (STAGE_START, errno.EAGAIN)
        self.finish(Ending(127 if (stage, error) == (STAGE_EXEC, errno.ENOENT) else 126, crowded=crowded))

    def leave(self) -> None:
        """Nothing more will be heard of it."""

    def lose(self, why: Exception) -> None:
        if not self._done.done():
            self._done.set_exception(why)
            self._done.exception()


class SupervisedTalk(Supervised):
    """A command that is talked to. What is not read, or not taken, waits in the sandbox, not here."""

    def __init__(self, wire: Wire, number: int, names: tuple[str, str, str]) -> None:
        super().__init__(wire, number, names)
        self.outlet = Outlet(lambda count: wire.grant(number, count))
        self._writing = asyncio.Lock()
        self._under_way = 0
        self._lost: Exception | None = None
        self._is_shut = False
        self._room = asyncio.Event()

    @property
    def over(self) -> bool:
        return self._done.done() and self.outlet.ended

    async def write(self, data: bytes) -> None:
        async with self._writing:
            for start in range(0, len(data), _SLICE_BYTES):
                piece = data[start : start + _SLICE_BYTES]
                await self._room_for(len(piece))
                self._under_way += len(piece)
                self._wire.feed(self.number, piece)

    async def _room_for(self, size: int) -> None:
        while True:
            if self._lost is not None:
                raise self._lost
            if self._is_shut:
                raise BrokenPipeError("the program reads no further")
            if self._under_way + size <= WINDOW_BYTES:
                return
            self._room.clear()
            await self._room.wait()

    def output(self, data: bytes) -> None:
        if data:
            self.outlet.append(data)
        else:
            self.outlet.end()

    def taken(self, payload: bytes) -> None:
        self._under_way -= int(_COUNT.unpack(payload)[0])
        self._room.set()

    def shut(self) -> None:
        self._is_shut = True
        self._room.set()

    def leave(self) -> None:
        self.shut()

    def cut(self) -> None:
        self.outlet.end(drop=True)
        self.shut()

    async def kill(self) -> None:
        await super().kill()
        if self.over:
            self._wire.forget(self.number)

    def cannot_start(self, stage: int, error: int) -> None:
        super().cannot_start(stage, error)
        self.cut()

    def lose(self, why: Exception) -> None:
        super().lose(why)
        self._lost = why
        self.outlet.lose(why)
        self._room.set()
