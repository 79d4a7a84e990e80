"""Starts one command in a box: in a session of its own, with three descriptors and the user's rights."""

from __future__ import annotations

import errno
import os
import signal
import stat
import subprocess

from .users import User

_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)


def spawn(argv: list[str], cwd: str, env: dict[str, str], user: User, fds: list[int], *, groups: bool) -> int:
    """The command's process id. Raises OSError, with `filename` where that is what failed, and ValueError.

    `groups`: whether this box can set supplementary groups. Other users than root cost a fork, root only a vfork.
    """
    if user.uid == 0:
        return _spawn_as_root(argv, cwd, env, fds)
    process = subprocess.Popen(
        argv, stdin=fds[0], stdout=fds[1], stderr=fds[2], cwd=cwd, env=env, start_new_session=True,
        user=user.uid, group=user.gid, extra_groups=user.groups if groups else None,
    )  # fmt: skip
    process.returncode = 0  # the supervisor waits for it
    return process.pid


def _spawn_as_root(argv: list[str], cwd: str, env: dict[str, str], fds: list[int]) -> int:
    os.chdir(cwd)
    try:
        actions = [(os.POSIX_SPAWN_DUP2, fd, number) for number, fd in enumerate(fds)]
        program = _find(argv[0], env.get("PATH", os.defpath))
        return os.posix_spawn(program, argv, env, file_actions=actions, setsid=True, setsigdef=_IGNORED_BY_PYTHON)
    finally:
        os.chdir("/")


def _find(name: str, path: str) -> str:
    if "/" in name:
        return name
    found = errno.ENOENT
    for directory in path.split(":"):
        program = f"{directory or '.'}/{name}"
        try:
            mode = os.stat(program).st_mode
        except OSError:
            continue
        if stat.S_ISREG(mode) and mode & 0o111:
            return program
        found = errno.EACCES
    raise OSError(found, os.strerror(found), name)
