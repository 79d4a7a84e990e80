"""Decides which rollout starts where, which is tried again, and which is given up: pure, no I/O, no clock.

Invariants: every planned key is in exactly one of `todo` (of its group), `suspects`, `waiting` (back-off), `held` (by
one host) or done; a key leaves for good only through a `Verdict.COMMIT`, `drop` or `lost`, each of which ends in one
row.
Depth first: started groups are finished before new ones are begun, and a group stays on one or two hosts.
Whoever was on two lost hosts may be what ended them: such suspects run apart from all others, on half of the hosts at
most, a few on a host and the last time alone, so that one that does end its host takes no other with it.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from rollout_engine.breaker import Breaker, BreakerState
from rollout_engine.circuits import Circuits, Outcome, Subject
from rollout_engine.config import RetrySpec
from rollout_engine.exchange import scramble
from rollout_engine.types import KeySpace

GROUP_HOSTS = 2
"""Hosts that a group is spread over while there is other work to start."""
OVERSUBSCRIPTION = 2
"""Rollouts in flight for each call that a limited model takes at once."""
SUSPECT_LOSSES = 2
"""Hosts lost under an attempt that make it a suspect."""
SUSPECTS_TOGETHER = 8
"""Suspects that share a host, before their last start: fewer take longer, more have to run alone after another loss."""


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


@dataclass(slots=True)
class _Group:
    order: int
    model: int
    todo: deque[Try]
    left: int
    """Keys that are not done yet, wherever they are."""
    subjects: tuple[Subject, ...] = ()
    """What its rollouts depend on beside their model."""
    hosts: list[str] = field(default_factory=list)


class Scheduler:
    """The plan's open part, and who holds what. Times are seconds on the caller's clock."""

    def __init__(self, space: KeySpace, retry: RetrySpec, limits: Sequence[int | None] | None = None) -> None:
        self.space = space
        self.retry = retry
        self.circuits = Circuits(retry, space.m)
        self.held: dict[str, dict[int, Try]] = {}
        self.in_flight = [0] * space.m
        self.in_flight_on: dict[str, list[int]] = {}
        """Rollouts of each model that a host holds."""
        self.todo_count = 0
        self._limits = list(limits or [None] * space.m)
        self._fresh: list[deque[_Group]] = [deque() for _ in range(space.m)]
        self._started: list[dict[int, _Group]] = [{} for _ in range(space.m)]
        self._groups: dict[int, _Group] = {}
        self._waiting: dict[int, Try] = {}
        self._suspects: dict[int, Try] = {}
        self._apart: set[str] = set()
        """Hosts that run suspects, or let what they hold end in order to."""
        self._wake: list[tuple[float, int]] = []
        self._cancelling: set[int] = set()
        self._away: dict[int, float] = {}
        """Since when the provider of a rollout's sandbox has not answered."""
        self._orders = 0

    # -- work arrives -------------------------------------------------------------------------------------------

    def add_group(self, tries: Sequence[Try], subjects: tuple[Subject, ...] = ()) -> None:
        """Plans the given attempts of one group (all of them, or what a resumed run still lacks)."""
        group_id = self.space.group(tries[0].key)
        group = _Group(self._orders, self.space.model(tries[0].key), deque(tries), len(tries), subjects)
        self._orders += 1
        self._groups[group_id] = group
        self._fresh[group.model].append(group)
        self.todo_count += len(tries)

    @property
    def pending(self) -> int:
        """Planned rollouts that no host holds."""
        return self.todo_count + len(self._waiting)

    @property
    def held_count(self) -> int:
        return sum(self.in_flight)

    # -- hosts --------------------------------------------------------------------------------------------------

    @property
    def breakers(self) -> list[Breaker]:
        """Those of the models."""
        return self.circuits.models

    def limit_calls(self, limits: Sequence[int | None]) -> None:
        """The calls that each model takes at once: rollouts in flight are kept in proportion to them."""
        self._limits = list(limits)

    def join(self, host: str) -> None:
        self.held[host] = {}
        self.in_flight_on[host] = [0] * self.space.m

    def grant(self, host: str, slots: int, now: float) -> list[Try]:
        """At most `slots` rollouts for a host to start, oldest groups first."""
        self._awake(now)
        room = self.circuits.room([Subject("host", host)], now)
        if room is not None:
            slots = min(slots, room)
            if not slots:
                return []
        ready = [one for one in self._suspects.values() if self._room_for(self._group(one.key), now) > 0]
        if self._takes_another_apart(ready):
            self._apart.add(host)
        if host in self._apart:
            if self.held[host]:
                return []
            self._apart.discard(host)
            if ready:
                return self._take_suspects(ready, host, slots, now)
        granted: list[Try] = []
        while len(granted) < slots and (group := self._next_group(host, now)) is not None:
            granted.extend(self._take(group, host, slots - len(granted), now))
        if ready and not granted and not self.held[host]:
            return self._take_suspects(ready, host, slots, now)
        return granted

    def _takes_another_apart(self, ready: Sequence[Try]) -> bool:
        """Whether one more host should run nothing but these: as many as they fill, and half of all at most."""
        alone = sum(self._is_last(one) for one in ready)
        needed = alone + math.ceil((len(ready) - alone) / SUSPECTS_TOGETHER)
        coming = sum(not self.runs_suspects_only(host) for host in self._apart)
        return coming < needed and len(self._apart) < math.ceil(len(self.held) / 2)

    def _is_last(self, one: Try) -> bool:
        """Whether an attempt is given up when it loses its host once more."""
        return one.losses == self.retry.max_host_losses

    def _take_suspects(self, ready: Iterable[Try], host: str, slots: int, now: float) -> list[Try]:
        """For a host that holds nothing, and gets nothing else until these have ended."""
        self._apart.add(host)
        granted: list[Try] = []
        for one in ready:
            last = self._is_last(one)
            if len(granted) < (1 if last else min(slots, SUSPECTS_TOGETHER)) and slots > 0:
                group = self._group(one.key)
                if self._room_for(group, now) > 0:
                    granted.append(self._suspects.pop(one.key))
                    self._grant_one(one, host, group)
                    self.todo_count -= 1
                    if last:
                        break
        return granted

    def _group(self, key: int) -> _Group:
        return self._groups[self.space.group(key)]

    def _grant_one(self, one: Try, host: str, group: _Group) -> None:
        self.held[host][one.key] = one
        self._count(host, group.model, 1)
        self.circuits.started(one.key, group.model, (*group.subjects, Subject("host", host)))

    def _take(self, group: _Group, host: str, slots: int, now: float) -> Iterator[Try]:
        room = min(slots, self._room_for(group, now), len(group.todo))
        if host not in group.hosts:
            group.hosts.append(host)
        for _ in range(room):
            one = group.todo.popleft()
            self._grant_one(one, host, group)
            yield one
        self.todo_count -= room
        if not group.todo:
            self._started[group.model].pop(group.order, None)

    def _room(self, model: int, now: float) -> int:
        """How many more rollouts of a model may be in flight."""
        room = self.todo_count
        limit = self._limits[model]
        if limit is not None:
            room = min(room, limit * OVERSUBSCRIPTION - self.in_flight[model])
        allowance = self.breakers[model].allowance(now)
        return room if allowance is None else min(room, allowance)

    def _room_for(self, group: _Group, now: float) -> int:
        """How many more rollouts of a group may be in flight."""
        room = self._room(group.model, now)
        allowance = self.circuits.room(group.subjects, now)
        return room if allowance is None else min(room, allowance)

    def _next_group(self, host: str, now: float) -> _Group | None:
        """1. a started group that this host may share; 2. a new one; 3. any started one."""
        models = [model for model in range(self.space.m) if self._room(model, now) > 0]
        started = [group for model in models for group in self._open(self._started[model].values(), now)]
        near = [group for group in started if host in group.hosts or len(group.hosts) < GROUP_HOSTS]
        if near:
            return min(near, key=_by_order)
        fresh = [group for model in models if (group := next(self._open(self._fresh[model], now), None)) is not None]
        if fresh:
            group = min(fresh, key=_by_order)
            self._fresh[group.model].remove(group)
            self._started[group.model][group.order] = group
            return group
        return min(started, key=_by_order, default=None)

    def _open(self, groups: Iterable[_Group], now: float) -> Iterator[_Group]:
        """Those of which something may start."""
        if not self.circuits.busy:
            return iter(groups)
        return (group for group in groups if self.circuits.room(group.subjects, now) != 0)

    def finished(self, host: str, key: int, outcome: Outcome, now: float) -> Verdict:
        """A row arrived: commit it, throw it away and try again, or drop it as a second arrival."""
        one = self.held.get(host, {}).pop(key, None)
        if one is None:
            return Verdict.DROP
        model = self.space.model(key)
        self._count(host, model, -1)
        subjects = (*self._group(key).subjects, Subject("host", host))
        patient = self._patient(key, outcome, now)
        self.circuits.ended(key, self.space.slot(key), model, subjects, outcome, now, patient=patient)
        again = (
            outcome.failed
            and outcome.retryable
            and (patient or one.failures < self.retry.max_retries)
            and key not in self._cancelling
            and not self.circuits.is_dead(model, subjects)
        )
        if again:
            self._wait(one._replace(retry=one.retry + 1, failures=one.failures + int(not patient)), now)
            return Verdict.RETRY
        self._done(key)
        return Verdict.COMMIT

    def _patient(self, key: int, outcome: Outcome, now: float) -> bool:
        """Whether a rollout failed by what comes back by itself, and has not waited for it for too long."""
        if not outcome.away:
            self._away.pop(key, None)
            return False
        return now - self._away.setdefault(key, now) < self.retry.away_s

    def _wait(self, one: Try, now: float) -> None:
        """Back-off: doubles with each failure, and is jittered between half and all of it."""
        full = min(self.retry.backoff_s * 2 ** max(one.failures - 1, 0), self.retry.backoff_max_s)
        pause = full * (0.5 + 0.5 * scramble(one.key * 64 + one.retry) / 2**64)
        self._waiting[one.key] = one
        heapq.heappush(self._wake, (now + pause, one.key))

    def _awake(self, now: float) -> None:
        """Puts rollouts whose back-off is over in front of their group."""
        while self._wake and self._wake[0][0] <= now:
            _, key = heapq.heappop(self._wake)
            one = self._waiting.pop(key, None)
            if one is not None:
                self._put_back(one)

    def _put_back(self, one: Try) -> None:
        self.todo_count += 1
        if one.losses >= SUSPECT_LOSSES:
            self._suspects[one.key] = one
            return
        group = self._groups[self.space.group(one.key)]
        # A group that has not been started yet still stands in its model's queue.
        if not group.todo:
            self._started[group.model][group.order] = group
        group.todo.appendleft(one)

    def lost(self, host: str, *, blame: bool = True) -> Lost:
        """A host is gone: its keys are planned again, up to a bound where the loss may be their fault (`blame`)."""
        lost = self._reclaim(host, list(self.held.pop(host, {}).values()), losses=int(blame))
        self.in_flight_on.pop(host, None)
        self.circuits.lost(host)
        self._apart.discard(host)
        for group_id in {self.space.group(one.key) for one in lost.planned_again}:
            hosts = self._groups[group_id].hosts
            if host in hosts:  # its place in the group is for another one
                hosts.remove(host)
        return lost

    def runs_suspects_only(self, host: str) -> bool:
        """Whether all that a host holds may be what ends it: then its loss says nothing of its node."""
        held = self.held[host].values()
        return bool(held) and all(one.losses >= SUSPECT_LOSSES for one in held)

    def handed_back(self, host: str, keys: Iterable[int], *, started: bool) -> Lost:
        """Keys that a host gave back unfinished through no fault of theirs. `started`: they may have run."""
        held = self.held[host]
        return self._reclaim(host, [held.pop(key) for key in keys if key in held], losses=0, starts=int(started))

    def missing(self, host: str, keys: Iterable[int]) -> Lost:
        """Keys that the host was granted but says it does not hold: the same as lost."""
        held = self.held[host]
        return self._reclaim(host, [held.pop(key) for key in keys if key in held])

    def _count(self, host: str, model: int, change: int) -> None:
        self.in_flight[model] += change
        self.in_flight_on[host][model] += change

    def _reclaim(self, host: str, tries: Iterable[Try], losses: int = 1, starts: int = 1) -> Lost:
        result = Lost([], [], [])
        for one in tries:
            model = self.space.model(one.key)
            self._count(host, model, -1)
            self.circuits.forget(one.key, model, (*self._group(one.key).subjects, Subject("host", host)))
            again = one._replace(retry=one.retry + starts, losses=one.losses + losses)
            if one.key in self._cancelling:
                self._done(one.key)
                result.cancelled.append(one)
            elif again.losses > self.retry.max_host_losses:
                self._done(one.key)
                result.given_up.append(one)
            else:
                self._put_back(again)
                result.planned_again.append(again)
        return result

    # -- endings ------------------------------------------------------------------------------------------------

    def cancel(self, keys: Iterable[int]) -> tuple[list[Try], dict[str, list[int]]]:
        """(rollouts that were not started and are done now, keys to be cancelled on each host)."""
        wanted = set(keys)
        dropped = self.drop(wanted)
        on_hosts: dict[str, list[int]] = {}
        for host, held in self.held.items():
            mine = wanted & held.keys()
            if mine:
                self._cancelling |= mine
                on_hosts[host] = sorted(mine)
        return dropped, on_hosts

    def drop(self, keys: Iterable[int]) -> list[Try]:
        """Takes rollouts that no host holds out of the plan; each needs a row from the caller."""
        wanted = set(keys)
        dropped = [self._waiting.pop(key) for key in wanted & self._waiting.keys()]
        suspects = [self._suspects.pop(key) for key in wanted & self._suspects.keys()]
        self.todo_count -= len(suspects)
        dropped += suspects
        for group_id in {self.space.group(key) for key in wanted} & self._groups.keys():
            group = self._groups[group_id]
            mine = [one for one in group.todo if one.key in wanted]
            if mine:
                dropped.extend(mine)
                self._keep(group, [one for one in group.todo if one.key not in wanted])
        for one in dropped:
            self._done(one.key)
        return dropped

    def drop_all(self, model: int | None = None) -> list[Try]:
        """Takes everything that no host holds, of one model or of all, out of the plan."""
        return self.drop([key for key in self._unheld() if model is None or self.space.model(key) == model])

    def drop_dead(self) -> list[tuple[Subject, Breaker, list[Try]]]:
        """Takes everything that depends on what was given up, and that no host holds, out of the plan."""
        dead = dict(self.circuits.dead())
        if not dead:
            return []
        blame = {
            group: subject
            for group, planned in self._groups.items()
            if (subject := next((each for each in planned.subjects if each in dead), None)) is not None
        }
        keys: dict[Subject, list[int]] = {}
        for key in self._unheld():
            if (subject := blame.get(self.space.group(key))) is not None:
                keys.setdefault(subject, []).append(key)
        needed = set(blame.values())
        self.circuits.done_with(each for each in dead if each.kind == "setup" and each not in needed)
        return [(subject, dead[subject], self.drop(mine)) for subject, mine in keys.items()]

    def _unheld(self) -> list[int]:
        todo = [one.key for group in self._groups.values() for one in group.todo]
        return [*todo, *self._waiting, *self._suspects]

    def dead_models(self) -> list[int]:
        """Models whose breaker has given up and that still have rollouts in the plan."""
        return [
            model
            for model, breaker in enumerate(self.breakers)
            if breaker.state is BreakerState.DEAD and (self._fresh[model] or self._started[model] or self._waits(model))
        ]

    def _waits(self, model: int) -> bool:
        return any(self.space.model(key) == model for key in (*self._waiting, *self._suspects))

    def _keep(self, group: _Group, todo: list[Try]) -> None:
        self.todo_count -= len(group.todo) - len(todo)
        group.todo = deque(todo)
        if not todo and self._started[group.model].pop(group.order, None) is None:
            self._fresh[group.model].remove(group)

    def _done(self, key: int) -> None:
        self._cancelling.discard(key)
        self._away.pop(key, None)
        group_id = self.space.group(key)
        group = self._groups[group_id]
        group.left -= 1
        if not group.left:
            del self._groups[group_id]

    def next_wakeup(self) -> float | None:
        """When something changes by itself: a back-off ends, or a breaker opens."""
        times = [self._wake[0][0]] if self._wake else []
        opening = self.circuits.next_opening()
        return min(times if opening is None else [*times, opening], default=None)


def _by_order(group: _Group) -> int:
    return group.order
