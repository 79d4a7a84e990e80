"""What every way of running a command in a container has in common: the order, the run, its ending."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from rollout_engine.sandboxes.docker.capture import Outlet, Tail


@dataclass(frozen=True, slots=True)
class Command:
    """A command and where it runs. `user` empty: the sandbox's own."""

    argv: Sequence[str]
    cwd: str
    env: Mapping[str, str] = field(default_factory=dict)
    user: str = ""
    stdin: bytes | None = None


class Ending(NamedTuple):
    """How a command ended: a negative code is a signal."""

    exit_code: int
    oom: bool = False
    crowded: bool = False
    """It was never started, for want of a process."""


class Running(Protocol):
    """One command under way."""

    stdout: Tail
    stderr: Tail

    async def wait(self) -> Ending:
        """Its ending; may be awaited again. Raises SandboxDied where the container ended first."""
        ...

    def ending(self) -> Ending | None:
        """None while it runs. Raises as `wait` does."""
        ...

    async def kill(self) -> None:
        """Kills its process group, also what is left of it after the command has ended."""
        ...


class Talk(Running, Protocol):
    """A command whose output is read, and whose input is written, while it runs."""

    @property
    def outlet(self) -> Outlet: ...

    async def write(self, data: bytes) -> None:
        """As fast as the program reads. Raises BrokenPipeError once nobody reads."""
        ...

    def cut(self) -> None:
        """Ends both directions here."""
        ...


class Executor(Protocol):
    """One way of running commands in one container."""

    @property
    def oom_kills(self) -> int:
        """Commands so far under which the kernel killed for memory."""
        ...

    async def spawn(self, command: Command) -> Running: ...

    async def connect(self, command: Command) -> Talk:
        """Starts a command to talk to."""
        ...

    async def read(self, path: str, max_bytes: int) -> bytes:
        """A regular file's bytes. Raises OSError of the kind that `open` would raise, TooLarge above `max_bytes`."""
        ...

    async def write(self, path: str, data: bytes, mode: int) -> bool:
        """Writes a whole file; False where the caller must send it by the archive API."""
        ...

    async def cut(self, paths: Sequence[str]) -> None:
        """Removes whatever is at these paths, as root; links are not followed. Only before anything else ran."""
        ...

    async def quiesce(self, keep: Sequence[Running]) -> None:
        """Kills every process but those of these commands and what they started."""
        ...

    async def freeze(self) -> None:
        """Ends whatever runs, so that the files stay as they are; nothing can be started any more."""
        ...

    async def close(self) -> None: ...


def exit_code(status: int) -> int:
    """A shell's and the Engine's form of a signal (128 + n) as the contract's (-n)."""
    return 128 - status if 128 < status <= 192 else status
