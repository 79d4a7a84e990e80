"""Starts one command in a box: in a session of its own, with three descriptors and the user's rights."""

from __future__ import annotations

import errno
import os
import signal
import stat
from typing import NoReturn

from rollout_engine.sandboxes.namespace.helper import programs
from rollout_engine.sandboxes.namespace.helper.users import User

_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)


def spawn(argv: list[str], cwd: str, env: dict[str, str], user: User, fds: list[int], *, groups: bool) -> int:
    """The command's process id. Raises OSError, with `filename` where that is what failed, and ValueError.

    `groups`: whether this box can set supplementary groups. Other users than root cost a fork, root only a vfork.
    """
    if user.uid == 0:
        return _spawn_as_root(argv, cwd, env, fds)
    told, tell = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        _become(argv, cwd, env, user, fds, tell, groups=groups)
    os.close(tell)
    said = os.read(told, 8192)
    os.close(told)
    if said:
        os.waitpid(pid, 0)
        number, _, name = os.fsdecode(said).partition(" ")
        raise OSError(int(number), os.strerror(int(number)), name)
    return pid


def fork_python(
    program: bytes, cwd: str, env: dict[str, str], user: User, fds: list[int], library: int, *, groups: bool
) -> int:
    """As `spawn`, for a marshalled Python program that needs no interpreter of its own (see programs)."""
    pid = os.fork()
    if pid:
        return pid
    try:
        _take_place(cwd, user, fds, groups=groups)
        programs.run(program, env, library)
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}\n".encode(errors="replace")[:4096])
    finally:
        os._exit(126)


def _take_place(cwd: str, user: User, fds: list[int], *, groups: bool) -> None:
    """What makes a fork of the supervisor a command: its session, its user, its descriptors, its signals."""
    signal.set_wakeup_fd(-1)
    os.setsid()
    if groups:
        os.setgroups(user.groups)
    os.setresgid(user.gid, user.gid, user.gid)
    os.setresuid(user.uid, user.uid, user.uid)
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
    os.chdir(cwd)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _become(
    argv: list[str], cwd: str, env: dict[str, str], user: User, fds: list[int], tell: int, *, groups: bool
) -> NoReturn:
    """In a fork of the supervisor: the command, or word of why not."""
    try:
        _take_place(cwd, user, fds, groups=groups)
        for ignored in _IGNORED_BY_PYTHON:
            signal.signal(ignored, signal.SIG_DFL)
        os.execve(_find(argv[0], env.get("PATH", os.defpath)), argv, env)
    except OSError as error:
        os.write(tell, os.fsencode(f"{error.errno} {error.filename or argv[0]}")[:4096])
    except ValueError:
        os.write(tell, os.fsencode(f"{errno.EINVAL} {argv[0]}")[:4096])
    finally:
        os._exit(127)


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
