"""One line of a log: a JSON object with the ids of whom it is about, and without any secret."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from rollout_engine.schema import rollout_id
from rollout_engine.types import RolloutSpec

MAX_MESSAGE_CHARS = 8192
"""A longer message keeps its beginning."""
MAX_TRACEBACK_CHARS = 16_384
"""A longer traceback keeps its end."""
MIN_SECRET_CHARS = 4
"""Shorter values are no secrets: replacing them would only make nonsense of the line."""
REDACTED = "[key]"
_encode = json.JSONEncoder(default=str, separators=(",", ":")).encode


class About(NamedTuple):
    """Whose line it is, as far as that is known where it is written."""

    run_id: str
    epoch: int
    host_id: str | None = None
    """None: the driver's own."""
    rollout: RolloutSpec | None = None


_ABOUT: ContextVar[About | None] = ContextVar("log_about", default=None)


def speak_of(about: About) -> None:
    """What this task logs from now on, and what tasks log that it starts, is about this."""
    _ABOUT.set(about)


@contextmanager
def speaking_of(about: About) -> Iterator[None]:
    """What is logged inside is about this."""
    token = _ABOUT.set(about)
    try:
        yield
    finally:
        _ABOUT.reset(token)


def spoken_of() -> About | None:
    return _ABOUT.get()


class Fields:
    """A log message of several lines that are made of fields: JSON keys of their own, `name=value` in plain text.

    The lines may be made later, in another thread: nobody changes the values any more.
    """

    __slots__ = ("event", "rows")

    def __init__(self, event: str, rows: Sequence[Mapping[str, Any]]) -> None:
        self.event, self.rows = event, rows

    def __str__(self) -> str:
        return "\n".join(
            " ".join([self.event, *(f"{name}={value}" for name, value in row.items() if value is not None)])
            for row in self.rows
        )


class Redactor:
    """Replaces known secrets in the strings of documents that are about to be written."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        known = {secret.strip() for secret in secrets}
        # A quote, or a letter outside ASCII, is written in another way within a repr.
        forms = {form for secret in known for form in (secret, repr(secret)[1:-1], ascii(secret)[1:-1])}
        self._forms = sorted((form for form in forms if len(form) >= MIN_SECRET_CHARS), key=len, reverse=True)
        self._encoded = [part for form in self._forms for part in {_encode(form)[1:-1], form}]

    def encoded(self, line: str) -> str:
        """A JSON document, without any secret. Where it holds none, that costs a look."""
        if not any(form in line for form in self._encoded):
            return line
        # Never in the line itself: a secret may look like a number, or like a part of an escape.
        return _encode(self._clean(json.loads(line)))

    def _clean(self, value: Any) -> Any:
        if isinstance(value, str):
            for form in self._forms:
                value = value.replace(form, REDACTED)
            return value
        if isinstance(value, dict):
            return {self._clean(name): self._clean(inner) for name, inner in value.items()}
        return [self._clean(inner) for inner in value] if isinstance(value, list) else value


class JsonLines(logging.Formatter):
    """One object: at, level, logger, run_id, epoch, then host_id and rollout_id where known, then what is said."""

    def __init__(self, about: About, redact: Redactor) -> None:
        """`about` says whose a line is that is written outside of every task that said so."""
        super().__init__()
        self._about, self._redact = about, redact
        self._second, self._date = 0, ""

    def format(self, record: logging.LogRecord) -> str:
        head, said = self._head(record), record.msg
        if isinstance(said, Fields):
            start = _encode({**head, "event": said.event})[:-1]  # the same for thousands of lines
            return "\n".join(self._redact.encoded(f"{start},{_encode(row)[1:]}") for row in said.rows)
        return self._redact.encoded(_encode(head | self._message(record)))

    def _at(self, created: float) -> str:
        """UTC; thousands of lines a second share all but the fraction."""
        second = int(created)
        if second != self._second:
            self._second, self._date = second, time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second))
        return f"{self._date}.{int((created - second) * 1e6):06d}Z"

    def _head(self, record: logging.LogRecord) -> dict[str, Any]:
        about = self._about_of(record)
        head: dict[str, Any] = {
            "at": self._at(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "run_id": about.run_id,
            "epoch": about.epoch,
        }
        if about.host_id is not None:
            head["host_id"] = about.host_id
        return head

    def _message(self, record: logging.LogRecord) -> dict[str, Any]:
        line: dict[str, Any] = {}
        if (spec := self._about_of(record).rollout) is not None:
            line["rollout_id"] = rollout_id(spec.round, spec.task_id, spec.model, spec.attempt)
        line["message"] = record.getMessage()[:MAX_MESSAGE_CHARS]
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)[-MAX_TRACEBACK_CHARS:]
        return line

    def _about_of(self, record: logging.LogRecord) -> About:
        about: About | None = record.__dict__.get("about")
        return about or _ABOUT.get() or self._about
