"""A program in a session of its own: its output kept in bounded tails, its whole group ended at once.

For the event loop that starts it; nothing here blocks. Linux only (pidfd, /proc).
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import struct
import subprocess
import termios
from collections.abc import Mapping, Sequence
from io import FileIO
from typing import cast

from rollout_engine.sandboxes.base import MAX_OUTPUT_BYTES

_CHUNK = 256 * 1024
_SLACK = 1 << 20
_DROP_PAUSE_S = 0.05
_MAX_SWEEPS = 50

KILL_GRACE_S = 5.0
"""A killed process may take this long to go (uninterruptible I/O) before nobody waits for it any more."""


class Output:
    """One output stream of a program: the tail of what was written until `finish`; later output is dropped."""

    def __init__(self, loop: asyncio.AbstractEventLoop, pipe: FileIO, limit: int) -> None:
        self._loop, self._pipe, self._limit = loop, pipe, limit
        self._tail = bytearray()
        self._total = 0
        self._finished = False
        self._timer: asyncio.TimerHandle | None = None
        os.set_blocking(pipe.fileno(), False)
        loop.add_reader(pipe.fileno(), self._readable)

    @property
    def closed(self) -> bool:
        return self._pipe.closed

    @property
    def truncated(self) -> bool:
        return self._total > self._limit

    def value(self) -> bytes:
        return bytes(self._tail[-self._limit :])

    def finish(self) -> None:
        """Takes what is in the pipe now and no more: a background child may hold the pipe open for ever."""
        if not self.closed and not self._finished:
            waiting = struct.unpack("i", fcntl.ioctl(self._pipe.fileno(), termios.FIONREAD, b"\0" * 4))[0]
            while waiting > 0 and not self.closed:
                waiting -= self._read(min(waiting, _CHUNK))
        self._finished = True

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if not self.closed:
            self._loop.remove_reader(self._pipe.fileno())
            self._pipe.close()

    def _readable(self) -> None:
        self._read(_CHUNK)
        if self._finished and not self.closed:
            # A closed pipe would kill a background child that still writes, a fast reader would serve it
            # for nothing: what it writes is dropped, slowly.
            self._loop.remove_reader(self._pipe.fileno())
            self._timer = self._loop.call_later(
                _DROP_PAUSE_S, self._loop.add_reader, self._pipe.fileno(), self._readable
            )

    def _read(self, size: int) -> int:
        try:
            chunk = os.read(self._pipe.fileno(), size)
        except BlockingIOError:
            return size
        if not chunk:
            self.close()
        elif not self._finished:
            self._total += len(chunk)
            self._tail += chunk
            if len(self._tail) > self._limit + _SLACK:
                del self._tail[: -self._limit]
        return len(chunk)


class Input:
    """The standard input of a program: writes as fast as it is read, then closes."""

    def __init__(self, loop: asyncio.AbstractEventLoop, pipe: FileIO, data: bytes) -> None:
        self._loop, self._pipe, self._rest = loop, pipe, memoryview(data)
        os.set_blocking(pipe.fileno(), False)
        loop.add_writer(pipe.fileno(), self._writable)

    def close(self) -> None:
        if not self._pipe.closed:
            self._loop.remove_writer(self._pipe.fileno())
            self._pipe.close()

    def _writable(self) -> None:
        try:
            self._rest = self._rest[os.write(self._pipe.fileno(), self._rest[:_CHUNK]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:  # the program reads no further, which is its own business
            self._rest = self._rest[:0]
        if not self._rest:
            self.close()


class Program:
    """A started program. `exited` is done when its first process has ended; its children may live on."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        cwd: str,
        env: Mapping[str, str],
        stdin: bytes | None = None,
        stream: int | None = None,
        max_output_bytes: int = MAX_OUTPUT_BYTES,
    ) -> None:
        """`stream`: a descriptor that becomes its standard input and output; the caller closes it.

        Raises OSError or ValueError where the program cannot be started.
        """
        loop = asyncio.get_running_loop()
        self._loop = loop
        # On the loop itself: CPython holds the GIL over the vfork in any thread, and a spawn that nothing
        # can cancel half-way leaves no process behind.
        self._popen = subprocess.Popen(
            argv,
            cwd=cwd,
            env=env,
            stdin=stream if stream is not None else subprocess.DEVNULL if stdin is None else subprocess.PIPE,
            stdout=subprocess.PIPE if stream is None else stream,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        try:
            self._pidfd = os.pidfd_open(self.pid)
        except BaseException:
            os.killpg(self.pid, signal.SIGKILL)
            with self._popen:  # reaps it and closes its pipes
                raise
        self.exited: asyncio.Future[None] = loop.create_future()
        self.exit_code: int | None = None
        """None until it has ended, and after that where somebody else reaped it."""
        self.stdout = Output(loop, cast(FileIO, self._popen.stdout) if stream is None else _empty(), max_output_bytes)
        self.stderr = Output(loop, cast(FileIO, self._popen.stderr), max_output_bytes)
        self._stdin = None if stdin is None else Input(loop, cast(FileIO, self._popen.stdin), stdin)
        loop.add_reader(self._pidfd, self._on_exit)

    @property
    def pid(self) -> int:
        """Also the number of its process group and session."""
        return self._popen.pid

    @property
    def quiet(self) -> bool:
        """Ended, and nobody holds its output any more."""
        return self.exited.done() and self.stdout.closed and self.stderr.closed

    def kill(self) -> None:
        """Kills the whole group; after the exit this does nothing, as the number may then be another's."""
        if not self.exited.done():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    async def end(self) -> None:
        """Kills the group where it still runs, and waits for the exit. Bounded by `KILL_GRACE_S`."""
        if not self.exited.done():
            self.kill()
            await asyncio.wait({self.exited}, timeout=KILL_GRACE_S)

    def release(self) -> None:
        """Closes the pipes: no more output is taken, also from children that live on."""
        self.stdout.close()
        self.stderr.close()
        if self._stdin is not None:
            self._stdin.close()

    def _on_exit(self) -> None:
        try:
            status = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG)
        except ChildProcessError:
            code = None
        else:
            if status is None:
                return
            code = status.si_status if status.si_code == os.CLD_EXITED else -status.si_status
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self.exit_code = code
        self._popen.returncode = -signal.SIGKILL if code is None else code  # Popen must not wait for it again
        self.stdout.finish()
        self.stderr.finish()
        if self._stdin is not None:
            self._stdin.close()
        self.exited.set_result(None)


def _empty() -> FileIO:
    """A pipe that has ended: the output of a program whose output goes elsewhere."""
    ours, theirs = os.pipe()
    os.close(theirs)
    return FileIO(ours)


def kill_marked(mark: str, group: int | None = None, spared: frozenset[int] = frozenset()) -> None:
    """Kills every process that has `mark` (NAME=value) in its environment, also those that left their group.

    Only those of `group` where it is given; those of the groups `spared` are left alone.

    Blocks: for a thread. Sweeps again while it finds any, as a process may fork while it is being killed.
    """
    for _ in range(_MAX_SWEEPS):
        marked = {pid: _group_of(pid) for pid in _marked(mark.encode() + b"\0")}
        found = [pid for pid, its in marked.items() if its not in spared and (group is None or its == group)]
        if not found:
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def _marked(mark: bytes) -> list[int]:
    pids = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb", buffering=0) as file:
                environ = file.read()
                if environ.startswith(mark) or b"\0" + mark in environ:
                    pids.append(int(name))
    return pids


def _group_of(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None
