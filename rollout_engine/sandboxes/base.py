"""The contract of a sandbox: where a task's commands run. One contract suite holds for every backend."""

from __future__ import annotations

import asyncio
import os
import posixpath
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from rollout_engine.errors import SandboxStartError
from rollout_engine.types import ExecResult

MAX_OUTPUT_BYTES = 10 * 2**20
"""A stream of one command keeps this much: its tail."""
MAX_READ_BYTES = 100 * 2**20
"""The largest file that `read_file` returns."""
MAX_FILES = 100_000
"""Files and directories that are copied at once."""
MAX_CHUNK_BYTES = 64 * 1024
"""The most that one `Stream.read` returns."""


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """What a sandbox is made from. Frozen and picklable; live things stay with the provider.

    `layers` are read-only trees under the root, lowest first, as the provider knows them (a prepared task,
    a workspace exported to its verifier); most sandboxes have none.
    """

    image: str | None = None
    directory: str | None = None
    tar: str | None = None
    layers: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    workdir: str = "/workspace"
    user: str | None = None
    network: str = "none"
    memory_bytes: int = 2 * 2**30
    cpus: float = 1.0
    processes: int = 512
    disk_bytes: int = 512 * 2**20
    inodes: int = 100_000
    require_limits: bool = False
    mounts: tuple[tuple[str, str], ...] = ()
    """Directories of the node that are seen in the sandbox, as (directory, absolute path inside): programs that are too
    large to copy. Nothing that happens in the sandbox reaches them."""
    trusted: bool = False
    """The task's code may run without isolation, where `auto` finds no other way."""
    label: str = ""
    """Names the rollout in labels, logs and the reaper."""


def check_mounts(spec: SandboxSpec) -> None:
    """Raises SandboxStartError where a mount's directory is not there, or its place is no plain absolute path."""
    for directory, place in spec.mounts:
        if not os.path.isdir(directory):
            raise SandboxStartError(f"the directory {directory}, to be seen at {place}, is not there on this node")
        if not place.startswith("/") or posixpath.normpath(place) != place or place == "/":
            raise SandboxStartError(f"{place!r} is no place for a directory: give a plain absolute path")


EVERYTHING = "*"
"""`export`ed: all that was changed since the sandbox was opened, wherever it is."""
SNAPSHOT = "/"
"""`export`ed: the same, but for the directories of programs (/usr, /bin, /lib, ...) and what the loader, shells and
Python read from /etc at their start: whoever sees the layer runs the programs of its own base."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """What a prepared sandbox holds beyond its spec: files put in place, then commands run by `sh -c`."""

    files: Mapping[str, bytes] = field(default_factory=dict)
    commands: tuple[str, ...] = ()
    timeout_s: float = 600.0
    """Of one command."""


@dataclass(frozen=True, slots=True)
class JobStatus:
    """A background job: `exit_code` None while it runs; the output so far (tails)."""

    exit_code: int | None
    stdout: bytes = b""
    stderr: bytes = b""


@dataclass(frozen=True, slots=True)
class Listener:
    """What `listen` opened: programs in the sandbox reach `port` of their 127.0.0.1, and the host accepts on `sock`.

    `sock` may be a Unix socket, to which the bytes are led.
    """

    sock: socket.socket
    port: int
    leave: Callable[[], Awaitable[None]] | None = None
    """The backend's own part of the end."""
    over: asyncio.Future[None] | None = None
    """Fails with SandboxError once no program can reach `port` any more though nobody closed it; None: see `poll`, the
    sandbox's own end is the only one."""

    async def close(self) -> None:
        """Nobody is let in any more, and the port is free; may be called twice."""
        self.sock.close()
        if self.leave is not None:
            await self.leave()


class Stream(Protocol):
    """A program in the sandbox whose standard input and output are read and written while it runs."""

    async def read(self) -> bytes:
        """What it has written: some bytes, at most MAX_CHUNK_BYTES; none once its output has ended."""
        ...

    async def write(self, data: bytes) -> None:
        """Writes to its standard input, as fast as it reads. Raises BrokenPipeError once nobody reads."""
        ...

    async def poll(self) -> JobStatus:
        """Its exit code, and the tail of its standard error; the standard output went to `read`."""
        ...

    async def close(self) -> None:
        """Kills it and its group, and ends both streams; may be called twice."""
        ...


class Sandbox(Protocol):
    """A live sandbox. Whoever opened it closes it; `close` may be called twice.

    Faults of the provider raise SandboxError (SandboxDied once it is gone); they are never command output. So is not
    SandboxOutOfMemory: the kernel ended all of it for what ran there.
    """

    @property
    def isolated(self) -> bool:
        """Whether it has files and processes of its own, which code that nobody trusts cannot leave."""
        ...

    @property
    def limits_enforced(self) -> str:
        """Which limits hold and by what, such as `memory:cgroup,processes:pid_max,disk:tmpfs`; `none`."""
        ...

    @property
    def oom_kills(self) -> int | None:
        """Commands and jobs so far under which the kernel killed for memory; None where nobody counts."""
        ...

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
        """Runs a command to its end. A non-zero exit is a result (127: no such program).

        Ends with the command's own exit, not with the end of its output: what a background child still
        writes is dropped. Raises ExecTimeout with the partial output after killing the command's group.
        """
        ...

    async def read_file(self, path: str, *, max_bytes: int = MAX_READ_BYTES) -> bytes:
        """Raises FileNotFoundError, IsADirectoryError, PermissionError; TooLarge above `max_bytes`."""
        ...

    async def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Writes a whole file and makes its parents. Raises SandboxFull where its own disk is full."""
        ...

    async def upload(self, source: Path, path: str) -> None:
        """Copies a host's file or directory into the sandbox."""
        ...

    async def download(
        self, path: str, target: Path, *, max_bytes: int = MAX_READ_BYTES, max_files: int = MAX_FILES
    ) -> None:
        """Copies a file or directory out. Regular files and directories only; links are not followed.

        All of it, or nothing: raises TooLarge above a limit, and `target` is then as it was before.
        """
        ...

    async def start(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> str:
        """Starts a background job and returns its name."""
        ...

    async def poll(self, job: str, *, wait_s: float = 0.0) -> JobStatus:
        """How a job stands; waits for its end, but not for longer. Raises KeyError for one that was never started."""
        ...

    async def stop(self, job: str) -> None:
        """Kills a job and its group; no error where it has ended."""
        ...

    async def quiesce(self, keep: Sequence[str] = ()) -> None:
        """Kills every process in the sandbox but those of the jobs named (and what these started)."""
        ...

    async def export(self, paths: Sequence[str]) -> str:
        """Ends the sandbox, and makes what is at `paths` a layer for other sandboxes of the same provider.

        A directory comes as the sandbox saw it; EVERYTHING and SNAPSHOT as what was changed. The layer is read-only to
        them and lives until `release`. Raises TooLarge where it is larger than the sandbox's own disk limit.
        """
        ...

    async def connect(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> Stream:
        """Starts a program to talk to. One that cannot be started has ended: `poll` says 126 or 127, and why.

        Whoever connected closes; `close` of the sandbox ends it as well.
        """
        ...

    async def listen(self, port: int = 0) -> Listener:
        """Listens on the sandbox's own 127.0.0.1, also where it has no network; 0: a free port.

        Whoever asked closes it; `close` of the sandbox ends it as well, and `quiesce` may. Raises OSError where the
        port is taken, SandboxUnavailable where this provider cannot.
        """
        ...

    async def close(self) -> None:
        """Ends everything in the sandbox and removes it, in bounded time."""
        ...


@runtime_checkable
class RunsPython(Protocol):
    """What a sandbox may be beside: one that runs Python code without the start of an interpreter."""

    @property
    def python_modules(self) -> frozenset[str] | None:
        """What such code may import; anything else needs the sandbox's own interpreter. None: it cannot run any."""
        ...

    async def run_python(self, program: bytes, *, stdin: bytes, timeout_s: float | None = None) -> ExecResult:
        """Runs a marshalled code object as `exec` runs a command, in the engine's own version of Python.

        Its module is `__main__`; standard input and output are its own, and nothing of it outlives it.
        """
        ...


class SandboxProvider(Protocol):
    """Makes sandboxes of one kind on one node."""

    @property
    def name(self) -> str: ...

    async def open(self, spec: SandboxSpec) -> Sandbox:
        """A live sandbox. Raises SandboxStartError, SandboxUnavailable, SandboxAway."""
        ...

    async def prepare(self, spec: SandboxSpec, recipe: Recipe) -> SandboxSpec:
        """A spec whose sandboxes find the recipe carried out; that happens once while the result is kept.

        Raises SetupError where a command fails.
        """
        ...

    async def release(self, layer: str) -> None:
        """Lets go of an exported layer; sandboxes that use it keep it for their life. No error where it is gone."""
        ...

    async def close(self) -> None:
        """Removes whatever is left of this provider's sandboxes."""
        ...
