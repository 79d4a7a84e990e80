"""One agent program in its sandbox: started, watched until something ends it, and always ended."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

from rollout_engine.agents.cli.ending import Ended
from rollout_engine.agents.cli.program import PROMPT_FILE, Launch
from rollout_engine.errors import AgentError, RolloutEngineError
from rollout_engine.proxy.rollout_session import RolloutSession
from rollout_engine.sandboxes.base import JobStatus, Sandbox
from rollout_engine.sandboxes.polling import Patience
from rollout_engine.types import StopReason

SETTINGS_S = 60.0
"""Writing the prompt and the settings."""
STOP_S = 5.0
"""How long is waited for the last output of a program whose rollout is being cancelled."""
LOOK_S = 0.25
"""Between two looks at whether a program that runs must be ended; its own end is seen at once."""

_START = 'exec "$@" < "$0"'
_TMPDIR = 'printf %s "${TMPDIR:-/tmp}"'


class Limits(NamedTuple):
    """When a program is ended."""

    ends_at: float
    """The event loop's clock."""
    idle_s: float
    limit_grace_s: float


async def make_home(sandbox: Sandbox, prompt: str) -> str:
    """A fresh HOME of the sandbox's own user, with the prompt in it. Raises AgentError, SandboxError."""
    home = f"{await _temporary(sandbox)}/rollout-agent"
    await put_files(sandbox, home, {PROMPT_FILE: prompt})
    return home


async def put_files(sandbox: Sandbox, home: str, files: Mapping[str, str]) -> None:
    """Writes a program's settings below its HOME. Raises AgentError, SandboxError."""
    for name, text in files.items():
        try:
            async with asyncio.timeout(SETTINGS_S):
                await sandbox.write_file(f"{home}/{name}", text.encode("utf-8", "replace"), mode=0o600)
        except OSError as error:  # a TimeoutError too
            why = str(error) or f"not within {SETTINGS_S:g} s"
            raise AgentError(f"the agent program's settings could not be written: {why}") from error


async def _temporary(sandbox: Sandbox) -> str:
    """Where the sandbox's own temporary files are."""
    if sandbox.isolated:
        return "/tmp"
    return (await sandbox.exec(["sh", "-c", _TMPDIR], timeout_s=SETTINGS_S)).stdout.decode()


class Job:
    """A program that runs. `status` is the last that was seen of it."""

    def __init__(self, sandbox: Sandbox, name: str) -> None:
        self._sandbox, self._name = sandbox, name
        self._oom_kills = sandbox.oom_kills or 0
        self._began = asyncio.get_running_loop().time()
        self.status = JobStatus(None)
        self.exit_code: int | None = None
        """None: it did not end by itself."""

    @classmethod
    async def start(
        cls, sandbox: Sandbox, launch: Launch, argv: Sequence[str], env: Mapping[str, str], *, stdin: bool
    ) -> Job:
        """`stdin`: its standard input is the prompt; else there is none."""
        started = ["sh", "-c", _START, f"{launch.home}/{PROMPT_FILE}", *argv] if stdin else argv
        job = await sandbox.start(started, env={"HOME": launch.home, **env})
        return cls(sandbox, job)

    @property
    def seconds(self) -> float:
        return asyncio.get_running_loop().time() - self._began

    @property
    def out_of_memory(self) -> bool:
        """Whether the kernel killed under it for memory."""
        return (self._sandbox.oom_kills or 0) > self._oom_kills

    async def watch(self, session: RolloutSession, limits: Limits) -> Ended:
        """Waits until it ends or must be ended; then it is. Raises SandboxError."""
        loop, patience = asyncio.get_running_loop(), Patience()
        limit_at: float | None = None
        while True:
            left = max(limits.ends_at - loop.time(), 0.0)
            look = partial(self._sandbox.poll, self._name, wait_s=min(LOOK_S, left))
            self.status = await patience.ask(look) or self.status
            if self.status.exit_code is not None:
                self.exit_code = self.status.exit_code
                return "exit"
            now = loop.time()
            if limit_at is None and session.limit not in (None, StopReason.CONTEXT_OVERFLOW):
                limit_at = now + limits.limit_grace_s
            ended = self._must_end(session, limits, now, limit_at)
            if ended is not None:
                await self.end()
                return ended

    def _must_end(self, session: RolloutSession, limits: Limits, now: float, limit_at: float | None) -> Ended | None:
        if session.failure is not None:
            return "failure"
        if limit_at is not None and now >= limit_at:
            return "limit"
        if now >= limits.ends_at:
            return "time"
        return "idle" if session.idle_s >= limits.idle_s else None

    async def end(self) -> None:
        """Kills the program and its group, and takes its last output."""
        await self._sandbox.stop(self._name)
        self.status = await self._sandbox.poll(self._name)

    async def cut(self) -> None:
        """The same within STOP_S, for a rollout that is being cancelled; its sandbox ends what is left."""
        with contextlib.suppress(RolloutEngineError, OSError, TimeoutError):
            async with asyncio.timeout(STOP_S):
                await self.end()
