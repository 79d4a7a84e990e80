"""What a box may use, and by what it is held: cgroup v2, else v1, else rlimits and the pid namespace.

A box's control groups lie below the launcher's own, in a directory whose name tells its owner (boot, pid, start
time), so that whoever comes later can remove what a killed launcher left.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from collections.abc import Collection
from typing import NamedTuple

PREFIX = "rollout-engine"
_UNIFIED = "cgroup2"
MIN_PID_MAX = 301
"""The kernel takes no smaller pid_max."""


class Limits(NamedTuple):
    """A box's limits, as its spec asks for them."""

    memory_bytes: int
    cpus: float
    processes: int
    disk_bytes: int
    inodes: int


class Controller(NamedTuple):
    """One limit's control: `root` is the directory that boxes' groups are made in."""

    name: str
    version: int
    root: str


def owner_name() -> str:
    """Names this process so that another can tell, later, whether it still lives."""
    return f"{PREFIX}.{_boot_id()}.{os.getpid()}.{_start_time(os.getpid())}"


def owner_alive(name: str) -> bool:
    """Whether the process that `owner_name` named still lives."""
    try:
        _, boot, pid, start = name.split(".")
        return boot == _boot_id() and start == _start_time(int(pid))
    except (ValueError, OSError):
        return False


def _boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read(8)


def _start_time(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    if fields[0] in "ZX":
        raise ProcessLookupError(pid)
    return fields[19]


def find_controllers() -> list[Controller]:
    """The controllers under which this process can make groups, v2 before v1."""
    mounts, own = _mounts(), _own_groups()
    found: dict[str, Controller] = {}
    for name in ("memory", "pids", "cpu"):
        controller = _find_v2(name, mounts, own) or _find_v1(name, mounts, own)
        if controller is not None:
            found[name] = controller
    return list(found.values())


def _mounts() -> dict[str, str]:
    """Where each v1 controller, and v2, is mounted."""
    found: dict[str, str] = {}
    with open("/proc/self/mounts") as file:
        for line in file:
            _, path, kind, options, *_ = line.split()
            if kind == _UNIFIED:
                found.setdefault(_UNIFIED, path)
            elif kind == "cgroup":
                for option in options.split(","):
                    found.setdefault(option, path)
    return found


def _own_groups() -> dict[str, str]:
    """This process's group in each hierarchy."""
    found: dict[str, str] = {}
    with open("/proc/self/cgroup") as file:
        for line in file:
            number, names, path = line.rstrip("\n").split(":", 2)
            for name in names.split(",") if number != "0" else [_UNIFIED]:
                found[name] = path
    return found


def _find_v1(name: str, mounts: dict[str, str], own: dict[str, str]) -> Controller | None:
    if name not in mounts or name not in own:
        return None
    for path in (mounts[name] + own[name].rstrip("/"), mounts[name]):
        if os.path.exists(f"{path}/cgroup.procs") and os.access(path, os.W_OK):
            return Controller(name, 1, path)
    return None


def _find_v2(name: str, mounts: dict[str, str], own: dict[str, str]) -> Controller | None:
    """v2 lets only a group without processes hand controllers down, so a sibling of our own group serves too."""
    if _UNIFIED not in mounts or _UNIFIED not in own:
        return None
    path = mounts[_UNIFIED] + own[_UNIFIED].rstrip("/")
    for candidate in (path, os.path.dirname(path)):
        if not candidate.startswith(mounts[_UNIFIED]) or not os.access(candidate, os.W_OK):
            continue
        with contextlib.suppress(OSError):
            if name not in _read(f"{candidate}/cgroup.controllers").split():
                continue
            if name not in _read(f"{candidate}/cgroup.subtree_control").split():
                write(f"{candidate}/cgroup.subtree_control", f"+{name}")
            return Controller(name, 2, candidate)
    return None


def count_oom(fd: int | None) -> int:
    """How often the kernel killed for memory in the box so far."""
    if fd is None:
        return 0
    with contextlib.suppress(OSError):
        for line in os.pread(fd, 512, 0).split(b"\n"):
            if line.startswith(b"oom_kill "):
                return int(line.split()[1])
    return 0


def set_rlimits(limits: Limits, held: Collection[str]) -> None:
    """What a process inherits; stands in for the groups that are not there."""
    _rlimit(resource.RLIMIT_CORE, 0)
    _rlimit(resource.RLIMIT_NOFILE, 65_536)
    _rlimit(resource.RLIMIT_MEMLOCK, 2**26)
    _rlimit(resource.RLIMIT_MSGQUEUE, 2**16)
    if "pids" not in held:
        _rlimit(resource.RLIMIT_NPROC, limits.processes + 1)
    if "memory" not in held:
        _rlimit(resource.RLIMIT_DATA, limits.memory_bytes)


def _rlimit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def describe(held: Collection[str], *, pid_max: bool) -> str:
    """What holds, and by what; what is not named is not held."""
    parts = [
        "memory:cgroup" if "memory" in held else "memory:rlimit_data",
        "processes:cgroup" if "pids" in held else "processes:pid_max" if pid_max else "processes:rlimit_nproc",
        *(["cpu:cgroup"] if "cpu" in held else []),
        "disk:tmpfs",
        "inodes:tmpfs",
    ]
    return ",".join(parts)


def dead_groups(controllers: list[Controller]) -> list[str]:
    """Directories of launchers that are dead."""
    roots = {controller.root for controller in controllers}
    names = [(root, name) for root in roots for name in _listdir(root) if name.startswith(f"{PREFIX}.")]
    return [f"{root}/{name}" for root, name in names if not owner_alive(name)]


def remove_dead(controllers: list[Controller]) -> None:
    """Removes the groups of dead launchers, and kills whatever still runs in them."""
    for owner in dead_groups(controllers):
        for box in [name for name in _listdir(owner) if os.path.isdir(f"{owner}/{name}")]:
            with contextlib.suppress(OSError):
                for pid in _read(f"{owner}/{box}/cgroup.procs").split():
                    os.kill(int(pid), signal.SIGKILL)
            rmdir(f"{owner}/{box}")
        rmdir(owner)


def _listdir(path: str) -> list[str]:
    try:
        return os.listdir(path)
    except OSError:
        return []


def rmdir(path: str) -> bool:
    try:
        os.rmdir(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()


def write(path: str, text: str) -> None:
    """Writes a control file in one system call."""
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)
