"""Whether it is a node or a task that a sandbox cannot be had for: pure, no clock of its own.

A node that has no sandbox of the kind that a task needs refuses it at once, and would so spoil one rollout after the
other. So what it refuses is tried on another node first: where that has a sandbox for it, the node is unfit; where all
refuse it, it is the task's own fault. Meanwhile the node gets nothing new, for a while.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass, field

SUSPENDED_S = 60.0
"""A node that refused something gets nothing for so long, or until it is known whose fault that was."""


@dataclass(slots=True)
class Fitness:
    """What was refused where. Times are seconds on the caller's clock."""

    _refused: dict[int, set[str]] = field(default_factory=dict)
    _until: dict[str, float] = field(default_factory=dict)

    def refused(self, node: str, key: int, others: Set[str], now: float) -> bool:
        """A node has no sandbox for a rollout; whether one of the `others` should try it before it counts."""
        nodes = self._refused.setdefault(key, set())
        # Where all others are in doubt too, a second refusal must do: somebody has to come to an end with it.
        again = node in nodes and all(self.suspended(other, now) for other in others)
        nodes.add(node)
        if again or others <= nodes:
            self._forget(key)
            return False
        self._until[node] = now + SUSPENDED_S
        return True

    def blamed(self, key: int) -> Set[str]:
        """The nodes that refused a rollout: where it has had its sandbox after all, they are unfit."""
        return self._refused.get(key, frozenset())

    def ended(self, keys: Iterable[int]) -> None:
        """It is known, or does not matter any more, whose fault it was."""
        for key in keys:
            self._forget(key)

    def _forget(self, key: int) -> None:
        for node in self._refused.pop(key, ()):
            if not any(node in nodes for nodes in self._refused.values()):
                self._until.pop(node, None)

    @property
    def in_doubt(self) -> bool:
        """Whether anything was refused that is not settled yet."""
        return bool(self._refused)

    def suspended(self, node: str, now: float) -> bool:
        """Whether a node should get nothing for now."""
        return self._until.get(node, now) > now
