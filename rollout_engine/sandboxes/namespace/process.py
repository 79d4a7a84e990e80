"""Starts the launcher and speaks with it; says when it is gone."""

from __future__ import annotations

import asyncio
import socket
import subprocess
from collections.abc import Callable
from typing import Any

from rollout_engine.errors import SandboxStartError
from rollout_engine.sandboxes.namespace import isolated
from rollout_engine.sandboxes.namespace.channel import Channel
from rollout_engine.sandboxes.namespace.helper.wire import Closed, Message
from rollout_engine.sandboxes.namespace.reaper import reap

START_S = 20.0
STOP_S = 10.0
LAUNCHER = "rollout_engine.sandboxes.namespace.helper.launcher"


class LauncherProcess:
    """The helper process of one provider. `facts` is what it said of itself."""

    def __init__(
        self, on_event: Callable[[dict[str, Any]], None], on_end: Callable[[], None], *,
        module: str = LAUNCHER,
    ) -> None:  # fmt: skip
        """`module` has the `main` that serves the socket."""
        self._on_event, self._on_end = on_event, on_end
        self.facts: dict[str, Any] = {}
        self.fatal = ""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._popen = subprocess.Popen(
                isolated.command(module, theirs.fileno()),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={},
                start_new_session=True,
            )
        self.channel = Channel(ours, self._event, self._end)
        self._burial: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        return self._popen.pid

    async def hello(self, header: dict[str, Any], seccomp: bytes) -> None:
        """The first request. Raises SandboxStartError where the launcher cannot start."""
        self.facts = (await self.ask({"op": "hello", **header}, seccomp, START_S)).header
        if "error" in self.facts:
            raise SandboxStartError(f"the launcher could not start: {self.facts['error']}")

    async def ask(
        self, header: dict[str, Any], blob: bytes = b"", timeout_s: float = START_S, fds: tuple[int, ...] = ()
    ) -> Message:
        """A request and its reply. Raises SandboxStartError where the launcher is gone or does not answer."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self.channel.ask(header, blob, fds)
        except (Closed, TimeoutError) as error:
            raise SandboxStartError(f"the launcher of the namespace sandbox is gone: {self.fatal or error}") from error

    def _event(self, message: Message) -> None:
        message.drop()
        self.fatal = str(message.header.get("fatal", self.fatal))
        self._on_event(message.header)

    def _end(self) -> None:
        self._burial = asyncio.get_running_loop().create_task(self._bury())
        self._on_end()

    async def stop(self) -> None:
        """Ends it, and with it whatever it made."""
        self.channel.close()
        if self._burial is not None:
            await asyncio.shield(self._burial)

    async def _bury(self) -> None:
        """Waits for its end, and clears up after those that could not do so themselves: it, or a lost host's."""
        clock = asyncio.get_running_loop().time
        end, delay = clock() + STOP_S, 0.002
        while self._popen.poll() is None:
            if clock() > end:
                self._popen.kill()
            await asyncio.sleep(delay)
            delay = min(0.05, delay * 1.5)
        await reap()
