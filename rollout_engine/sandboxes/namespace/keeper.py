"""Keeps one launcher running: in the first mode that works, and started again, a bounded number of times."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Any

from rollout_engine.errors import RolloutEngineError, SandboxUnavailable, describe
from rollout_engine.sandboxes.namespace import seccomp
from rollout_engine.sandboxes.namespace.process import LAUNCHER, LauncherProcess
from rollout_engine.sandboxes.namespace.reaper import reap

MAX_RESTARTS = 5
"""A launcher that dies is started again this often in its keeper's life."""


class Keeper:
    """Belongs to the event loop that first asks for the launcher. `close` ends it."""

    def __init__(
        self, what: str, *, on_event: Callable[[dict[str, Any]], None], on_end: Callable[[], None],
        trial: Callable[[LauncherProcess], Awaitable[None]], module: str = LAUNCHER, run_as: int | None = None,
        mode: str | None = None, ends_with_parent: bool = False, hello: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """`what` names it in errors. `trial` raises where a launcher that said that it works does not.

        As root, `run_as` lets the launcher be an ordinary user; `mode` pins what is otherwise tried out.
        `ends_with_parent` is the system call filter's, `hello` what else the launcher is told to be.
        """
        self._what, self._on_event, self._on_end, self._trial = what, on_event, on_end, trial
        self._module, self._ends_with_parent = module, ends_with_parent
        self._hello = {"run_as": run_as, "groups": True, "pretend_old": False, **(hello or {})}
        ordinary = run_as is not None or os.geteuid() != 0
        self._modes = ("user",) if ordinary else (mode,) if mode else ("ranges", "shared", "plain")
        self.launcher: LauncherProcess | None = None
        self._starting: asyncio.Task[LauncherProcess] | None = None
        self._starts = 0
        self._closed = False

    @property
    def pid(self) -> int | None:
        return None if self.launcher is None else self.launcher.pid

    async def ready(self) -> LauncherProcess:
        """The launcher, started where it is not running. Raises SandboxUnavailable."""
        while not self._closed and (self.launcher is None or self.launcher.channel.closed):
            if self._starting is None or self._starting.done():
                self._starting = asyncio.create_task(self._start())
            await asyncio.shield(self._starting)
        if self._closed or self.launcher is None:
            raise SandboxUnavailable(f"{self._what} is closed")
        return self.launcher

    async def close(self) -> None:
        """Ends it, and with it whatever it made. Idempotent."""
        self._closed = True
        if self._starting is not None:
            await asyncio.wait({self._starting})
        launcher, self.launcher = self.launcher, None
        if launcher is not None:
            await launcher.stop()
        else:
            await reap()  # a host before this one may have been killed with its launcher, and nobody comes after

    async def _start(self) -> LauncherProcess:
        if self.launcher is not None:
            await self.launcher.stop()
        self._starts += 1
        if self._starts > MAX_RESTARTS + 1:
            raise SandboxUnavailable(f"the launcher of {self._what} died {self._starts - 1} times, which is too often")
        reasons = []
        for mode in self._modes:
            try:
                self.launcher = await self._start_as(mode)
            except RolloutEngineError as error:
                reasons.append(f"{mode}: {describe(error)}")
            else:
                self._modes = (mode,)
                return self.launcher
        raise SandboxUnavailable(f"{self._what} does not work here ({'; '.join(reasons)}); see `rollout doctor`")

    async def _start_as(self, mode: str) -> LauncherProcess:
        launcher = LauncherProcess(self._on_event, self._on_end, module=self._module)
        try:
            calls = await asyncio.to_thread(lambda: seccomp.program(ends_with_parent=self._ends_with_parent) or b"")
            await launcher.hello({"mode": mode, **self._hello}, calls)
            await self._trial(launcher)
        except BaseException:
            await launcher.stop()
            raise
        return launcher
