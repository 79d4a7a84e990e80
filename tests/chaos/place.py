"""A place that the suite and all that it starts are shut in, so that nothing of it outlives it, however it is ended.

Its processes, mounts, network and temporary folder are its own, and so is the part of the control groups that it and
its launchers are in: it sees nothing of what else runs on the machine, and nobody takes anything of it for theirs. The
kernel ends processes, mounts and network with their first process; folder and control groups are removed by whoever
made the place or, should that be killed, by the next who makes one. Root only.
"""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from tests.chaos import groups
from tests.ray.rays import ROOT, blocking_until

PREFIX = "chaos-run-"
"""Short: the sockets below the folder may have 107 characters."""
LOCK = "lock"
"""A file that its maker holds, and that says where its control groups are."""
END_S = 30
"""Seconds that a suite has to say what it found, once it is told to end; then it is killed."""
SHUT_IN = ("setpriv", "--pdeathsig", "KILL", "unshare", "--fork", "--kill-child", "--mount-proc")
SPACES = ("--pid", "--mount", "--net", "--ipc")
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Place:
    """A folder, and control groups of its name. Both go at the end of the block that it is made for."""

    def __init__(self) -> None:
        remove_dead()
        self.folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        self.groups = groups.places(self.folder.name)
        (self.folder / LOCK).write_text("\n".join(self.groups))
        self._lock = _lock(self.folder)

    def run(self, module: str, arguments: Sequence[str] = ()) -> int:
        """Runs `python -m MODULE FOLDER ARGUMENTS...` there; its exit code. SIGTERM and Ctrl-C end it."""
        first = [sys.executable, "-m", "tests.chaos.first", module, str(self.folder), *arguments]
        keeper = subprocess.Popen([*SHUT_IN, *SPACES, "--", *first], cwd=ROOT, start_new_session=True)
        try:
            with _passing_on(keeper):
                return keeper.wait()
        finally:
            keeper.kill()
            keeper.wait()

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *_: object) -> None:
        """What ran there is given a moment to be gone."""
        with self._lock:
            blocking_until(lambda: groups.remove(self.groups), "the control groups are empty")
            shutil.rmtree(self.folder, ignore_errors=True)


@contextlib.contextmanager
def _passing_on(keeper: subprocess.Popen[bytes]) -> Iterator[None]:
    """The first signal lets the suite say what it has found; another one, or the end of its time, kills it."""

    def tell(*_: object) -> None:
        for number in (*before, signal.SIGALRM):
            signal.signal(number, lambda *_: keeper.kill())
        signal.alarm(END_S)
        children = Path(f"/proc/{keeper.pid}/task/{keeper.pid}/children").read_text().split()
        subprocess.run(["kill", "-TERM", *children], check=False)

    before = {number: signal.getsignal(number) for number in ENDING}
    before = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}  # nohup
    for number in before:
        signal.signal(number, tell)
    try:
        yield
    finally:
        signal.alarm(0)
        for number, handler in before.items():
            signal.signal(number, handler)


def remove_dead() -> None:
    """Of places whose makers were killed, all that is there; one that is still dying stays for the next time."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError), _lock(folder) as lock:
            if groups.remove(lock.read().splitlines()):
                shutil.rmtree(folder)


def _lock(folder: Path) -> IO[str]:
    """Held until it is closed, or its process ends. Raises OSError where another one holds it, or it is no place."""
    lock = (folder / LOCK).open("r+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise
    return lock
