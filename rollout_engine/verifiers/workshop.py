"""What the verifiers of a host share: its sandboxes, and the warm verifier. Owned and closed by the host."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import TYPE_CHECKING

from rollout_engine.errors import SandboxError, SandboxUnavailable
from rollout_engine.machine import cores
from rollout_engine.sandboxes.base import Sandbox, SandboxProvider, SandboxSpec
from rollout_engine.verifiers.case import off_the_clock
from rollout_engine.verifiers.interpreter import find_python
from rollout_engine.waiting import awaiting

if TYPE_CHECKING:
    from rollout_engine.verifiers.code.warm import WarmVerifier
    from rollout_engine.verifiers.maths.pool import MathPool

log = logging.getLogger(__name__)


class Workshop:
    """Makes things when they are first asked for. Belongs to one event loop."""

    def __init__(
        self, provider: SandboxProvider | None = None, *, warm: bool = True, scoring: int | None = None
    ) -> None:
        """`provider` is the host's own, and stays the host's; None: the run has no sandboxes.

        `warm` False does without the warm verifier, as where it does not work. `scoring`: verdicts that compute at
        once; None: as many as there are cores.
        """
        self._cores = asyncio.Semaphore(scoring or cores())
        self._provider = provider
        self._bare: SandboxProvider | None = None
        self._warm: WarmVerifier | None = None
        self._starting: asyncio.Task[bool] | None = None
        self._without_warm = not warm
        self._maths: MathPool | None = None
        self._pythons: dict[tuple[object, ...], list[str]] = {}

    async def warm(self) -> WarmVerifier | None:
        """The warm verifier, started at the first call; None where it does not work."""
        if self._without_warm:
            return None
        if self._starting is None:
            self._starting = asyncio.create_task(self._start_warm())
        return self._warm if await asyncio.shield(self._starting) else None

    @asynccontextmanager
    async def core(self) -> AsyncIterator[None]:
        """For a part of a verdict that computes: no more of them at once than `scoring`.

        The wait for it does not count against the verdict's own limit: else those that come last would have no time.
        """
        with awaiting("a core of its host"), off_the_clock():
            await self._cores.acquire()
        try:
            yield
        finally:
            self._cores.release()

    def maths(self) -> MathPool:
        """The processes that compare mathematical expressions; each is started when it is needed."""
        if self._maths is None:
            from rollout_engine.verifiers.maths.pool import MathPool

            self._maths = MathPool()
        return self._maths

    async def _start_warm(self) -> bool:
        from rollout_engine.verifiers.code.warm import WarmVerifier

        self._warm = WarmVerifier()
        try:
            await self._warm.start()
        except SandboxError as error:
            log.warning("%s; pure verifier code runs in a fresh interpreter each time", error)
            return False
        return True

    async def open(self, spec: SandboxSpec) -> Sandbox:
        """A sandbox for a verdict alone. Where there is no isolation, only for a task that is marked as trusted."""
        provider = self._provider
        if provider is None and spec.trusted:
            provider = self._bare = self._bare or _local()
        if provider is None:
            raise SandboxUnavailable(
                "verifier code needs a place to run, and this run has no sandboxes (--sandbox none) and no "
                "namespaces; choose a sandbox, or set trusted = true in the task's environment"
            )
        return check_trust(await provider.open(spec), spec)

    async def python(self, sandbox: Sandbox, spec: SandboxSpec) -> list[str]:
        """argv of the interpreter in sandboxes of this root, looked for once. Raises SandboxUnavailable."""
        root = (sandbox.isolated, spec.image, spec.directory, spec.tar)
        if root not in self._pythons:
            self._pythons[root] = await find_python(sandbox)
        return self._pythons[root]

    async def close(self) -> None:
        if self._starting is not None:
            await asyncio.wait({self._starting})
        if self._warm is not None:
            await self._warm.close()
        if self._maths is not None:
            await self._maths.close()
        if self._bare is not None:
            await self._bare.close()


def a_core(workshop: Workshop | None) -> AbstractAsyncContextManager[None]:
    """A core of the host; without a host nobody else computes."""
    return workshop.core() if workshop is not None else nullcontext()


def check_trust(sandbox: Sandbox, spec: SandboxSpec) -> Sandbox:
    """Raises SandboxUnavailable where code of a task that nobody marked as trusted would run without isolation."""
    if not sandbox.isolated and not spec.trusted:
        raise SandboxUnavailable(
            "verifier code would run without isolation here; choose an isolating sandbox (--sandbox namespace or "
            "docker), or set trusted = true in the task's environment"
        )
    return sandbox


def _local() -> SandboxProvider:
    from rollout_engine.sandboxes import make_provider

    return make_provider("local")
