"""What a host tells the driver of itself, about once a second and beside its rows: for people and metrics alone.

Nothing is decided by it, so that one which is lost or late costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from rollout_engine.metrics import Snapshot
from rollout_engine.waiting import Waiting

VITALS_S = 1.0
"""How far apart they are at least."""
SLOWEST = 5
"""Rollouts that each names."""


class Vitals(NamedTuple):
    """A host at one moment."""

    node: str
    """The name of its machine."""
    pid: int
    slots: int
    paused: bool
    """It starts nothing more."""
    phases: Mapping[str, int]
    """How many rollouts it holds in each phase."""
    slowest: tuple[Waiting, ...]
    """Those that it has held longest."""
    metrics: Snapshot
    """Its tally so far."""
