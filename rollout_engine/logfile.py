"""A log file that never holds anybody up: lines wait in memory, a thread writes them, and old ones make room."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections import deque
from contextlib import suppress
from pathlib import Path

from rollout_engine.disk import node
from rollout_engine.loglines import Fields, spoken_of

FLUSH_S = 0.5
"""A line waits at most this long; a warning or worse is written at once."""
MAX_WAITING_BYTES = 4 * 2**20
"""Lines that wait for a slow disk; what comes on top is counted and dropped."""
FIELDS_BYTES = 600
"""About what the line of a rollout weighs, and its fields while they wait."""
CLOSE_S = 5.0
"""The longest that closing waits for the disk."""


class LogFile(logging.Handler):
    """Appends to a file of mode 0600; above `max_bytes` it becomes NAME.1, and the oldest of `kept` is removed."""

    def __init__(self, path: Path, max_bytes: int, kept: int) -> None:
        """Raises OSError where the file cannot be made."""
        super().__init__()
        self._path, self._max_bytes, self._kept = path, max_bytes, kept
        self._lines: deque[bytes | logging.LogRecord] = deque()
        self._waiting = 0
        self._dropped = 0
        self._refused = False
        """The disk has refused the last lines."""
        self._urgent, self._ends = threading.Event(), False
        self.disk = threading.Lock()
        """Held while lines are written."""
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._handle, self._closed = self._opened(), False
        self._size = os.fstat(self._handle).st_size
        self._thread = threading.Thread(target=self._work, name="log writer", daemon=True)
        self._thread.start()

    def _opened(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def emit(self, record: logging.LogRecord) -> None:
        """Called under the handler's lock."""
        if isinstance(record.msg, Fields):
            # They do not change any more: the thread makes the lines, many at once, which costs half as much.
            record.__dict__["about"] = spoken_of()
            self._keep(record, FIELDS_BYTES * len(record.msg.rows))
        elif (line := self._line(record)) is not None:
            self._keep(line, len(line))
        if record.levelno >= logging.WARNING:
            self._urgent.set()

    def _keep(self, line: bytes | logging.LogRecord, size: int) -> None:
        if self._waiting + size > MAX_WAITING_BYTES:
            self._dropped += 1
            return
        self._lines.append(line)
        self._waiting += size

    def _line(self, record: logging.LogRecord) -> bytes | None:
        """None where a value cannot be shown: that must not end what was being logged."""
        try:
            return self.format(record).encode("utf-8", "backslashreplace") + b"\n"
        except Exception:
            self.handleError(record)
            return None

    def _work(self) -> None:
        while not self._ends:
            self._urgent.wait(FLUSH_S)
            self._urgent.clear()
            self.flush()
        self.flush()
        with self.disk:
            self._closed = True
            os.close(self._handle)

    def flush(self) -> None:
        """Writes what waits, now. Nothing where the file is closed."""
        with self.disk:
            if not self._closed:
                self._write_out()

    def _write_out(self) -> None:
        """A disk that refuses loses lines, and nothing but lines."""
        assert self.lock is not None
        with self.lock:
            waiting, self._lines, self._waiting = self._lines, deque(), 0
            dropped, self._dropped = self._dropped, 0
        lines = [self._line(each) if isinstance(each, logging.LogRecord) else each for each in waiting]
        data = b"".join(line for line in lines if line is not None)
        if dropped:
            why = b"refused them" if self._refused else b"is behind"
            data += b'{"level":"warning","message":"%d lines were dropped: the disk %s"}\n' % (dropped, why)
        self._append(data)

    def _append(self, data: bytes) -> None:
        written = 0
        try:
            if self._size and self._size + len(data) > self._max_bytes:
                self._rotate()
            while written < len(data):
                written += os.write(self._handle, memoryview(data)[written:])
            self._refused = False
        except OSError as error:
            whole = data.rfind(b"\n", 0, written) + 1
            with suppress(OSError):  # a line that is torn would spoil the next one
                os.ftruncate(self._handle, os.fstat(self._handle).st_size - (written - whole))
            self._dropped += data.count(b"\n", whole)
            self._complain(error)
        self._size = os.fstat(self._handle).st_size

    def _complain(self, error: OSError) -> None:
        """Said once, until the disk takes lines again: nothing but lines is lost."""
        if not self._refused:
            where = f"{self._path} on {node()}"
            sys.stderr.write(f"{where}: log lines are lost: {error.strerror}; make room there (the run goes on)\n")
        self._refused = True

    def _rotate(self) -> None:
        names = [self._path, *(self._path.with_name(f"{self._path.name}.{n}") for n in range(1, self._kept + 1))]
        for older, newer in zip(names[::-1], names[-2::-1], strict=False):
            if newer.exists():
                os.replace(newer, older)
        if not self._kept:
            self._path.unlink(missing_ok=True)
        fresh = self._opened()
        os.close(self._handle)
        self._handle = fresh

    def close(self) -> None:
        """Writes what waits, in bounded time. May be called twice."""
        if not self._ends:
            self._ends = True
            self._urgent.set()
            self._thread.join(CLOSE_S)
        super().close()
