"""Wall time and CPU of everything that a case with sandboxes causes, the Docker daemon's part told apart.

Standard library only: it is imported in the peers' own environments too. The case and all that it starts are in a
control group of their own; the daemon, its containerd and the shims are in another while a case runs (where the daemon
has a group of its own already, as under systemd, that one is read and nothing is moved); the containers' processes are
in the daemon's group `docker`, which is read too where there is one (cgroupfs driver).
"""

from __future__ import annotations

import os
import socket
import struct
import time
from pathlib import Path

from benchmarks.control_group import Meter as Group
from benchmarks.control_group import counter, milliseconds
from benchmarks.measure import tree


def daemon_pid(host: str) -> int:
    """The process that listens at a unix address. Raises OSError where nobody does, or it is no unix address."""
    if not host.startswith("unix://"):
        raise OSError(f"a daemon at a unix socket is wanted, to count what it uses; DOCKER_HOST is {host!r}")
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(host.removeprefix("unix://"))
        peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid: int = struct.unpack("3i", peer)[0]
    return pid


def docker_host() -> str:
    return os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")


def own_group(pid: int, root: str) -> str | None:
    """The group of a process in the hierarchy at `root`, unless it is the root group or the group of this process."""
    name = "cpuacct" if "cpuacct" in root else ""
    found = []
    for who in (pid, os.getpid()):
        lines = [line.split(":", 2) for line in Path(f"/proc/{who}/cgroup").read_text().splitlines()]
        found.append(next((path for _, names, path in lines if name in names.split(",")), "/"))
    return None if found[0] in ("/", found[1]) else root + found[0]


class Everything:
    """`with Everything(docker=True) as meter:` before anything is started; `meter.start()` after the warm-up and
    `meter.stop()`, then wall_s, cpu_s and parts_s (part -> CPU seconds). Raises OSError without a daemon."""

    def __init__(self, *, docker: bool) -> None:
        self._docker = docker
        self.wall_s = self.cpu_s = 0.0
        self.parts_s: dict[str, float] = {}
        self.by = ""

    def __enter__(self) -> Everything:
        self._daemon: Group | None = None
        self._case = Group()
        self._files: dict[str, str] = {}
        self.by = "control groups" if self._case.by != "/proc/stat" else "/proc/stat: all of the machine"
        if self._docker and self._case.by != "/proc/stat":
            self._count_daemon(os.path.dirname(os.path.dirname(self._case.by)))
        return self

    def start(self) -> None:
        self._before, self._started = self._read(), time.perf_counter()

    def _count_daemon(self, root: str) -> None:
        pid = daemon_pid(docker_host())
        group = own_group(pid, root)
        if group is None:
            self._daemon = Group([process.pid for process in tree(pid)], "bench-daemon")
        else:
            self._files["daemon"] = f"{group}/{counter(root)}"
        containers = f"{root}/docker/{counter(root)}"
        if os.path.exists(containers):
            self._files["containers"] = containers

    def _read(self) -> dict[str, float]:
        now = {"case": self._case.read()}
        if self._daemon is not None:
            now["daemon"] = self._daemon.read()
        return now | {name: milliseconds(path) for name, path in self._files.items()}

    def stop(self) -> None:
        self.wall_s = time.perf_counter() - self._started
        self.parts_s = {name: (used - self._before[name]) / 1e3 for name, used in self._read().items()}
        self.cpu_s = sum(self.parts_s.values())

    def __exit__(self, *_: object) -> None:
        self._case.close()
        if self._daemon is not None:
            self._daemon.close()

    def parts_ms(self, n: int) -> dict[str, float]:
        """Part -> CPU milliseconds for each of n."""
        return {name: round(used / n * 1e3, 4) for name, used in self.parts_s.items()}
