"""The processes of a host that compare expressions: at most one per core, each ended where a verdict takes too long."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rollout_engine.errors import VerifierError, VerifierTimeout, VerifierUnavailable
from rollout_engine.machine import cores
from rollout_engine.threads import in_own_thread
from rollout_engine.verifiers.maths import program
from rollout_engine.verifiers.reply import parse_reply

START_S = 120.0
"""Starting a process and importing sympy, on a machine that is busy."""
REAP_S = 5.0
"""A process that was killed is gone by then."""
MAX_REPLY_BYTES = 64 * 1024
VERDICTS = 2_000
"""Verdicts of one process; sympy's caches grow."""

SOURCE = Path(program.__file__).read_text()


def source(parent: int = 0) -> str:
    """The program as a text for `python -I -c`."""
    return f"{SOURCE}\nmain({parent})\n"


@dataclass(slots=True)
class _Worker:
    process: subprocess.Popen[bytes]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    verdicts: int = 0

    async def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        self.verdicts += 1
        self.writer.write(json.dumps(request).encode() + b"\n")
        return parse_line(await self.reader.readline())


@dataclass(slots=True)
class MathPool:
    """Belongs to one event loop. Processes start when they are needed, and stay for the next verdict."""

    size: int = field(default_factory=cores)
    _idle: list[_Worker] = field(default_factory=list)
    _busy: list[_Worker] = field(default_factory=list)
    _all: set[int] = field(default_factory=set)
    _ending: set[asyncio.Task[None]] = field(default_factory=set)
    _slots: asyncio.Semaphore | None = None
    _missing: str | None = None
    _closed: bool = False

    @property
    def pids(self) -> set[int]:
        """Of the processes that are alive."""
        return set(self._all)

    async def compare(self, expected: str, answer: str, limit_s: float) -> dict[str, Any]:
        """`right`, or `failed` and `whose`. The limit counts from when a process takes it up.

        Raises VerifierTimeout, VerifierUnavailable where math-verify is missing, VerifierError.
        """
        if self._slots is None:
            self._slots = asyncio.Semaphore(self.size)
        async with self._slots:
            worker = self._idle.pop() if self._idle else await self._start()
            self._busy.append(worker)
            try:
                async with asyncio.timeout(limit_s):
                    reply = await worker.ask({"expected": expected, "answer": answer, "limit_s": limit_s})
            except TimeoutError:
                self._end(worker)
                raise VerifierTimeout(f"the expressions were not compared within {limit_s:g} s") from None
            except BaseException:
                self._end(worker)
                raise
            finally:
                self._busy.remove(worker)
            self._end(worker) if self._closed or worker.verdicts >= VERDICTS else self._idle.append(worker)
            return reply

    async def close(self) -> None:
        """Ends all processes, also those that are comparing."""
        self._closed = True
        idle, self._idle = self._idle, []
        for worker in (*idle, *self._busy):
            self._end(worker)
        if self._ending:
            await asyncio.wait(self._ending, timeout=REAP_S)

    async def _start(self) -> _Worker:
        if self._closed:
            raise VerifierUnavailable("the host of the verifier is closing")
        if self._missing is not None:
            raise VerifierUnavailable(self._missing)
        worker = await self._spawn()
        try:
            async with asyncio.timeout(START_S):
                hello = parse_line(await worker.reader.readline())
            if "missing" in hello:
                self._missing = missing(hello["missing"])
                raise VerifierUnavailable(self._missing)
        except TimeoutError:
            self._end(worker)
            raise VerifierTimeout(f"the process that compares expressions did not start within {START_S:g} s") from None
        except BaseException:
            self._end(worker)
            raise
        return worker

    async def _spawn(self) -> _Worker:
        ours, theirs = socket.socketpair()
        with theirs:
            process = _process(theirs.fileno())
        self._all.add(process.pid)
        try:
            reader, writer = await asyncio.open_connection(sock=ours, limit=MAX_REPLY_BYTES)
        except BaseException:
            ours.close()
            self._reap_later(process)
            raise
        return _Worker(process, reader, writer)

    def _end(self, worker: _Worker) -> None:
        worker.writer.transport.abort()
        self._reap_later(worker.process)

    def _reap_later(self, process: subprocess.Popen[bytes]) -> None:
        process.kill()
        task = asyncio.get_running_loop().create_task(self._reap(process))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _reap(self, process: subprocess.Popen[bytes]) -> None:
        await in_own_thread(process.wait, "reap a comparison")
        self._all.discard(process.pid)


def _process(descriptor: int) -> subprocess.Popen[bytes]:
    """A process with an empty environment: keys of models are none of its business.

    Started by the loop's own thread, whose end ends it.
    """
    return subprocess.Popen(
        [sys.executable, "-I", "-c", source(os.getpid())],
        stdin=descriptor,
        stdout=descriptor,
        stderr=subprocess.DEVNULL,
        env={},
        start_new_session=True,
    )


def parse_line(line: bytes) -> dict[str, Any]:
    """One line of a process that may have been talked into anything. Raises VerifierError."""
    if not line:
        raise VerifierError("the process that compares expressions ended: it was out of memory, or was killed")
    return parse_reply(line)


def missing(what: object, fix: str = "pip install 'rollout-engine[math]' on the hosts") -> str:
    """The reason of a verdict that could not be had for want of the package."""
    return f"the math verifier needs the package math-verify ({what!s:.200}): {fix}"
