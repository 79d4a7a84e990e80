"""The launcher's own mount table, kept short: each new box copies and frees the whole of it."""

from __future__ import annotations

import contextlib

from rollout_engine.sandboxes.namespace.helper import syscalls as sys

_NEEDLESS = (
    "devpts", "mqueue", "debugfs", "tracefs", "securityfs", "pstore", "bpf", "configfs", "fusectl", "hugetlbfs",
    "binfmt_misc", "efivarfs", "autofs",
)  # fmt: skip


def leave(needed: list[str]) -> None:
    """Unmounts, for the launcher alone, what no box needs; the control groups at `needed` stay."""
    with open("/proc/self/mounts") as file:
        rows = [line.split() for line in file]
    for _, path, kind, *_ in reversed(rows):
        unused = kind in ("cgroup", "cgroup2") and not any(root.startswith(path) for root in needed)
        if kind in _NEEDLESS or unused:
            with contextlib.suppress(OSError):
                sys.umount(path)
