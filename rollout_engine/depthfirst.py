"""Which group is next: started ones are finished before new ones begin, each on one or two hosts. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rollout_engine.circuits import Subject
from rollout_engine.tries import Try

GROUP_HOSTS = 2
"""Hosts that a group is spread over while there is other work to start."""


@dataclass(slots=True)
class PlannedGroup:
    order: int
    model: int
    todo: deque[Try]
    left: int
    """Keys that are not done yet, wherever they are."""
    subjects: tuple[Subject, ...] = ()
    """What its rollouts depend on beside their model."""
    hosts: list[str] = field(default_factory=list)


class DepthFirst:
    """A group is fresh until its first rollout is granted, and started while it has something to do after that."""

    def __init__(self, models: int) -> None:
        self._fresh: list[deque[PlannedGroup]] = [deque() for _ in range(models)]
        self.started: list[dict[int, PlannedGroup]] = [{} for _ in range(models)]
        """By order. Whoever takes the last of what a group has to do takes it out of here."""
        self._orders = 0

    def add(self, model: int, tries: Sequence[Try], subjects: tuple[Subject, ...]) -> PlannedGroup:
        group = PlannedGroup(self._orders, model, deque(tries), len(tries), subjects)
        self._orders += 1
        self._fresh[model].append(group)
        return group

    def next(
        self, host: str, models: Sequence[int], may_start: Callable[[PlannedGroup], bool] | None
    ) -> PlannedGroup | None:
        """1. a started group that this host may share; 2. a new one, which then is started; 3. any started one.

        Of these models only. `may_start`: whether something of a group may; None: of every group.
        """
        started = [group for model in models for group in filter(may_start, self.started[model].values())]
        near = [group for group in started if host in group.hosts or len(group.hosts) < GROUP_HOSTS]
        if near:
            return min(near, key=_by_order)
        fresh = [group for model in models if (group := next(filter(may_start, self._fresh[model]), None)) is not None]
        if fresh:
            group = min(fresh, key=_by_order)
            self._fresh[group.model].remove(group)
            self.started[group.model][group.order] = group
            return group
        return min(started, key=_by_order, default=None)

    def put_back(self, group: PlannedGroup, one: Try) -> None:
        """In front of its group."""
        # A group that has not been started yet still stands in its model's queue.
        if not group.todo:
            self.started[group.model][group.order] = group
        group.todo.appendleft(one)

    def drop(self, group: PlannedGroup, keys: set[int]) -> list[Try]:
        """Takes these out of what the group has to do."""
        dropped = [one for one in group.todo if one.key in keys]
        if dropped:
            group.todo = deque(one for one in group.todo if one.key not in keys)
            if not group.todo and self.started[group.model].pop(group.order, None) is None:
                self._fresh[group.model].remove(group)
        return dropped

    def has_todo(self, model: int) -> bool:
        return bool(self._fresh[model] or self.started[model])


def _by_order(group: PlannedGroup) -> int:
    return group.order
