"""A driver process as the suite sees it: how far it says that the run is, and how it ended."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from tests.ray.rays import ROOT


class DriverProcess:
    """Whoever starts it calls `end`. Its words are read by a thread of their own."""

    def __init__(self, orders: dict[str, Any], errors: Path) -> None:
        self.done, self.hosts, self.lost = -1, 0, list[str]()
        self.finished = False
        self._errors = errors
        with errors.open("ab") as log:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "tests.chaos.drive", json.dumps(orders)],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
        self._reader = threading.Thread(target=self._read, name="driver-words", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            with contextlib.suppress(ValueError):  # the last line of one that is killed may be half a line
                said = json.loads(line)
                self.finished = self.finished or said.get("end", False)
                self.hosts, self.lost = said.get("hosts", self.hosts), said.get("lost", self.lost)
                self.done = said.get("done", self.done)

    @property
    def up(self) -> bool:
        """Whether it has hosts, and says so."""
        return self.done >= 0

    @property
    def ended(self) -> bool:
        return self._child.poll() is not None

    def check(self) -> None:
        """Raises where it has ended by itself, and not well."""
        if self.ended and not self.finished:
            self._reader.join(60)
            if not self.finished:
                raise AssertionError(f"the driver ended with {self._child.returncode}: {self._tail()}")

    def _tail(self) -> str:
        return self._errors.read_text(errors="replace")[-6000:]

    def wait(self, seconds: float) -> None:
        self._child.wait(seconds)
        self._reader.join(60)
        self.check()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait(60)
        self._reader.join(60)

    def end(self) -> None:
        self.kill()
        assert self._child.stdout is not None
        self._child.stdout.close()
