"""Inside a box: ends its processes but for some, so that none of the others can act any more."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import NamedTuple

_PAUSE_S = 0.001
_MOST_S = 8.0


class Process(NamedTuple):
    """What /proc says of a process."""

    pid: int
    parent: int
    session: int
    dead: bool


def end_all_but(kept: set[int]) -> None:
    """`kept` are first processes, each of a session of its own; their sessions and descendants live on.

    All are stopped before any is killed: what cannot run can neither fork away nor wake another.
    Raises OSError where some do not end in time.
    """
    end = time.monotonic() + _MOST_S
    while True:
        with contextlib.suppress(ProcessLookupError):
            os.kill(-1, signal.SIGSTOP)
        living = [process for process in _all() if not process.dead]
        spared = _families(living, kept)
        doomed = [process.pid for process in living if process.pid not in spared]
        for pid in doomed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not doomed:
            break
        if time.monotonic() > end:
            raise TimeoutError(f"{len(doomed)} processes do not end")
        time.sleep(_PAUSE_S)
    for pid in spared:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def _families(living: list[Process], kept: set[int]) -> set[int]:
    parents = {process.pid: process.parent for process in living}
    found = {process.pid for process in living if process.session in kept}
    for pid in parents:
        line, above = [pid], parents[pid]
        while above in parents and above not in found:
            line.append(above)
            above = parents[above]
        if above in found or above in kept:
            found.update(line)
    return found


def _all() -> list[Process]:
    """Every process of the box but this one, which is its first."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and name != "1":
            with contextlib.suppress(OSError, IndexError, ValueError):
                with open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
                found.append(Process(int(name), int(fields[1]), int(fields[3]), fields[0] in (b"Z", b"X")))
    return found
