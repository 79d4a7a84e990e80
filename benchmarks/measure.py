"""What a piece of work cost: CPU seconds of a process tree, memory, the machine, medians, tables.

Standard library only: it is imported in the peers' own environments too. Linux only (/proc).

CPU seconds are user + system of every process of the tree, with what its ended and awaited children used.
They are read from /proc/PID/stat in ticks of 10 ms; the calling process itself is read to the microsecond.
A process that leaves the tree (its parent ends before it) is lost to the count.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Process(NamedTuple):
    """One process at one moment."""

    pid: int
    parent: int
    cpu_s: float
    """User + system of itself and of the children that it has awaited."""


def _process(pid: int) -> Process | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat[stat.rindex(")") + 2 :].split()
    if pid == os.getpid():
        return Process(pid, int(fields[1]), own_cpu_seconds())
    return Process(pid, int(fields[1]), sum(map(int, fields[11:15])) / TICKS_PER_S)


def own_cpu_seconds() -> float:
    """User + system of this process and of the children that it has awaited."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def tree(root: int | None = None) -> list[Process]:
    """The process `root` (default: this one) and all of its descendants."""
    found = [_process(int(entry)) for entry in os.listdir("/proc") if entry.isdigit()]
    children: dict[int, list[Process]] = {}
    waiting: list[Process] = []
    for process in found:
        if process is None:
            continue
        children.setdefault(process.parent, []).append(process)
        if process.pid == (root or os.getpid()):
            waiting.append(process)
    members = []
    while waiting:
        process = waiting.pop()
        members.append(process)
        waiting.extend(children.get(process.pid, ()))
    return members


def command(pid: int) -> str:
    """The command line of a process; empty once it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def cpu_seconds(root: int | None = None) -> float:
    """CPU seconds of a process tree so far: sample before and after, and subtract."""
    return sum(process.cpu_s for process in tree(root))


def cpu_by_role(role: Callable[[int], str], root: int | None = None) -> dict[str, float]:
    """CPU seconds of a process tree so far, added up by what `role` says of each pid."""
    used: dict[str, float] = {}
    for process in tree(root):
        name = role(process.pid)
        used[name] = used.get(name, 0.0) + process.cpu_s
    return used


class Meter:
    """Wall and CPU time between entry and exit: `with Meter() as meter: ...` then `meter.wall_s`, `meter.cpu_s`."""

    def __init__(self, root: int | None = None) -> None:
        self._root = root
        self.wall_s = self.cpu_s = 0.0

    def __enter__(self) -> Meter:
        self._cpu = cpu_seconds(self._root)
        self._wall = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.wall_s = time.perf_counter() - self._wall
        self.cpu_s = cpu_seconds(self._root) - self._cpu


def _kilobytes(path: str, field: str) -> int:
    try:
        lines = Path(path).read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(field + ":")), 0)


def pss_mb(pids: Iterable[int]) -> float:
    """Proportional set size of some processes: a page shared by several is counted once in all."""
    return sum(_kilobytes(f"/proc/{pid}/smaps_rollup", "Pss") for pid in pids) / 1024


def rss_mb(pids: Iterable[int]) -> float:
    """Resident set size of some processes: a page shared by several is counted for each."""
    return sum(_kilobytes(f"/proc/{pid}/status", "VmRSS") for pid in pids) / 1024


def peak_rss_mb(pids: Iterable[int] | None = None) -> float:
    """Highest resident set size so far, added up over some processes (default: this one)."""
    return sum(_kilobytes(f"/proc/{pid}/status", "VmHWM") for pid in pids or (os.getpid(),)) / 1024


def result(case: str, n: int, in_flight: int, meter: Meter, **more: Any) -> dict[str, Any]:
    """What a case prints: one flat record."""
    return {
        "case": case,
        "n": n,
        "in_flight": in_flight,
        "wall_s": round(meter.wall_s, 4),
        "cpu_s": round(meter.cpu_s, 4),
        "cpu_ms_per_rollout": round(meter.cpu_s / n * 1e3, 4),
        "rate": round(n / meter.wall_s, 2),
        "max_rss_mb": round(peak_rss_mb(), 1),
        **more,
    }


def median(runs: Sequence[dict[str, Any]], field: str) -> float:
    """The median of one number over the runs of a case."""
    return statistics.median(run[field] for run in runs)


def spread(runs: Sequence[dict[str, Any]], field: str) -> str:
    """`low-high` of one number over the runs of a case."""
    values = [run[field] for run in runs]
    return f"{number(min(values))}-{number(max(values))}"


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Package -> installed version, of the environment that this process runs in."""
    found = {}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def machine(packages: Iterable[str] = ()) -> dict[str, Any]:
    """Where a number was measured."""
    info = Path("/proc/cpuinfo").read_text().splitlines()
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": next((line.partition(":")[2].strip() for line in info if line.startswith("model name")), "?"),
        "memory_gb": round(_kilobytes("/proc/meminfo", "MemTotal") / 2**20, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load": [round(value, 2) for value in os.getloadavg()],
        "packages": versions(packages),
    }


def number(value: object) -> str:
    """A number as a table shows it: three significant digits."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return "" if value is None else str(value)
    if isinstance(value, int) or abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:#.3g}".rstrip(".")


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A Markdown table: the columns are the keys of the first row."""
    names = list(rows[0])
    cells = [names, *([number(row.get(name)) for name in names] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(names))]

    def line(values: Sequence[str]) -> str:
        return "| " + " | ".join(value.ljust(width) for value, width in zip(values, widths, strict=True)) + " |"

    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([line(cells[0]), rule, *map(line, cells[1:])])


def emit(record: dict[str, Any]) -> None:
    """Print a record as one JSON line, the last line of a case."""
    print(json.dumps(record), flush=True)
