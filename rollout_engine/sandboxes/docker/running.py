"""What every way of running a command in a container has in common: the order, the run, its ending."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from rollout_engine.sandboxes.docker.capture import Tail


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


class Executor(Protocol):
    """One way of running commands in one container."""

    async def spawn(self, command: Command) -> Running: ...

    async def read(self, path: str, max_bytes: int) -> bytes:
        """A regular file's bytes. Raises OSError of the kind that `open` would raise, ValueError above `max_bytes`."""
        ...

    async def write(self, path: str, data: bytes, mode: int) -> bool:
        """Writes a whole file; False where the caller must send it by the archive API."""
        ...

    async def close(self) -> None: ...


def exit_code(status: int) -> int:
    """A shell's and the Engine's form of a signal (128 + n) as the contract's (-n)."""
    return 128 - status if 128 < status <= 192 else status
