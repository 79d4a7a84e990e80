"""Where the engine's log lines go while a run is open: a file of this process in RUN/logs/, or its standard error.

What the application has set up for these loggers before goes on exactly as it was: it still gets the lines of the
levels that it got, and none of those that are only for the file.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterable
from pathlib import Path

from rollout_engine.config import LogLevel, LogSpec
from rollout_engine.errors import describe
from rollout_engine.logfile import LogFile
from rollout_engine.loglines import About, JsonLines, Redactor, spoken_of

LOGGERS = ("rollout_engine", "actors")
"""The roots of all of ours."""

log = logging.getLogger(__name__)
_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


class Logs:
    """The log of one run in this process. Whoever opens it closes it."""

    def __init__(self, about: About, level: LogLevel, handler: logging.Handler | None, redact: Redactor) -> None:
        self._run_id, self._handler = about.run_id, handler
        if handler is not None:
            handler.setLevel(_LEVELS[level])
            handler.setFormatter(JsonLines(about, redact))
            handler.addFilter(self._is_ours)
            _SWITCH.add(handler)

    def _is_ours(self, record: logging.LogRecord) -> bool:
        """Of several runs in one process each has its own lines, and all have those of nobody in particular."""
        about = spoken_of()
        return about is None or about.run_id == self._run_id

    def close(self) -> None:
        """Writes what waits, in bounded time. May be called twice."""
        handler, self._handler = self._handler, None
        if handler is not None:
            _SWITCH.remove(handler)
            handler.close()


def open_logs(
    folder: Path | None, name: str, about: About, level: LogLevel, spec: LogSpec, secrets: Iterable[str]
) -> Logs:
    """A file of this process in `folder`, or where there is none (or it refuses) its standard error."""
    redact = Redactor(secrets)
    if level == "off":
        return Logs(about, level, None, redact)
    try:
        handler: logging.Handler = (
            logging.StreamHandler(sys.stderr)
            if folder is None
            else LogFile(folder / f"{name}.jsonl", spec.max_file_bytes, spec.kept_files)
        )
    except OSError as error:
        log.warning("no log file can be written in %s: %s", folder, describe(error))
        handler = logging.NullHandler()
    return Logs(about, level, handler, redact)


class _Switch:
    """Turns our loggers away from the application's handlers while there are handlers of ours, and back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._handlers: list[logging.Handler] = []
        self._before: list[tuple[logging.Logger, int, bool, _Relay]] = []

    def add(self, handler: logging.Handler) -> None:
        with self._lock:
            if not self._handlers:
                self._turn()
            self._handlers.append(handler)
            self._apply()
            for name in LOGGERS:
                logging.getLogger(name).addHandler(handler)

    def remove(self, handler: logging.Handler) -> None:
        with self._lock:
            self._handlers.remove(handler)
            for name in LOGGERS:
                logging.getLogger(name).removeHandler(handler)
            if self._handlers:
                self._apply()
            else:
                self._turn_back()

    def _turn(self) -> None:
        for logger in map(logging.getLogger, LOGGERS):
            relay = _Relay(logger.getEffectiveLevel(), logger.propagate)
            self._before.append((logger, logger.level, logger.propagate, relay))
            logger.propagate = False
            logger.addHandler(relay)

    def _apply(self) -> None:
        """Lines are made for whoever wants the most."""
        for logger, _, _, relay in self._before:
            logger.setLevel(min(relay.level_before, *(handler.level for handler in self._handlers)))

    def _turn_back(self) -> None:
        for logger, level, propagate, relay in self._before:
            logger.removeHandler(relay)
            logger.propagate = propagate
            logger.setLevel(level)
        self._before.clear()


class _Relay(logging.Handler):
    """Hands to the root's handlers what they would have got without us."""

    def __init__(self, level_before: int, propagate: bool) -> None:
        super().__init__(level_before)
        self.level_before, self._propagate = level_before, propagate

    def emit(self, record: logging.LogRecord) -> None:
        if self._propagate:
            logging.getLogger().callHandlers(record)

    def createLock(self) -> None:
        """None: the root's handlers have locks of their own."""
        self.lock = None


_SWITCH = _Switch()
