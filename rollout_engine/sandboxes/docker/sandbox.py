"""One container as a sandbox: the contract over an executor and the archive API."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import posixpath
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from docker import APIClient
from docker.errors import APIError, NotFound

from rollout_engine.disk import full, is_full
from rollout_engine.errors import ExecTimeout, SandboxFull
from rollout_engine.sandboxes.base import EVERYTHING, MAX_FILES, MAX_READ_BYTES, JobStatus, Listener, SandboxSpec
from rollout_engine.sandboxes.docker import archive, files
from rollout_engine.sandboxes.docker.archive import Layer
from rollout_engine.sandboxes.docker.engine import Engine
from rollout_engine.sandboxes.docker.failures import died, translate
from rollout_engine.sandboxes.docker.files import Ids
from rollout_engine.sandboxes.docker.running import Command, Ending, Executor, Running, Talk
from rollout_engine.sandboxes.docker.stream import DockerStream
from rollout_engine.types import ExecResult

T = TypeVar("T")


class DockerSandbox:
    """A live container. `listen`, `keep`, `remove` and `closed` are the provider's: they open a listener, take a layer,
    and the container, and it out of the books."""

    def __init__(
        self,
        engine: Engine,
        executor: Executor,
        *,
        container: str,
        name: str,
        spec: SandboxSpec,
        ids: Ids,
        limits_enforced: str,
        listen: Callable[[int], Awaitable[Listener]],
        keep: Callable[[Layer], str],
        remove: Callable[[], Awaitable[None]],
        closed: Callable[[DockerSandbox], None],
    ) -> None:
        self.container, self.name = container, name
        self._engine, self._executor = engine, executor
        self._spec, self._workdir, self._ids, self._limits = spec, spec.workdir, ids, limits_enforced
        self._listen, self._keep, self._remove, self._closed = listen, keep, remove, closed
        self._jobs: dict[str, Running] = {}
        self._numbers = itertools.count(1)
        self._removing: asyncio.Future[None] | None = None
        self._kills: set[asyncio.Task[None]] = set()

    @property
    def isolated(self) -> bool:
        return True

    @property
    def limits_enforced(self) -> str:
        return self._limits

    @property
    def oom_kills(self) -> int | None:
        return self._executor.oom_kills if "memory:cgroup" in self._limits else None

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
        started = time.monotonic()
        running = await self._spawn(self._command(argv, cwd, env, user, stdin))
        try:
            async with asyncio.timeout(timeout_s):
                ending = await running.wait()
        except TimeoutError:
            await running.kill()
            ended = running.ending()
            partial = _result(running, Ending(-9, ended is not None and ended.oom), started)
            raise ExecTimeout(f"{argv[0]} did not end within {timeout_s:g} s", partial) from None
        except asyncio.CancelledError:
            self._kill_behind(running)
            raise
        self._check_open()
        return _result(running, ending, started)

    async def read_file(self, path: str, *, max_bytes: int = MAX_READ_BYTES) -> bytes:
        where = self._file(path)
        return await self._executor.read(where, max_bytes)

    async def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        where = self._file(path)
        try:
            if not await self._executor.write(where, data, mode):
                await self._files("write", lambda api: files.write(api, self.container, where, data, mode, self._ids))
        except OSError as error:
            if not is_full(error):
                raise
            if self._spec.require_limits:
                raise SandboxFull(error.errno, error.strerror, path) from error
            # Without a limit it is not the sandbox's fault.
            raise full(error, "the Docker daemon's disk", "make room there (docker system prune)") from error

    async def upload(self, source: Path, path: str) -> None:
        where = self._file(path)
        await self._files("upload", lambda api: files.upload(api, self.container, source, where, self._ids))

    async def download(
        self, path: str, target: Path, *, max_bytes: int = MAX_READ_BYTES, max_files: int = MAX_FILES
    ) -> None:
        where = self._file(path)
        await self._files(
            "download", lambda api: files.download(api, self.container, where, target, max_bytes, max_files)
        )

    async def start(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> str:
        running = await self._spawn(self._command(argv, cwd, env, user, None))
        job = f"job-{next(self._numbers)}"
        self._jobs[job] = running
        return job

    async def poll(self, job: str, *, wait_s: float = 0.0) -> JobStatus:
        self._check_open()
        running = self._jobs[job]
        if wait_s > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await running.wait()
            self._check_open()
        ending = running.ending()
        code = ending.exit_code if ending is not None else None
        return JobStatus(code, running.stdout.value(), running.stderr.value())

    async def stop(self, job: str) -> None:
        self._check_open()
        await self._jobs[job].kill()

    async def listen(self, port: int = 0) -> Listener:
        self._check_open()
        return await self._listen(port)

    async def quiesce(self, keep: Sequence[str] = ()) -> None:
        self._check_open()
        await self._executor.quiesce([self._jobs[job] for job in keep])

    async def export(self, paths: Sequence[str]) -> str:
        self._check_open()
        await self._executor.freeze()
        wanted = [path if path == EVERYTHING else posixpath.normpath(self._absolute(path)) for path in paths]
        taking = asyncio.ensure_future(
            self._files("export", lambda api: archive.take(api, self.container, wanted, self._spec))
        )
        try:
            name = self._keep(await asyncio.shield(taking))
        except asyncio.CancelledError:
            taking.add_done_callback(_drop)
            raise
        await self.close()
        return name

    async def connect(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> DockerStream:
        command = self._command(argv, cwd, env, user, None)
        connecting = asyncio.ensure_future(self._executor.connect(command))
        try:
            return DockerStream(await asyncio.shield(connecting), self._check_open)
        except asyncio.CancelledError:
            self._kill_behind(connecting)
            raise

    async def close(self) -> None:
        """Removes the container even where the caller is cancelled meanwhile; a second call waits for the first."""
        if self._removing is None:
            self._removing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._removing)

    async def _close(self) -> None:
        await self._executor.close()
        await self._remove()
        self._closed(self)

    def _command(
        self,
        argv: Sequence[str],
        cwd: str | None,
        env: Mapping[str, str] | None,
        user: str | None,
        stdin: bytes | None,
    ) -> Command:
        self._check_open()
        if not argv:
            raise ValueError("a command needs a program")
        return Command(list(argv), self._absolute(cwd or "."), dict(env or {}), user or "", stdin)

    async def _spawn(self, command: Command) -> Running:
        spawning = asyncio.ensure_future(self._executor.spawn(command))
        try:
            return await asyncio.shield(spawning)
        except asyncio.CancelledError:
            self._kill_behind(spawning)
            raise

    def _kill_behind(self, what: Running | asyncio.Future[Running] | asyncio.Future[Talk]) -> None:
        """Kills after the caller was cancelled, without making it wait; `close` ends whatever is left."""

        async def kill() -> None:
            if isinstance(what, asyncio.Future):
                await (await what).kill()
            else:
                await what.kill()

        task = asyncio.create_task(kill())
        self._kills.add(task)
        task.add_done_callback(self._killed)

    def _killed(self, task: asyncio.Task[None]) -> None:
        self._kills.discard(task)
        if not task.cancelled():
            task.exception()  # seen: a sandbox that died has nothing left to kill

    def _check_open(self) -> None:
        if self._removing is not None:
            raise died(self.name, "it was closed")

    def _absolute(self, path: str) -> str:
        return posixpath.join(self._workdir, path)

    def _file(self, path: str) -> str:
        self._check_open()
        if "\0" in path:
            raise FileNotFoundError(errno.ENOENT, "a path with a null byte", path)
        return self._absolute(path)

    async def _files(self, what: str, function: Callable[[APIClient], T]) -> T:
        try:
            return await self._engine.call(what, function)
        except NotFound as error:
            raise died(self.name) from error
        except APIError as error:
            raise translate(error, what) from error


def _result(running: Running, ending: Ending, started: float) -> ExecResult:
    stdout, stderr = running.stdout.value(), running.stderr.value()
    truncated = running.stdout.truncated or running.stderr.truncated
    seconds = time.monotonic() - started
    return ExecResult(ending.exit_code, stdout, stderr, truncated, ending.oom, seconds, ending.crowded)


def _drop(taking: asyncio.Future[Layer]) -> None:
    """What was exported for one who was cancelled meanwhile."""
    if not taking.cancelled() and taking.exception() is None:
        taking.result().close()
