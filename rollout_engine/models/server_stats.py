"""What a model server counts: calls, those in flight, and how they ended."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterable
from types import TracebackType
from typing import Any


class Load:
    """Calls at once: now, at most, and over time."""

    __slots__ = ("_at", "calls", "in_flight", "in_flight_s", "max_in_flight")

    def __init__(self) -> None:
        self.calls = self.in_flight = self.max_in_flight = 0
        self.in_flight_s = 0.0
        """Seconds that calls were in flight, added up over them: its growth in a second is their mean number."""
        self._at = time.monotonic()

    def begin(self) -> None:
        self._go_on()
        self.calls += 1
        self.in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.in_flight)

    def end(self) -> None:
        self._go_on()
        self.in_flight -= 1

    def as_dict(self) -> dict[str, float]:
        self._go_on()
        return {name: getattr(self, name) for name in self.__slots__ if name != "_at"}

    def _go_on(self) -> None:
        now = time.monotonic()
        self.in_flight_s += self.in_flight * (now - self._at)
        self._at = now


class ServerStats:
    """`calls` and the in-flight counts are of calls that were let in; 429s above the limit are counted apart."""

    def __init__(self, models: Iterable[str]) -> None:
        self._all = Load()
        self._models = {name: Load() for name in models}
        self._counts: Counter[str] = Counter()

    @property
    def in_flight(self) -> int:
        return self._all.in_flight

    def count(self, what: str) -> None:
        self._counts[what] += 1

    def call(self, model: str) -> Call:
        """Counts a call as in flight for as long as the context lasts, also when it is cancelled."""
        return Call(self, (self._all, self._models[model]))

    def as_dict(self) -> dict[str, Any]:
        """What GET /stats shows; every count is there from the start."""
        kinds = ("answered", "429", "500", "cut", "hang", "garbage", "missing", "busy", "bad_requests", "disconnected")
        models = {name: load.as_dict() for name, load in self._models.items()}
        return {**self._all.as_dict(), **{kind: self._counts[kind] for kind in kinds}, "models": models}


class Call:
    """One call in flight."""

    __slots__ = ("_loads", "_stats", "number")

    def __init__(self, stats: ServerStats, loads: tuple[Load, ...]) -> None:
        self._stats, self._loads = stats, loads
        self.number = 0

    def __enter__(self) -> Call:
        for load in self._loads:
            load.begin()
        self.number = self._loads[0].calls
        return self

    def end(self) -> None:
        """Ends it early: before the last byte is sent, or the caller's next call could overtake its end."""
        for load in self._loads:
            load.end()
        self._loads = ()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is asyncio.CancelledError and self._loads:
            self._stats.count("disconnected")
        self.end()
