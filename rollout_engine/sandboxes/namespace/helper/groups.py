"""The control groups of a launcher's boxes: made with their limits set, entered, used again, removed."""

from __future__ import annotations

import contextlib
import os
import time
from typing import NamedTuple

from rollout_engine.sandboxes.namespace.helper.limits import Controller, Limits, count_oom, owner_name, rmdir, write

_PERIOD_US = 100_000
_ENTRY = {1: "tasks", 2: "cgroup.procs"}
"""Where a process with one thread enters by itself. Version 1's `tasks` waits for no lock that all processes share."""
MAX_IDLE_GROUPS = 64
IDLE_S = 2.0
"""How long a group without a box waits for the next."""
IDLE_SHARE = 8
"""A group whose box has left more than this part of its memory behind is not used again."""


class Group(NamedTuple):
    """A box's control groups: descriptors to enter them by, to count out-of-memory kills, and to read what is used."""

    limits: Limits
    paths: list[str]
    entries: list[int]
    oom: int | None
    usage: int | None

    def close(self) -> None:
        for fd in (*self.entries, self.oom, self.usage):
            if fd is not None:
                os.close(fd)


class Groups:
    """The control groups of a launcher's boxes. One that a box has left clean serves the next with the same limits."""

    def __init__(self, controllers: list[Controller]) -> None:
        self.controllers, self.owner = self._usable(controllers), owner_name()
        self._leftover: list[str] = []
        self._idle: list[tuple[float, Group]] = []
        """Since when, the longest first."""

    def _usable(self, controllers: list[Controller]) -> list[Controller]:
        """The controllers in which our own directory could be made (a read-only mount is no use)."""
        name, usable = owner_name(), []
        for controller in controllers:
            path = f"{controller.root}/{name}"
            with contextlib.suppress(OSError):
                os.makedirs(path, exist_ok=True)
                if controller.version == 2:
                    write(f"{path}/cgroup.subtree_control", f"+{controller.name}")
                usable.append(controller)
        return usable

    def take(self, box: str, limits: Limits) -> Group:
        """A box's own until `give_back`, with its limits set; its first process enters by `entries`."""
        for index, (_, idle) in enumerate(self._idle):
            if idle.limits == limits:
                del self._idle[index]
                return idle
        group = Group(limits, [], [], None, None)
        try:
            for controller in self.controllers:
                self._make(f"{controller.root}/{self.owner}/{box}", controller, group)
            oom = _open_first(group.paths, ("memory.oom_control", "memory.events"))
            group = group._replace(oom=oom)
            return group._replace(usage=_open_first(group.paths, ("memory.usage_in_bytes", "memory.current")))
        except OSError:
            self._remove(group)
            raise

    def _make(self, path: str, controller: Controller, group: Group) -> None:
        if path not in group.paths:
            os.mkdir(path)
            group.paths.append(path)
            group.entries.append(_open_entry(f"{path}/{_ENTRY[controller.version]}"))
        for name, value in _settings(controller, group.limits):
            with _optional(name == "memory.swap.max" or name == "memory.memsw.limit_in_bytes"):
                write(f"{path}/{name}", value)

    def give_back(self, group: Group, *, spoiled: bool = False) -> None:
        """`spoiled`: it must not be used again, as its count of kills is not 0, or as memory of it lives on."""
        if spoiled or count_oom(group.oom) or len(self._idle) >= MAX_IDLE_GROUPS or _holds_much(group):
            self._remove(group)
        else:
            self._idle.append((time.monotonic(), group))

    def _remove(self, group: Group) -> None:
        """A group can go only when its last process has; `sweep` tries again until then."""
        group.close()
        self._leftover.extend(group.paths)

    def sweep(self, idle_s: float = IDLE_S) -> bool:
        """Removes what can be removed; says whether something is left."""
        while self._idle and self._idle[0][0] <= time.monotonic() - idle_s:
            self._remove(self._idle.pop(0)[1])
        self._leftover = [path for path in self._leftover if not rmdir(path)]
        return bool(self._leftover or self._idle)

    def close(self) -> None:
        self.sweep()
        for controller in self.controllers:
            rmdir(f"{controller.root}/{self.owner}")


def _settings(controller: Controller, limits: Limits) -> list[tuple[str, str]]:
    memory, quota = str(limits.memory_bytes), max(1_000, int(limits.cpus * _PERIOD_US))
    if controller.version == 2:
        return {
            "memory": [("memory.max", memory), ("memory.swap.max", "0")],
            "pids": [("pids.max", str(limits.processes + 1))],
            "cpu": [("cpu.max", f"{quota} {_PERIOD_US}")],
        }[controller.name]
    return {
        "memory": [("memory.limit_in_bytes", memory), ("memory.memsw.limit_in_bytes", memory)],
        "pids": [("pids.max", str(limits.processes + 1))],
        "cpu": [("cpu.cfs_quota_us", str(quota))],
    }[controller.name]


def _open_first(paths: list[str], names: tuple[str, ...]) -> int | None:
    """A descriptor of the first of these files that is there: version 1's, or version 2's."""
    for path in paths:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                return os.open(f"{path}/{name}", os.O_RDONLY | os.O_CLOEXEC)
    return None


def _open_entry(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_CLOEXEC)


def _holds_much(group: Group) -> bool:
    return group.usage is not None and int(os.pread(group.usage, 32, 0)) > group.limits.memory_bytes // IDLE_SHARE


def _optional(yes: bool) -> contextlib.AbstractContextManager[None]:
    return contextlib.suppress(OSError) if yes else contextlib.nullcontext()
