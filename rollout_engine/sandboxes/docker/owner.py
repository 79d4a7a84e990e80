"""Who made a container: labels that name the owning process, and whether that process still lives."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

PREFIX = "rollout-engine"
OWNER, RUN, HOST, EPOCH, ROLLOUT, MADE = (
    f"{PREFIX}.{name}" for name in ("owner", "run", "host", "epoch", "rollout", "made")
)


class Owner(NamedTuple):
    """A process for all time: its machine's boot, its pid namespace, its pid and when it started."""

    boot: str
    pid_namespace: str
    pid: int
    started: int

    @classmethod
    def me(cls) -> Owner:
        pid = os.getpid()
        return cls(_boot(), _pid_namespace(), pid, _start_ticks(pid) or 0)

    @classmethod
    def parse(cls, text: str) -> Owner | None:
        """None for a label that this version did not write."""
        parts = text.split(":")
        if len(parts) != 4 or not (parts[2].isdigit() and parts[3].isdigit()):
            return None
        return cls(parts[0], parts[1], int(parts[2]), int(parts[3]))

    def __str__(self) -> str:
        return f"{self.boot}:{self.pid_namespace}:{self.pid}:{self.started}"

    def is_dead(self, local_daemon: bool) -> bool:
        """Only what can be known from here: an owner on another machine, or behind a wall, counts as alive.

        Another boot of this machine is certain only with a local daemon; others may share a remote one.
        """
        if self.boot != _boot():
            return local_daemon
        return self.pid_namespace == _pid_namespace() and _start_ticks(self.pid) != self.started


def labels(owner: Owner, run: str, host: str, epoch: int, rollout: str = "") -> dict[str, str]:
    """The labels of everything that one provider makes."""
    found = {OWNER: str(owner), RUN: run, HOST: host or socket.gethostname(), EPOCH: str(epoch)}
    return {**found, ROLLOUT: rollout} if rollout else found


def is_orphan(found: Mapping[str, str], local_daemon: bool) -> bool:
    owner = Owner.parse(found.get(OWNER, ""))
    return owner is not None and owner.is_dead(local_daemon)


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _pid_namespace() -> str:
    return os.readlink("/proc/self/ns/pid").strip("pid:[]")


def _start_ticks(pid: int) -> int | None:
    """Field 22 of the process's stat, which no later process with its pid shares; None where it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])
