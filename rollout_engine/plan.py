"""Tasks become slots of the plan, and slots become tries: what is open, whose it is, what a host is told of it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from rollout_engine.errors import InputError
from rollout_engine.specs import Task, body_digest, task_body
from rollout_engine.store.planfile import PlanEntry
from rollout_engine.tries import Try
from rollout_engine.types import KeySpace, RolloutSpec

S = TypeVar("S")


class PlanStore(Protocol):
    """The durable plan: append-only, dense."""

    def append(self, round: int, task_id: str, digest: str, body: bytes) -> int: ...

    def find(self, round: int, task_id: str) -> int | None: ...


class Done(Protocol):
    """What is committed already, of earlier epochs."""

    def todo(self, keys: range) -> list[tuple[int, int]]:
        """(key, generation) of those that still need a row."""
        ...


@dataclass(slots=True)
class OpenSlot(Generic[S]):
    """A slot with rollouts that have no committed row yet."""

    slot: int
    round: int
    task_id: str
    digest: str
    body: bytes
    owner: S
    queued_at: float
    left: int = 0
    groups_left: dict[int, int] = field(default_factory=dict)


class Planner(Generic[S]):
    """Keeps the open slots; everything that is done is forgotten."""

    def __init__(self, space: KeySpace, models: Sequence[str], store: PlanStore, done: Done) -> None:
        self.space = space
        self.models = tuple(models)
        self.open: dict[int, OpenSlot[S]] = {}
        self.planned = 0
        """Rollouts planned in this epoch, those that were done before not counted."""
        self._store = store
        self._done = done
        self._first: int | None = None
        """The first slot that was planned in this epoch."""

    def add(self, task: Task, round: int, owner: S) -> tuple[OpenSlot[S], list[list[Try]]]:
        """The task's slot, new or of an earlier epoch, and the tries of each group that has any left.

        Raises InputError where the same task was submitted in this round before, or with other content.
        """
        body = task_body(task)
        digest = body_digest(body)
        slot = self._store.find(round, task.task_id)
        if slot is None:
            slot = self._store.append(round, task.task_id, digest, body)
            self._first = slot if self._first is None else self._first
        elif slot in self.open or (self._first is not None and slot >= self._first):
            raise InputError(
                f"task {task.task_id!r} is submitted twice in round {round}",
                fix="give each task its own task_id, or submit it in another round",
            )
        return self._open(OpenSlot(slot, round, task.task_id, digest, body, owner, time.time()))

    def go_on(self, entry: PlanEntry, owner: S) -> tuple[OpenSlot[S], list[list[Try]]]:
        """A slot that an earlier epoch planned, and the tries of each group that has any left."""
        slot, round, task_id, digest, body = entry
        return self._open(OpenSlot(slot, round, task_id, digest, body, owner, time.time()))

    def _open(self, opened: OpenSlot[S]) -> tuple[OpenSlot[S], list[list[Try]]]:
        groups = [group for group in map(self._tries, self._groups(opened.slot)) if group]
        opened.groups_left = {self.space.group(group[0].key): len(group) for group in groups}
        opened.left = sum(opened.groups_left.values())
        if opened.left:
            self.open[opened.slot] = opened
            self.planned += opened.left
        return opened, groups

    def _groups(self, slot: int) -> Iterable[range]:
        first = slot * self.space.m
        return (self.space.group_keys(group) for group in range(first, first + self.space.m))

    def _tries(self, keys: range) -> list[Try]:
        return [Try(key, generation=generation) for key, generation in self._done.todo(keys)]

    def spec(self, one: Try) -> RolloutSpec:
        """What a host is told of a try."""
        opened = self.open[self.space.slot(one.key)]
        return RolloutSpec(
            one.key,
            opened.round,
            opened.task_id,
            opened.digest,
            self.models[self.space.model(one.key)],
            self.space.attempt(one.key),
            one.retry,
            one.generation,
            opened.queued_at,
        )

    def of(self, key: int) -> OpenSlot[S]:
        return self.open[self.space.slot(key)]

    def committed(self, key: int) -> tuple[OpenSlot[S], bool]:
        """A key has its row: (its slot, whether its group is complete now)."""
        opened = self.of(key)
        group = self.space.group(key)
        left = opened.groups_left[group] - 1
        opened.groups_left[group] = left
        opened.left -= 1
        if not opened.left:
            del self.open[opened.slot]
        return opened, not left
