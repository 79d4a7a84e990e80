"""How long it takes until what a lost host held is taken up again: pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple


class Recovered(NamedTuple):
    """A loss that is made good."""

    host: str
    node: str
    rollouts: int
    seconds: float


@dataclass(slots=True)
class _Loss:
    host: str
    node: str
    at: float
    rollouts: int
    left: set[int]


@dataclass(slots=True)
class Recoveries:
    """Losses whose rollouts are not all taken up yet. Times are seconds on the caller's clock."""

    _open: list[_Loss] = field(default_factory=list)

    def lost(self, host: str, node: str, keys: Iterable[int], now: float) -> None:
        """A host is lost, and these are to be planned again."""
        left = set(keys)
        if left:
            self._open.append(_Loss(host, node, now, len(left), left))

    def taken(self, keys: Iterable[int], now: float) -> list[Recovered]:
        """These were taken up by a host, or have ended; the losses that are made good by that."""
        if not self._open:
            return []
        keys = set(keys)
        done = []
        for loss in self._open:
            loss.left -= keys
            if not loss.left:
                done.append(Recovered(loss.host, loss.node, loss.rollouts, now - loss.at))
        self._open = [loss for loss in self._open if loss.left]
        return done
