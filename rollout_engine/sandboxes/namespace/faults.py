"""What goes wrong with a box, as the contract of sandboxes names it: how it ended, and what its answers say."""

from __future__ import annotations

import errno
import os
from typing import Any

from rollout_engine.errors import SandboxDied, SandboxFull, SandboxOutOfMemory, SandboxUnavailable, TooLarge

_NO_SUCH_PATH = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP)
_NO_FILE = (errno.ENXIO, errno.EPERM, errno.EACCES)
_FULL = (errno.ENOSPC, errno.EDQUOT)


class End:
    """Why a box is gone, and what the kernel killed in it for memory until then."""

    def __init__(self) -> None:
        self.why = "the sandbox ended by itself, or was killed from outside"
        self.oom_commands = 0
        self._told = 0
        self._out_of_memory = False

    def count(self, kernel_kills: int) -> None:
        """A command ended under which the kernel killed so often."""
        self.oom_commands += 1
        self._told += kernel_kills

    def learn(self, kernel_kills: int) -> None:
        """The box has ended, and the kernel killed in it so often in all.

        Kills that no command's end has told of came with this end; earlier ones do not explain it.
        """
        if kernel_kills > self._told:
            self.why = "the sandbox was ended by the kernel, which was out of the memory that it may use"
            self._out_of_memory = True

    def error(self) -> SandboxDied:
        return SandboxOutOfMemory(self.why) if self._out_of_memory else SandboxDied(self.why)


def raise_error(header: dict[str, Any], path: str) -> None:
    """Raises what an answer says went wrong; `path` is the file that was asked for."""
    number, text = header.get("errno"), str(header.get("text", ""))
    if number in _NO_SUCH_PATH:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    if number in _NO_FILE:
        raise PermissionError(errno.EACCES, text, path)
    if header.get("error") == "user":
        raise SandboxUnavailable(text)
    if number == errno.EFBIG:
        raise TooLarge(text)
    if "error" in header:
        raise ValueError(text)
    if number in _FULL:
        raise SandboxFull(number, text, path)
    if number is not None:
        raise OSError(number, text, path)
