"""What the scheduler is handed and hands back: starts of rollouts, and what becomes of them."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Try(NamedTuple):
    """One start of one rollout."""

    key: int
    retry: int = 0
    """Starts before this one."""
    generation: int = 0
    failures: int = 0
    """Starts that infrastructure failed."""
    losses: int = 0
    """Starts that were lost with their host."""


class Verdict(Enum):
    COMMIT = "commit"
    RETRY = "retry"
    DROP = "drop"
    """The key is not held by that host: a second arrival."""


class Lost(NamedTuple):
    """What became of a lost host's keys."""

    planned_again: list[Try]
    given_up: list[Try]
    cancelled: list[Try]
