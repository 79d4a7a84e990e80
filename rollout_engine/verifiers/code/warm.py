"""The warm verifier: pure verifier code runs in a box of its own that is forked ready to judge."""

from __future__ import annotations

import asyncio
import math
import socket
from typing import Any

from rollout_engine.errors import SandboxUnavailable, VerifierError, VerifierTimeout
from rollout_engine.sandboxes.namespace.helper import wire
from rollout_engine.sandboxes.namespace.keeper import Keeper
from rollout_engine.sandboxes.namespace.process import LauncherProcess
from rollout_engine.verifiers.reply import parse_reply

MEMORY_BYTES = 512 * 2**20
DISK_BYTES = 16 * 2**20
INODES = 2_000
PROCESSES = 32
MAX_REPLY = 64 * 1024
ZYGOTE = "rollout_engine.verifiers.code.zygote"
TRIAL_S = 20.0
_TRIAL: dict[str, Any] = {"code": "def verify(env):\n    return 1\n", "final_answer": None, "conversation": []}


class WarmVerifier:
    """One zygote and its boxes. Belongs to the event loop that first asks for a verdict."""

    def __init__(self, *, run_as: int | None = None, memory_bytes: int = MEMORY_BYTES) -> None:
        """As root, `run_as` lets the zygote be an ordinary user. `memory_bytes`: of one verdict."""
        self._memory_bytes = memory_bytes
        self._keeper = Keeper(
            "the warm verifier", on_event=self._on_event, on_end=self._on_end, trial=self._try, module=ZYGOTE,
            run_as=run_as, ends_with_parent=True,
        )  # fmt: skip
        self._ends: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self._count = 0

    @property
    def pid(self) -> int | None:
        return self._keeper.pid

    async def start(self) -> None:
        """Raises SandboxUnavailable where it cannot work here."""
        await self._keeper.ready()

    async def judge(self, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """What `runner.judge` says of code, final_answer and conversation. Raises VerifierTimeout, VerifierError."""
        return await self._judge(await self._keeper.ready(), request, timeout_s)

    async def close(self) -> None:
        """Ends it, and every verdict that is under way."""
        await self._keeper.close()

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
                wire.order(ours, {**request, **limits})
                launcher.channel.send({"op": "create", "box": box, "plan": self._plan()}, b"", (theirs.fileno(),))
                theirs.close()
                if launcher.channel.closed:
                    raise SandboxUnavailable("no box for a verdict: the warm verifier's launcher is gone")
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
            return parse_reply(data)
        raise _how_it_ended(ended.result() if ended.done() else {})

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

    async def _try(self, launcher: LauncherProcess) -> None:
        verdict = await self._judge(launcher, _TRIAL, TRIAL_S)
        if verdict.get("score") != 1.0:
            raise VerifierError(f"a trial verdict was {verdict}")

    def _on_event(self, header: dict[str, Any]) -> None:
        end = self._ends.get(str(header.get("ended")))
        if end is not None and not end.done():
            end.set_result(header)

    def _on_end(self) -> None:
        for end in self._ends.values():
            if not end.done():
                end.set_result({})


def _how_it_ended(header: dict[str, Any]) -> Exception:
    if "error" in header:
        return SandboxUnavailable(f"no box for a verdict: {header['error']}")
    if header.get("oom"):
        return VerifierError("the code ended without a verdict: it was out of memory")
    status = header.get("status")
    how = "its process is gone" if status is None else f"exit code {status}"
    return VerifierError(f"the code ended without a verdict ({how}): it must return, not exit")
