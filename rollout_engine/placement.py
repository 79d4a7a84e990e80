"""Which nodes should get a host now: pure, no I/O, no clock of its own.

Every usable node has as many hosts as the cluster says. One that was lost, or did not come up, is started again: at
once the first time, then after a pause that doubles, and after some failures in a row the node is given up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

MAX_FAILURES = 8
"""Hosts in a row that died young or did not come up, after which a node gets no further one."""
BACKOFF_S = 1.0
"""Pause after the second failure in a row; doubles with each further one."""
MAX_BACKOFF_S = 30.0
HEALTHY_S = 300.0
"""A host that lived for so long makes its node's failures forgotten."""


class Node(NamedTuple):
    """A node that rollouts may run on, as the cluster sees it."""

    node_id: str
    hosts: int = 1
    """How many hosts it should have."""
    address: str = ""
    leaving_in_s: float | None = None
    """It is being drained and will be gone after so many seconds; None: it stays."""

    def __str__(self) -> str:
        return f"{self.node_id[:12]} ({self.address})" if self.address else self.node_id[:12]


@dataclass(slots=True)
class _Tally:
    failures: int = 0
    not_before: float = 0.0


@dataclass(slots=True)
class Placement:
    """Counts the hosts of each node, those being started among them. Times are seconds on the caller's clock."""

    _count: Counter[str] = field(default_factory=Counter)
    _born: dict[str, tuple[str, float]] = field(default_factory=dict)
    """host -> (its node, since when)."""
    _tallies: dict[str, _Tally] = field(default_factory=dict)

    def to_start(self, nodes: Iterable[Node], now: float) -> list[Node]:
        """One entry per host to be started now; each counts as being started until `started` or `failed` is said."""
        wanted = []
        for node in nodes:
            tally = self._tallies.get(node.node_id, _Tally())
            if node.leaving_in_s is not None or tally.failures >= MAX_FAILURES or tally.not_before > now:
                continue
            lacking = node.hosts - self._count[node.node_id]
            if tally.failures:
                lacking = min(lacking, 1)  # one that shows whether the node is well again
            for _ in range(lacking):
                self._count[node.node_id] += 1
                wanted.append(node)
        return wanted

    def started(self, node_id: str, host: str, now: float) -> None:
        """A host that was to be started is up."""
        self._born[host] = (node_id, now)

    def failed(self, node_id: str, now: float) -> bool:
        """A host did not come up; whether the node is given up by that."""
        self._count[node_id] -= 1
        return self._blame(node_id, now)

    def gone(self, host: str, now: float, *, blame: bool = True) -> bool:
        """A host is lost or was retired; whether its node is given up by that. `blame`: it may be the node's fault."""
        node_id, since = self._born.pop(host)
        self._count[node_id] -= 1
        if now - since >= HEALTHY_S:
            self._tallies.pop(node_id, None)
        return blame and self._blame(node_id, now)

    def _blame(self, node_id: str, now: float) -> bool:
        tally = self._tallies.setdefault(node_id, _Tally())
        tally.failures += 1
        if tally.failures > 1:
            tally.not_before = now + min(BACKOFF_S * 2 ** (tally.failures - 2), MAX_BACKOFF_S)
        return tally.failures == MAX_FAILURES

    def hopeless(self, nodes: Iterable[Node]) -> bool:
        """Whether none of these nodes will get a host again."""
        return all(self._tallies.get(node.node_id, _Tally()).failures >= MAX_FAILURES for node in nodes)

    @property
    def starting(self) -> int:
        """Hosts that are being started."""
        return self._count.total() - len(self._born)
