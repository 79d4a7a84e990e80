"""The first process of a new box, from its birth in fresh namespaces to serving commands. Never returns."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import NoReturn

from rollout_engine.sandboxes.namespace.helper import limits, root, users, wire
from rollout_engine.sandboxes.namespace.helper import syscalls as sys
from rollout_engine.sandboxes.namespace.helper.plan import Plan, read

BOUNDING = (
    sys.CAP_CHOWN, sys.CAP_DAC_OVERRIDE, sys.CAP_FOWNER, sys.CAP_FSETID, sys.CAP_KILL, sys.CAP_SETGID,
    sys.CAP_SETUID, sys.CAP_NET_BIND_SERVICE,
)  # fmt: skip
"""All that root in a box can do beyond other users; within its own user namespace where there is one."""


_FAMILY, _KIND = int(socket.AF_UNIX), int(socket.SOCK_SEQPACKET)
_KEPT = sys.capabilities(BOUNDING)

Serve = Callable[[socket.SocketType, int, Plan, "int | None", int, str], None]
"""What a box does once it is closed in: with its socket, what ends with the launcher, its plan, its counter of
out-of-memory kills, its own oom score, and what holds its limits. Returns, or ends the process, at its end."""


def live(serve: Serve, come: int, launcher: int, library: int, seccomp: bytes) -> NoReturn:
    """Waits on `come` to be told what it is, builds its root, gives up its powers, and serves its host.

    The first message has the plan, the host's socket, and the control groups; the second, sent when the ids are
    mapped, the mounts. `launcher` is a pipe that ends with the launcher, `library` the standard library, or -1.
    """
    channel: socket.SocketType | None = None
    try:
        close_others({come, launcher, library})
        go = _socket(come)
        first = wire.receive_order(go)
        plan = read(first.header["plan"])
        channel = _socket(first.fds[0])
        groups, oom = first.fds[1 : 1 + plan.groups], first.fds[1 + plan.groups :]
        _enter(groups)
        score = os.open("/proc/self/oom_score_adj", os.O_RDWR | os.O_CLOEXEC)
        mounts = wire.receive_order(go).fds
        go.close()
        _become_root(plan)
        if plan.network:
            sys.loopback_up()
        held = root.build(plan, mounts)
        socket.sethostname("box")
        _make_workdir(plan)
        _confine(plan, seccomp)
        enforced = limits.describe(plan.held, pid_max=held)
        serve(channel, launcher, plan, oom[0] if oom else None, score, enforced)
    except wire.Closed:
        pass
    except BaseException as error:
        if channel is not None:
            _say_failed(channel, error)
    finally:
        os._exit(0)


def _socket(descriptor: int) -> socket.SocketType:
    """Not `socket.socket`, whose own code costs a new box two dozen pages."""
    return socket.SocketType(_FAMILY, _KIND, 0, descriptor)


def _say_failed(channel: socket.SocketType, error: BaseException) -> None:
    try:
        wire.send(channel, {"failed": f"{type(error).__name__}: {error}"})
    except (wire.Closed, OSError):
        os._exit(1)


def close_others(keep: set[int]) -> None:
    """Everything else that the parent holds goes, before anything else happens."""
    low = 3
    for fd in sorted(keep - {-1}):
        os.closerange(low, fd)
        low = fd + 1
    os.closerange(low, 2**30)


def _enter(groups: list[int]) -> None:
    """Enters the control groups by descriptors that the launcher opened, with the launcher's rights."""
    for fd in groups:
        os.write(fd, b"0")
        os.close(fd)


def _become_root(plan: Plan) -> None:
    if plan.ids > 1:
        os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    os.setsid()
    os.umask(0o22)


def _make_workdir(plan: Plan) -> None:
    """The working directory, made where it is missing and then the user's."""
    if not os.path.isdir(plan.workdir):
        os.makedirs(plan.workdir)
        user = users.find(plan.user, plan.ids)
        os.chown(plan.workdir, user.uid, user.gid)


def _confine(plan: Plan, seccomp: bytes) -> None:
    """Gives up what cannot be given up later. Every command inherits it; none can get it back."""
    limits.set_rlimits(plan.limits, plan.held)
    sys.bound_capabilities(BOUNDING)
    sys.prctl(sys.PR_CAP_AMBIENT, sys.PR_CAP_AMBIENT_CLEAR_ALL)
    sys.capset(_KEPT)
    sys.prctl(sys.PR_SET_NO_NEW_PRIVS, 1)
    if seccomp:
        sys.load_seccomp(seccomp)
    users.die_with_parent()
