"""Control groups of a name: one below each group in which launchers, or container engines, would else make theirs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from rollout_engine.sandboxes.namespace.helper.limits import find_controllers, write

INSIDE = "suite"
"""What processes enter: in version 2 only a group without processes of its own hands controllers down to others."""

SHARES = 8
"""As many processes get the processor's time that all in the group get together: one would starve beside others."""


def places(name: str) -> list[str]:
    """Where they are, or would be."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    tops = {path for _, path, kind, *_ in mounts if kind in ("cgroup", "cgroup2")}
    return sorted(f"{top}/{name}" for top in {*tops, *(each.root for each in find_controllers())})


def enter(name: str) -> None:
    """Makes those that launchers look at, and moves this process there, and with it all that it will start."""
    entries = set()
    for each in find_controllers():
        inside = Path(each.root, name, INSIDE)
        inside.mkdir(parents=True, exist_ok=True)
        if each.version == 2:
            write(f"{inside.parent}/cgroup.subtree_control", f"+{each.name}")
        if each.name == "cpu":
            file, usual = ("cpu.weight", 100) if each.version == 2 else ("cpu.shares", 1024)
            write(f"{inside.parent}/{file}", str(SHARES * usual))
        entries.add(f"{inside}/cgroup.procs")
    for entry in entries:
        write(entry, "0")


def processes(groups: Iterable[str]) -> list[str]:
    """Those in these groups and all below."""
    return [pid for group in groups for folder in _below(group) for pid in _processes(folder)]


def remove(groups: Iterable[str]) -> bool:
    """Removes them with all below; whether they are gone, which they are not while there are processes."""
    for folder in [folder for group in groups for folder in _below(group)]:
        with contextlib.suppress(OSError):
            folder.rmdir()
    return not any(map(os.path.exists, groups))


def _below(group: str) -> list[Path]:
    """The innermost first."""
    return [Path(folder) for folder, _, _ in os.walk(group, topdown=False)]


def _processes(folder: Path) -> list[str]:
    try:
        return (folder / "cgroup.procs").read_text().split()
    except OSError:
        return []
