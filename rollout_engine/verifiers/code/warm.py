"""The warm verifier: pure verifier code runs in a box of its own that is forked ready to judge."""

from __future__ import annotations

import asyncio
import json
import math
import os
import socket
from typing import Any

from rollout_engine.errors import SandboxError, SandboxUnavailable, VerifierError, VerifierTimeout, describe
from rollout_engine.sandboxes.namespace import seccomp
from rollout_engine.sandboxes.namespace.helper import wire
from rollout_engine.sandboxes.namespace.process import LauncherProcess

MEMORY_BYTES = 512 * 2**20
DISK_BYTES = 16 * 2**20
INODES = 2_000
PROCESSES = 32
MAX_REPLY = 64 * 1024
MAX_RESTARTS = 5
ZYGOTE = "rollout_engine.verifiers.code.zygote"
TRIAL_S = 20.0
_TRIAL: dict[str, Any] = {"code": "def verify(env):\n    return 1\n", "final_answer": None, "conversation": []}


class WarmVerifier:
    """One zygote and its boxes. Belongs to the event loop that first asks for a verdict."""

    def __init__(self, *, run_as: int | None = None, memory_bytes: int = MEMORY_BYTES) -> None:
        """As root, `run_as` lets the zygote be an ordinary user. `memory_bytes`: of one verdict."""
        self._run_as, self._memory_bytes = run_as, memory_bytes
        ordinary = run_as is not None or os.geteuid() != 0
        self._modes = ("user",) if ordinary else ("ranges", "shared", "plain")
        self._launcher: LauncherProcess | None = None
        self._starting: asyncio.Task[LauncherProcess] | None = None
        self._ends: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self._count = self._starts = 0
        self._closed = False

    @property
    def pid(self) -> int | None:
        return None if self._launcher is None else self._launcher.pid

    async def start(self) -> None:
        """Raises SandboxUnavailable where it cannot work here."""
        await self._ready()

    async def judge(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """What `runner.judge` says of code, final_answer and conversation. Raises VerifierTimeout, VerifierError."""
        return await self._judge(await self._ready(), request, timeout_s)

    async def close(self) -> None:
        """Ends it, and every verdict that is under way."""
        self._closed = True
        if self._starting is not None:
            await asyncio.wait({self._starting})
        launcher, self._launcher = self._launcher, None
        if launcher is not None:
            await launcher.stop()

    # One verdict.

    async def _judge(self, launcher: LauncherProcess, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        self._count += 1
        box = f"v{self._count}"
        ended = self._ends[box] = asyncio.get_running_loop().create_future()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with ours, theirs:
                ours.setblocking(False)
                limits = {"cpu_s": math.ceil(timeout_s) + 1, "memory_bytes": self._memory_bytes}
                wire.send(ours, {**request, **limits})
                reply = await launcher.ask({"op": "create", "box": box, "plan": self._plan()}, fds=(theirs.fileno(),))
                theirs.close()
                if "error" in reply.header:
                    raise SandboxUnavailable(f"no box for a verdict: {reply.header['error']}")
                return await self._answer(ours, ended, timeout_s)
        finally:
            self._ends.pop(box, None)
            if not ended.done() and not launcher.channel.closed:
                launcher.channel.send({"op": "destroy", "box": box, "id": 0})

    async def _answer(
        self, ours: socket.socket, ended: asyncio.Future[dict[str, Any]], timeout_s: float
    ) -> dict[str, Any]:
        """The box's only packet. What else it may send is never read, descriptors least of all."""
        try:
            async with asyncio.timeout(timeout_s):
                data = await asyncio.get_running_loop().sock_recv(ours, MAX_REPLY)
                if not data:
                    await asyncio.wait({ended})
        except TimeoutError:
            raise VerifierTimeout(f"the code did not end within {timeout_s:g} s") from None
        except ConnectionError:
            data = b""
        if data:
            return parse(data)
        raise VerifierError(_how_it_ended(ended.result() if ended.done() else {}))

    def _plan(self) -> dict[str, Any]:
        return {
            "base": "host",
            "layers": [],
            "limits": [self._memory_bytes, 1.0, PROCESSES, DISK_BYTES, INODES],
            "network": "none",
            "user": None,
            "workdir": "/tmp",
        }

    # The zygote.

    async def _ready(self) -> LauncherProcess:
        while self._launcher is None or self._launcher.channel.closed:
            if self._closed:
                raise SandboxUnavailable("the warm verifier is closed")
            if self._starting is None or self._starting.done():
                self._starting = asyncio.create_task(self._start())
            await asyncio.shield(self._starting)
        return self._launcher

    async def _start(self) -> LauncherProcess:
        """Starts a zygote in the first mode in which a verdict works."""
        if self._launcher is not None:
            await self._launcher.stop()
        self._starts += 1
        if self._starts > MAX_RESTARTS + 1:
            raise SandboxUnavailable(f"the warm verifier died {self._starts - 1} times, which is too often")
        reasons = []
        for mode in self._modes:
            try:
                self._launcher = await self._start_as(mode)
            except (SandboxError, VerifierError) as error:
                reasons.append(f"{mode}: {describe(error)}")
            else:
                self._modes = (mode,)
                return self._launcher
        raise SandboxUnavailable(f"the warm verifier does not work here ({'; '.join(reasons)})")

    async def _start_as(self, mode: str) -> LauncherProcess:
        launcher = LauncherProcess(self._on_event, self._on_end, module=ZYGOTE)
        try:
            hello = {"mode": mode, "run_as": self._run_as, "groups": True, "pretend_old": False}
            await launcher.hello(hello, seccomp.program(ends_with_parent=True) or b"")
            verdict = await self._judge(launcher, _TRIAL, TRIAL_S)
            if verdict.get("score") != 1.0:
                raise VerifierError(f"a trial verdict was {verdict}")
        except BaseException:
            await launcher.stop()
            raise
        return launcher

    def _on_event(self, header: dict[str, Any]) -> None:
        end = self._ends.get(str(header.get("ended")))
        if end is not None and not end.done():
            end.set_result(header)

    def _on_end(self) -> None:
        for end in self._ends.values():
            if not end.done():
                end.set_result({})


def parse(data: bytes) -> dict[str, Any]:
    """A verdict as it comes out of a place where anything may have written it."""
    try:
        verdict = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise VerifierError(f"what came back is no verdict: {data[:200]!r}") from error
    if not isinstance(verdict, dict):
        raise VerifierError(f"what came back is no verdict: {data[:200]!r}")
    return verdict


def _how_it_ended(header: dict[str, Any]) -> str:
    if header.get("oom"):
        return "the code ended without a verdict: it was out of memory"
    status = header.get("status")
    how = "its process is gone" if status is None else f"exit code {status}"
    return f"the code ended without a verdict ({how}): it must return, not exit"
