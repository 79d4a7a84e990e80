"""The first process of a new box, from its birth in fresh namespaces to serving commands. Never returns."""

from __future__ import annotations

import gc
import os
import signal
import socket
from collections.abc import Callable
from typing import Any, NoReturn

from . import limits, root, users, wire
from . import syscalls as sys

BOUNDING = (
    sys.CAP_CHOWN, sys.CAP_DAC_OVERRIDE, sys.CAP_FOWNER, sys.CAP_FSETID, sys.CAP_KILL, sys.CAP_SETGID,
    sys.CAP_SETUID, sys.CAP_NET_BIND_SERVICE,
)  # fmt: skip
"""All that root in a box can do beyond other users; within its own user namespace where there is one."""


Serve = Callable[[socket.socket, int, dict[str, Any], "int | None", int], None]
"""What a box does once it is closed in: with its socket, what ends with the launcher, its plan, its counter of
out-of-memory kills, and its own oom score. Returns, or ends the process, at its end."""


def live(
    serve: Serve, plan: dict[str, Any], channel: socket.socket, go: socket.socket, launcher: int, groups: list[int],
    oom: int | None, seccomp: bytes,
) -> NoReturn:  # fmt: skip
    """Waits on `go` for its ids and mounts, builds its root, gives up its powers, and serves `channel`."""
    gc.disable()  # it would copy pages that are shared with the launcher and all other boxes
    try:
        keep = {channel.fileno(), go.fileno(), launcher, *groups, *([oom] if oom is not None else [])}
        _close_others(keep)
        _forget_signals()
        _enter(groups)
        score = os.open("/proc/self/oom_score_adj", os.O_RDWR | os.O_CLOEXEC)
        message = wire.receive_wait(go)
        go.close()
        _become_root(plan)
        if plan["network"] == "none":
            root.loopback_up()
        held = root.build(plan, message.fds)
        socket.sethostname("box")
        _make_workdir(plan)
        _confine(plan, seccomp)
        plan["enforced"] = limits.describe(set(plan["held"]), pid_max=held)
        serve(channel, launcher, plan, oom, score)
    except wire.Closed:
        pass
    except BaseException as error:
        _say_failed(channel, error)
    finally:
        os._exit(0)


def _say_failed(channel: socket.socket, error: BaseException) -> None:
    try:
        wire.send(channel, {"failed": f"{type(error).__name__}: {error}"})
    except (wire.Closed, OSError):
        os._exit(1)


def _close_others(keep: set[int]) -> None:
    """Everything that the launcher holds for other boxes goes, before anything else happens."""
    low = 3
    for fd in sorted(keep):
        os.closerange(low, fd)
        low = fd + 1
    os.closerange(low, 2**30)


def _forget_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)


def _enter(groups: list[int]) -> None:
    """Enters the control groups by descriptors that the launcher opened, with the launcher's rights."""
    for fd in groups:
        os.write(fd, b"0")
        os.close(fd)


def _become_root(plan: dict[str, Any]) -> None:
    if plan["ids"] > 1:
        os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    os.setsid()
    os.umask(0o22)


def _make_workdir(plan: dict[str, Any]) -> None:
    """The working directory, made where it is missing and then the user's."""
    if not os.path.isdir(plan["workdir"]):
        os.makedirs(plan["workdir"])
        user = users.find(plan["user"], plan["ids"])
        os.chown(plan["workdir"], user.uid, user.gid)


def _confine(plan: dict[str, Any], seccomp: bytes) -> None:
    """Gives up what cannot be given up later. Every command inherits it; none can get it back."""
    limits.set_rlimits(limits.Limits(*plan["limits"]), set(plan["held"]))
    sys.bound_capabilities(BOUNDING)
    sys.prctl(sys.PR_CAP_AMBIENT, sys.PR_CAP_AMBIENT_CLEAR_ALL)
    sys.capset(BOUNDING)
    sys.prctl(sys.PR_SET_NO_NEW_PRIVS, 1)
    if seccomp:
        sys.load_seccomp(seccomp)
    users.die_with_parent()
