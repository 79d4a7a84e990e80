"""What happened to a run, its hosts and nodes: for people, for `--json`, and for RUN/events.jsonl."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass

MAX_EVENTS = 1_000
"""Events that are kept in memory; older ones are only in the run's file."""


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened. Fields that say nothing are empty."""

    at: float
    """Seconds since 1970, on the driver's clock."""
    kind: str
    """host_up | host_lost | host_failed | host_retired | recovered | draining | drained | node_given_up | clock |
    trouble | breaker | budget."""
    message: str
    host: str = ""
    node: str = ""
    rollouts: int = 0
    """How many it concerns: held by a lost host, handed back by a draining one."""
    seconds: float | None = None
    """recovered: from the loss until the last of its rollouts was taken up by another host, or had ended."""


def to_lines(events: Iterable[Event]) -> str:
    """JSON Lines."""
    return "".join(json.dumps(asdict(event)) + "\n" for event in events)
