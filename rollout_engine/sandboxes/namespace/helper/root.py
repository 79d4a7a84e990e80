"""Inside a new box's first process: puts its root together and makes it the only one."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from rollout_engine.sandboxes.namespace.helper import syscalls as sys
from rollout_engine.sandboxes.namespace.helper.plan import Plan

_PROC_READONLY = ("sys",)
_PROC_MASKED = ("keys", "key-users", "interrupts")
"""In a user namespace the rest of /proc that matters is the host root's, and box root is not that."""
_PLAIN_READONLY = ("irq", "bus", "sysrq-trigger", "fs")
_PLAIN_MASKED = ("kcore", "kallsyms", "kmsg", "timer_list", "sched_debug", "acpi", "scsi", "latency_stats")
_SAFE = sys.MS_NOSUID | sys.MS_NODEV
_TTY = 5
"""The group of terminals."""
_SCRATCHES = ("/tmp", "/run", "/mnt")


def build(plan: Plan, fds: list[int]) -> bool:
    """Makes the planned root; `fds` are the scratch, the devices, and the layers in the plan's order.

    Returns whether the number of processes is held by the pid namespace.
    """
    scratch = next(path for path in _SCRATCHES if os.path.isdir(path))
    sys.attach(fds[0], scratch)
    for index, fd in enumerate(fds[2:]):
        sys.attach(fd, f"{scratch}/l{index}")
    new = f"{scratch}/m"
    _overlays(plan, scratch, new)
    root = os.open(new, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    held = _proc(root, -1 if "pids" in plan.held else plan.limits.processes, plain=not plan.userns)
    _devices(root, fds[1], f"{scratch}/shm", tty=plan.ids > _TTY)
    for fd in (*fds, root):
        os.close(fd)
    os.chdir(new)
    sys.pivot_root(".", ".")
    sys.umount(".")
    os.chdir("/")
    return held


def _overlays(plan: Plan, scratch: str, new: str) -> None:
    """One overlay per tree, / first. A target is looked up inside the new root: no link leads out of it."""
    first = 0
    option = ",userxattr" if plan.userns else ""
    root = -1
    for index, (at, count) in enumerate(plan.trees):
        lowers = ":".join(f"{scratch}/l{layer}" for layer in reversed(range(first, first + count)))
        options = f"lowerdir={lowers},upperdir={scratch}/u{index},workdir={scratch}/w{index}{option}"
        first += count
        with _target(root, at, new) as target:
            sys.mount("overlay", target, "overlay", _SAFE, options)
        if root < 0:
            root = os.open(new, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    os.close(root)


@contextlib.contextmanager
def _target(root: int, at: str, new: str) -> Any:
    if root < 0:
        yield new
        return
    fd = open_directory(root, at)
    try:
        yield f"/proc/self/fd/{fd}"
    finally:
        os.close(fd)


def open_directory(root: int, path: str) -> int:
    """A directory inside the new root, made where it is missing."""
    with contextlib.suppress(FileNotFoundError):
        return sys.open_inside(root, path, os.O_PATH | os.O_DIRECTORY)
    parent, _, name = path.strip("/").rpartition("/")
    above = open_directory(root, f"/{parent}")
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, dir_fd=above)
        return sys.open_inside(root, path, os.O_PATH | os.O_DIRECTORY)
    finally:
        os.close(above)


def _proc(root: int, processes: int, *, plain: bool) -> bool:
    """/proc of the box's own processes, with what reaches the kernel read-only or covered."""
    with _target(root, "/proc", "") as target:
        sys.mount("proc", target, "proc", _SAFE | sys.MS_NOEXEC)
    fd = sys.open_inside(root, "/proc", os.O_PATH | os.O_DIRECTORY)
    proc = f"/proc/self/fd/{fd}"
    held = _hold_processes(f"{proc}/sys/kernel/pid_max", processes)
    for name in _PROC_READONLY + (_PLAIN_READONLY if plain else ()):
        _make_readonly(f"{proc}/{name}")
    for name in _PROC_MASKED + (_PLAIN_MASKED if plain else ()):
        _cover(f"{proc}/{name}")
    os.close(fd)
    return held


def _make_readonly(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        sys.mount(path, path, "", sys.MS_BIND)
        sys.mount("none", path, "", sys.MS_BIND | sys.MS_REMOUNT | sys.MS_RDONLY | _SAFE | sys.MS_NOEXEC)


def _cover(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        if os.path.isdir(path):
            sys.mount("tmpfs", path, "tmpfs", sys.MS_RDONLY | _SAFE, "size=4k")
        else:
            sys.mount("/dev/null", path, "", sys.MS_BIND)


def _hold_processes(path: str, processes: int) -> bool:
    """The pid namespace's own pid_max: as many processes, without a control group (Linux 6.14)."""
    if processes < 0:
        return False
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        os.write(fd, str(max(301, processes + 2)).encode())
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def _devices(root: int, tree: int, shm: str, *, tty: bool) -> None:
    with _target(root, "/dev", "") as target:
        sys.attach(tree, target)
    with _target(root, "/dev/shm", "") as target:
        sys.mount(shm, target, "", sys.MS_BIND)
    with _target(root, "/dev/pts", "") as target:
        group = ",gid=5" if tty else ""
        sys.mount(
            "devpts", target, "devpts", sys.MS_NOSUID | sys.MS_NOEXEC, f"newinstance,ptmxmode=0666,mode=620{group}"
        )
