"""Attempts that may be what ended their hosts: they run apart from all others, so that they take none with them.

Whoever was on two lost hosts is a suspect. Suspects run on half of the hosts at most, a few on a host and the last time
alone, so that one that does end its host takes no other with it. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rollout_engine.tries import Try

SUSPECT_LOSSES = 2
"""Hosts lost under an attempt that make it a suspect."""
SUSPECTS_TOGETHER = 8
"""Suspects that share a host, before their last start: fewer take longer, more have to run alone after another loss."""


class Suspects:
    """Those that no host holds, and the hosts that are theirs."""

    def __init__(self, max_host_losses: int) -> None:
        self._max_host_losses = max_host_losses
        self.todo: dict[int, Try] = {}
        """By key."""
        self.apart: set[str] = set()
        """Hosts that run suspects, or let what they hold end in order to."""

    def is_last(self, one: Try) -> bool:
        """Whether an attempt is given up when it loses its host once more."""
        return one.losses == self._max_host_losses

    def together(self, one: Try, slots: int) -> int:
        """How many may be on a host that this one is on."""
        return 1 if self.is_last(one) else min(slots, SUSPECTS_TOGETHER)

    def need_another(self, ready: Sequence[Try], hosts: int, coming: int) -> bool:
        """Whether one more of `hosts` should run nothing but these: as many as they fill, and half of all at most.

        `coming`: hosts apart that do not run them yet.
        """
        alone = sum(self.is_last(one) for one in ready)
        needed = alone + math.ceil((len(ready) - alone) / SUSPECTS_TOGETHER)
        return coming < needed and len(self.apart) < math.ceil(hosts / 2)

    def drop(self, keys: set[int]) -> list[Try]:
        """Takes out those of them that are here."""
        return [self.todo.pop(key) for key in keys & self.todo.keys()]


def is_suspect(one: Try) -> bool:
    return one.losses >= SUSPECT_LOSSES
