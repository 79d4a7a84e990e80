"""What a run must not leave: processes, control groups, mounts, containers, temporary folders.

All that is looked at is the suite's own (place.py): whatever it finds, a run has left.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

from rollout_engine.sandboxes.namespace import reaper
from tests.chaos.daemon import Daemon
from tests.ray.rays import POLL_S, alive, command, processes

LEFT_S = 60.0
"""Seconds after a run's end until nothing of it is left."""
OTHERS = re.compile(
    r"/(raylet|gcs_server) |/ray/(core/src|dashboard|autoscaler|_private)/|^ray::(IDLE|DashboardAgent|RuntimeEnvAgent)|"
    r"rollout_engine\.models\.server_process|multiprocessing\.resource_tracker|"
    r"^dockerd |^containerd |/containerd-shim|^runc "
)
"""Processes that are no part of a run: Ray's own, the model server, the Docker daemon.

Killed while it creates containers, a daemon forgets their shims (try it: `docker run`, twelve at once). What runs below
a shim is looked at all the same.
"""


class Leftovers:
    """Compares with how it was when this was made."""

    def __init__(self, daemon: Daemon | None) -> None:
        self._daemon = daemon
        self.forgotten: set[int] = set()
        """Processes behind shims that a killed daemon forgot: out of the engine's reach, and counted apart."""
        self._mounts = self._mounted()
        self._folders = _folders()
        self._groups = set(reaper.leftovers())

    def found(self) -> list[str]:
        """One line for each thing that is there and should not."""
        lines = _processes()
        forgotten = self._daemon.forgotten() if self._daemon is not None and lines else set()
        self.forgotten |= forgotten & {pid for pid, _ in lines}
        left = [f"process {pid}: {line}" for pid, line in lines if pid not in forgotten]
        left += [f"control group {path}" for path in set(reaper.leftovers()) - self._groups]
        left += [f"mount {line}" for line in self._mounted() - self._mounts]
        left += [f"folder {name}" for name in _folders() - self._folders]
        return left + (self._daemon.left() if self._daemon is not None else [])

    def after(self, seconds: float = LEFT_S) -> list[str]:
        """What is still there after so long, or nothing as soon as there is nothing."""
        ends = time.monotonic() + seconds
        while (left := self.found()) and time.monotonic() < ends:
            time.sleep(POLL_S)
        return left

    def _mounted(self) -> set[str]:
        """But for what the Docker daemon has mounted."""
        lines = Path("/proc/self/mounts").read_text().splitlines()
        return {line for line in lines if self._daemon is None or not self._daemon.mounts(line.split()[1])}


def _processes() -> list[tuple[int, str]]:
    lines = [(pid, command(pid)) for pid in alive(processes()) if pid not in (1, os.getpid())]
    return [(pid, line) for pid, line in lines if line and not OTHERS.search(line)]


def _folders() -> set[str]:
    """Entries that the engine makes in TMPDIR, which is this suite's alone."""
    return {entry.name for entry in Path(os.environ["TMPDIR"]).iterdir() if entry.name.startswith("rollout-")}
