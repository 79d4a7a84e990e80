"""What each rollout waits for: a cell that is written as the rollout goes on, and read only when somebody asks.

A rollout's cell is ambient (a context variable), so that whatever runs on its behalf may name what it awaits
without being handed anything. A write costs a few attributes and one look at the clock, once per awaited thing.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, TypeAlias

from rollout_engine.types import RolloutSpec

Phase: TypeAlias = Literal["queue", "start", "setup", "agent", "verify", "close", "commit"]

OLDEST = 20
"""Rollouts that a host names unless it is asked for another number."""
MAX_WHAT_CHARS = 160
"""How much of an awaited thing's name (a setup command may be long) is told."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """One pending rollout, and what it waits for. Picklable; fit for a terminal."""

    key: int
    rollout: str
    """model/attempt/task_id."""
    phase: Phase
    waits_for: str
    """A slot, a permit of a model, a sandbox, a setup command, a model call, the verifier, ..."""
    since_s: float
    """For how long it has waited for that, seconds."""
    age_s: float
    """How long ago it was planned, seconds."""

    def __str__(self) -> str:
        waited = f"{self.waits_for} for {self.since_s:.0f} s"
        return f"{self.rollout}: {self.phase}, waits for {waited} (planned {self.age_s:.0f} s ago)"


class Activity:
    """How often something went forward among the rollouts of a host: a phase, a turn, an ending."""

    __slots__ = ("moves",)

    def __init__(self) -> None:
        self.moves = 0


class Cell:
    """Where one rollout is. Belongs to its event loop; any thread may read it."""

    __slots__ = ("_activity", "phase", "since", "what")

    def __init__(self, activity: Activity | None = None) -> None:
        self._activity = activity or Activity()
        self.phase: Phase = "queue"
        self.what = "a slot"
        self.since = time.monotonic()

    def enter(self, phase: Phase, what: str) -> None:
        """The rollout goes on to another phase, and waits for `what` there."""
        self.phase, self.what, self.since = phase, what, time.monotonic()
        self._activity.moves += 1

    def wait(self, what: str) -> None:
        self.what, self.since = what, time.monotonic()

    def moved(self) -> None:
        """Something went forward within the phase: a turn."""
        self._activity.moves += 1


_CELL: ContextVar[Cell | None] = ContextVar("rollout_cell", default=None)


def enter_rollout(cell: Cell) -> None:
    """What runs in this task from now on, and in tasks that it starts, waits on behalf of this rollout."""
    _CELL.set(cell)


class awaiting:
    """`with awaiting("a permit of model m"): ...` names what is awaited inside; no rollout, no effect."""

    __slots__ = ("_before", "_cell", "_what")

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        self._cell = cell = _CELL.get()
        if cell is not None:
            self._before = cell.what
            cell.what, cell.since = self._what, time.monotonic()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._cell is not None:
            self._cell.what, self._cell.since = self._before, time.monotonic()


def waiting(spec: RolloutSpec, phase: Phase, what: str, since: float, now: float) -> Waiting:
    """The row of one rollout. `since` is on `time.monotonic`'s clock, `now` in seconds since 1970 on the driver's."""
    name = f"{spec.model}/{spec.attempt}/{spec.task_id}"
    what = what if len(what) <= MAX_WHAT_CHARS else what[: MAX_WHAT_CHARS - 1] + "…"
    if not what.isprintable():  # a model may call its tool whatever it likes
        what = "".join(char if char.isprintable() else "?" for char in what)
    return Waiting(spec.key, name, phase, what, time.monotonic() - since, max(0.0, now - spec.queued_at))


def stuck_longest(rows: Iterable[Waiting], limit: int = OLDEST) -> list[Waiting]:
    """Those that have waited longest for the same thing."""
    return sorted(rows, key=lambda row: -row.since_s)[:limit]
