"""A directory, and the processes that are started in it as the engine's own user."""

from __future__ import annotations

import asyncio
import errno
import os
import posixpath
import pwd
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeAlias, TypeVar

from rollout_engine.disk import ELSEWHERE, on_disk
from rollout_engine.errors import ExecTimeout, SandboxDied, SandboxStartError, SandboxUnavailable
from rollout_engine.sandboxes import files
from rollout_engine.sandboxes.base import (
    EVERYTHING,
    MAX_FILES,
    MAX_READ_BYTES,
    SNAPSHOT,
    JobStatus,
    Listener,
    SandboxSpec,
)
from rollout_engine.sandboxes.paired_stream import PairedStream, open_stream
from rollout_engine.sandboxes.process import Program, kill_marked
from rollout_engine.types import ExecResult

T = TypeVar("T")
LocalStream: TypeAlias = "PairedStream[Program | ExecResult]"

MARK = "ROLLOUT_SANDBOX"
CLOSE_S = 20.0
"""Closing waits this long for file work that still runs; the removal itself goes on in its thread."""

DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class LocalSandbox:
    """A directory and the processes that were started in it. Belongs to the event loop that opened it."""

    def __init__(
        self,
        spec: SandboxSpec,
        root: Path,
        mark: str,
        keep: Callable[[Path, Sequence[str], int], Awaitable[str]],
        on_close: Callable[[LocalSandbox], None],
    ) -> None:
        """`keep` makes a layer of these paths below a directory, of so many bytes at most."""
        self._spec, self._root, self._mark = spec, root, mark
        self._keep, self._on_close = keep, on_close
        self._work = str(root / "work")
        self._workdir = posixpath.normpath(spec.workdir)
        self._env = {
            "PATH": os.environ.get("PATH", DEFAULT_PATH),
            "HOME": self._work,
            "LANG": os.environ.get("LANG", "C.UTF-8"),
            "TMPDIR": str(root / "tmp"),
            **spec.env,
            MARK: mark,
        }
        self._programs: set[Program] = set()
        self._jobs: dict[str, Program | ExecResult] = {}
        self._streams: set[LocalStream] = set()
        self._busy: set[asyncio.Future[object]] = set()
        self._used = False
        self._closing: asyncio.Task[None] | None = None

    @property
    def isolated(self) -> bool:
        return False

    @property
    def oom_kills(self) -> None:
        return None  # no memory limit holds here

    @property
    def limits_enforced(self) -> str:
        return "none"

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes | None = None,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        user: str | None = None,
    ) -> ExecResult:
        clock = asyncio.get_running_loop().time
        started = clock()
        program = self._spawn(argv, stdin, cwd, env, user)
        if isinstance(program, ExecResult):
            return program
        try:
            await asyncio.wait({program.exited}, timeout=timeout_s)
            in_time = program.exited.done()
        finally:
            await program.end()
        self._alive()
        result = _result(program, clock() - started)
        if not in_time:
            raise ExecTimeout(f"{argv[0]} did not end within {timeout_s} s", result)
        if program.exit_code is None:
            raise SandboxDied(f"the exit status of {argv[0]} was taken by another part of this process")
        return result

    async def read_file(self, path: str, *, max_bytes: int = MAX_READ_BYTES) -> bytes:
        return await self._in_thread(partial(files.read_file, self._host_path(path), max_bytes))

    async def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        with on_disk(self._work, ELSEWHERE):
            await self._in_thread(partial(files.write_file, self._host_path(path), data, mode))

    async def upload(self, source: Path, path: str) -> None:
        with on_disk(self._work, ELSEWHERE):
            await self._in_thread(partial(files.copy_in, source, self._host_path(path)))

    async def download(
        self, path: str, target: Path, *, max_bytes: int = MAX_READ_BYTES, max_files: int = MAX_FILES
    ) -> None:
        with on_disk(target.parent, ELSEWHERE):
            await self._in_thread(partial(files.copy_out, self._host_path(path), target, max_bytes, max_files))

    async def start(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> str:
        job = f"job-{len(self._jobs) + 1}"
        self._jobs[job] = self._spawn(argv, None, cwd, env, user)
        return job

    async def poll(self, job: str, *, wait_s: float = 0.0) -> JobStatus:
        self._alive()
        program = self._jobs[job]
        if wait_s > 0 and isinstance(program, Program):
            await asyncio.wait({program.exited}, timeout=wait_s)
        return self._status(program)

    def _status(self, program: Program | ExecResult) -> JobStatus:
        self._alive()
        if isinstance(program, ExecResult):
            return JobStatus(program.exit_code, program.stdout, program.stderr)
        if program.exited.done() and program.exit_code is None:
            raise SandboxDied(f"the exit status of process {program.pid} was taken by another part of this process")
        return JobStatus(program.exit_code, program.stdout.value(), program.stderr.value())

    async def stop(self, job: str) -> None:
        self._alive()
        program = self._jobs[job]
        if isinstance(program, Program):
            await program.end()
            await self._in_thread(partial(kill_marked, f"{MARK}={self._mark}", program.pid))

    async def quiesce(self, keep: Sequence[str] = ()) -> None:
        self._alive()
        kept = {program.pid for name in keep if isinstance(program := self._jobs[name], Program)}
        await asyncio.gather(*(program.end() for program in self._programs if program.pid not in kept))
        await self._in_thread(partial(kill_marked, f"{MARK}={self._mark}", spared=frozenset(kept)))

    async def export(self, paths: Sequence[str]) -> str:
        await self.quiesce()
        wanted = ["."] if {EVERYTHING, SNAPSHOT} & set(paths) else [self._below(path) for path in paths]
        layer = await self._keep(Path(self._work), wanted, self._spec.disk_bytes)
        await self.close()
        return layer

    def _below(self, path: str) -> str:
        """A path relative to the working directory; this backend hands over nothing else."""
        host = self._host_path(path)
        if host != self._work and not host.startswith(self._work + "/"):
            raise ValueError(f"the local sandbox exports only what is below {self._workdir}, not {path}")
        return posixpath.relpath(host, self._work)

    async def connect(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> LocalStream:
        stream = await open_stream(
            lambda end: self._spawn(argv, None, cwd, env, user, stream=end), self._status, self._end_stream
        )
        self._streams.add(stream)
        return stream

    async def _end_stream(self, stream: LocalStream) -> None:
        program = stream.program
        self._streams.discard(stream)
        if isinstance(program, Program) and self._closing is None:
            await program.end()
            await self._in_thread(partial(kill_marked, f"{MARK}={self._mark}", program.pid))

    async def listen(self, port: int = 0) -> Listener:
        """On the host's own 127.0.0.1: this backend has no other, so ask for a free port."""
        self._alive()
        sock = socket.create_server(("127.0.0.1", port), backlog=128)
        return Listener(sock, int(sock.getsockname()[1]))

    async def close(self) -> None:
        if self._closing is None:
            self._closing = asyncio.get_running_loop().create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        await asyncio.gather(*(program.end() for program in self._programs))
        await asyncio.gather(*(stream.cut() for stream in self._streams))
        if self._used:
            await asyncio.to_thread(kill_marked, f"{MARK}={self._mark}")
        for program in self._programs:
            program.release()
        if self._busy:
            await asyncio.wait(self._busy, timeout=CLOSE_S)
        removal = asyncio.get_running_loop().run_in_executor(None, files.remove, self._root)
        await asyncio.wait({removal}, timeout=CLOSE_S)
        self._on_close(self)

    def _alive(self) -> None:
        if self._closing is not None:
            raise SandboxDied("the sandbox is closed")

    def _spawn(
        self,
        argv: Sequence[str],
        stdin: bytes | None,
        cwd: str | None,
        env: Mapping[str, str] | None,
        user: str | None,
        stream: int | None = None,
    ) -> Program | ExecResult:
        """The started program, or what a shell would say where it cannot be started."""
        self._alive()
        check_user(user)
        if not argv:
            raise ValueError("a command needs at least its program")
        self._used = True
        folder = self._host_path(cwd or ".")
        if "\0" in folder or not os.path.isdir(folder):
            return ExecResult(126, stderr=f"{cwd}: no such directory\n".encode())
        program = self._host_path(argv[0]) if argv[0].startswith(self._workdir + "/") else argv[0]
        try:
            whole_env = {**self._env, **(env or {})}
            started = Program([program, *argv[1:]], cwd=folder, env=whole_env, stdin=stdin, stream=stream)
        except (OSError, ValueError) as error:
            return _not_started(argv[0], error)
        self._programs = {program for program in self._programs if not program.quiet} | {started}
        return started

    def _host_path(self, path: str) -> str:
        whole = posixpath.normpath(posixpath.join(self._workdir, path))
        if whole == self._workdir:
            return self._work
        inside = self._workdir.rstrip("/") + "/"
        if self._workdir != "/" and whole.startswith(inside):
            return posixpath.join(self._work, whole[len(inside) :])
        return whole

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """Runs file work that goes on when its caller is cancelled; `close` waits for it."""
        self._alive()
        future = asyncio.get_running_loop().run_in_executor(None, work)
        self._busy.add(future)  # type: ignore[arg-type]
        future.add_done_callback(self._busy.discard)
        return await asyncio.shield(future)


def _result(program: Program, duration_s: float) -> ExecResult:
    return ExecResult(
        -9 if program.exit_code is None else program.exit_code,
        program.stdout.value(),
        program.stderr.value(),
        truncated=program.stdout.truncated or program.stderr.truncated,
        duration_s=duration_s,
    )


_HOST_ERRNOS = frozenset({errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE})


def _not_started(program: str, error: OSError | ValueError) -> ExecResult:
    """127 where there is no such program, 126 where it cannot be run; a fault of the host is no result."""
    if isinstance(error, OSError) and error.errno in _HOST_ERRNOS:
        raise SandboxStartError(f"the host cannot start {program}: {error.strerror}") from error
    reason = error.strerror if isinstance(error, OSError) else str(error)
    missing = isinstance(error, FileNotFoundError | NotADirectoryError)
    return ExecResult(127 if missing else 126, stderr=f"{program}: {reason}\n".encode())


def check_user(user: str | None) -> None:
    if user is not None and user not in (str(os.geteuid()), pwd.getpwuid(os.geteuid()).pw_name):
        raise SandboxUnavailable(f"the local sandbox cannot run commands as {user!r}, only as its own user")
