"""A program in a container to talk to: the contract's `Stream` over an executor's talk."""

from __future__ import annotations

from collections.abc import Callable

from rollout_engine.sandboxes.base import JobStatus
from rollout_engine.sandboxes.docker.running import Talk


class DockerStream:
    """Made by `DockerSandbox.connect`; `check` raises where the sandbox is closed."""

    def __init__(self, talk: Talk, check: Callable[[], None]) -> None:
        self._talk, self._check = talk, check

    async def read(self) -> bytes:
        chunk = await self._talk.outlet.read()
        if not chunk:
            self._check()
        return chunk

    async def write(self, data: bytes) -> None:
        self._check()
        await self._talk.write(data)

    async def poll(self) -> JobStatus:
        self._check()
        ending = self._talk.ending()
        return JobStatus(ending.exit_code if ending is not None else None, b"", self._talk.stderr.value())

    async def close(self) -> None:
        self._talk.cut()
        await self._talk.kill()
