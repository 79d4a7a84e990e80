"""CPU of everything that a piece of work causes, orphans and killed children included, by a control group of its own.

Standard library only: it is imported in the peers' own environments too. Needs a writable cpuacct or v2 hierarchy;
where there is none it reads /proc/stat, which also counts strangers.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator

ROOTS = ("/sys/fs/cgroup/cpuacct", "/sys/fs/cgroup/cpu,cpuacct", "/sys/fs/cgroup/unified", "/sys/fs/cgroup")


def counter(root: str) -> str:
    """The file of a group that holds its CPU time, in the hierarchy at `root`."""
    return "cpuacct.usage" if "cpuacct" in root else "cpu.stat"


def milliseconds(path: str) -> float:
    """What such a file says."""
    with open(path) as file:
        text = file.read()
    return int(text) / 1e6 if path.endswith("cpuacct.usage") else int(text.split()[1]) / 1e3


class Meter:
    """Milliseconds of CPU so far of some processes (default: this one) and of all that they start from now on."""

    def __init__(self, pids: Iterable[int] = (), name: str = "bench") -> None:
        self.by, self._path = "/proc/stat", ""
        for root in ROOTS:
            path = f"{root}/rollout-{name}-{os.getpid()}"
            with contextlib.suppress(OSError):
                os.mkdir(path)
                self._path = path
                if os.path.exists(f"{path}/{counter(root)}"):
                    for pid in pids or (os.getpid(),):
                        _write(f"{path}/cgroup.procs", str(pid))
                    self.by = f"{path}/{counter(root)}"
                    return
                os.rmdir(path)

    def read(self) -> float:
        if self.by != "/proc/stat":
            return milliseconds(self.by)
        with open(self.by) as file:
            fields = [int(word) for word in file.readline().split()[1:9]]
        return (sum(fields) - fields[3] - fields[4]) * 1000 / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        """Everything in the group goes back to the group above it."""
        if self.by == "/proc/stat":
            return
        for _ in range(50):
            with open(f"{self._path}/cgroup.procs") as members:
                for pid in members.read().split():
                    with contextlib.suppress(OSError):
                        _write(f"{os.path.dirname(self._path)}/cgroup.procs", pid)
            with contextlib.suppress(OSError):
                os.rmdir(self._path)
                return
            time.sleep(0.1)


def _write(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


@contextlib.contextmanager
def metered() -> Iterator[Meter]:
    meter = Meter()
    try:
        yield meter
    finally:
        meter.close()
