"""Decides which rollout starts where, which is tried again, and which is given up: pure, no I/O, no clock.

Invariants: every planned key is in exactly one of `todo` (of its group), `suspects`, `waiting` (back-off), `held` (by
one host) or done; a key leaves for good only through a `Verdict.COMMIT`, `drop` or `lost`, each of which ends in one
row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rollout_engine.backoff import Backoff
from rollout_engine.breaker import Breaker, BreakerState
from rollout_engine.circuits import Circuits, Outcome, Subject
from rollout_engine.config import RetrySpec
from rollout_engine.depthfirst import DepthFirst, PlannedGroup
from rollout_engine.suspects import Suspects, is_suspect
from rollout_engine.tries import Lost, Try, Verdict
from rollout_engine.types import KeySpace

OVERSUBSCRIPTION = 2
"""Rollouts in flight for each call that a limited model takes at once."""


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
        self._groups: dict[int, PlannedGroup] = {}
        """Those that are not done."""
        self._order = DepthFirst(space.m)
        self._backoff = Backoff(retry)
        self._suspects = Suspects(retry.max_host_losses)
        self._cancelling: set[int] = set()
        self._away: dict[int, float] = {}
        """Since when the provider of a rollout's sandbox has not answered."""

    # -- work arrives -------------------------------------------------------------------------------------------

    def add_group(self, tries: Sequence[Try], subjects: tuple[Subject, ...] = ()) -> None:
        """Plans the given attempts of one group (all of them, or what a resumed run still lacks)."""
        first = tries[0].key
        self._groups[self.space.group(first)] = self._order.add(self.space.model(first), tries, subjects)
        self.todo_count += len(tries)

    @property
    def pending(self) -> int:
        """Planned rollouts that no host holds."""
        return self.todo_count + len(self._backoff.waiting)

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
        for one in self._backoff.over(now):
            self._put_back(one)
        room = self.circuits.room([Subject("host", host)], now)
        if room is not None:
            slots = min(slots, room)
            if not slots:
                return []
        suspects = self._suspects
        ready = [one for one in suspects.todo.values() if self._room_for(self._group(one.key), now) > 0]
        coming = sum(not self.runs_suspects_only(each) for each in suspects.apart)
        if suspects.need_another(ready, len(self.held), coming):
            suspects.apart.add(host)
        if host in suspects.apart:
            if self.held[host]:
                return []
            suspects.apart.discard(host)
            if ready:
                return self._take_suspects(ready, host, slots, now)
        granted: list[Try] = []
        while len(granted) < slots and (group := self._next_group(host, now)) is not None:
            granted.extend(self._take(group, host, slots - len(granted), now))
        if ready and not granted and not self.held[host]:
            return self._take_suspects(ready, host, slots, now)
        return granted

    def _take_suspects(self, ready: Iterable[Try], host: str, slots: int, now: float) -> list[Try]:
        """For a host that holds nothing, and gets nothing else until these have ended."""
        suspects = self._suspects
        suspects.apart.add(host)
        granted: list[Try] = []
        for one in ready:
            if len(granted) < suspects.together(one, slots) and slots > 0:
                group = self._group(one.key)
                if self._room_for(group, now) > 0:
                    granted.append(suspects.todo.pop(one.key))
                    self._grant_one(one, host, group)
                    self.todo_count -= 1
                    if suspects.is_last(one):
                        break
        return granted

    def _group(self, key: int) -> PlannedGroup:
        return self._groups[self.space.group(key)]

    def _grant_one(self, one: Try, host: str, group: PlannedGroup) -> None:
        self.held[host][one.key] = one
        self._count(host, group.model, 1)
        self.circuits.started(one.key, group.model, (*group.subjects, Subject("host", host)))

    def _take(self, group: PlannedGroup, host: str, slots: int, now: float) -> Iterator[Try]:
        room = min(slots, self._room_for(group, now), len(group.todo))
        if host not in group.hosts:
            group.hosts.append(host)
        for _ in range(room):
            one = group.todo.popleft()
            self._grant_one(one, host, group)
            yield one
        self.todo_count -= room
        if not group.todo:
            self._order.started[group.model].pop(group.order, None)

    def _room(self, model: int, now: float) -> int:
        """How many more rollouts of a model may be in flight."""
        room = self.todo_count
        limit = self._limits[model]
        if limit is not None:
            room = min(room, limit * OVERSUBSCRIPTION - self.in_flight[model])
        allowance = self.breakers[model].allowance(now)
        return room if allowance is None else min(room, allowance)

    def _room_for(self, group: PlannedGroup, now: float) -> int:
        """How many more rollouts of a group may be in flight."""
        room = self._room(group.model, now)
        allowance = self.circuits.room(group.subjects, now)
        return room if allowance is None else min(room, allowance)

    def _next_group(self, host: str, now: float) -> PlannedGroup | None:
        models = [model for model in range(self.space.m) if self._room(model, now) > 0]
        if not self.circuits.busy:
            return self._order.next(host, models, None)
        return self._order.next(host, models, lambda group: self.circuits.room(group.subjects, now) != 0)

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
            self._backoff.add(one._replace(retry=one.retry + 1, failures=one.failures + int(not patient)), now)
            return Verdict.RETRY
        self._done(key)
        return Verdict.COMMIT

    def _patient(self, key: int, outcome: Outcome, now: float) -> bool:
        """Whether a rollout failed by what comes back by itself, and has not waited for it for too long."""
        if not outcome.away:
            self._away.pop(key, None)
            return False
        return now - self._away.setdefault(key, now) < self.retry.away_s

    def _put_back(self, one: Try) -> None:
        self.todo_count += 1
        if is_suspect(one):
            self._suspects.todo[one.key] = one
        else:
            self._order.put_back(self._group(one.key), one)

    def lost(self, host: str, *, blame: bool = True) -> Lost:
        """A host is gone: its keys are planned again, up to a bound where the loss may be their fault (`blame`)."""
        lost = self._reclaim(host, list(self.held.pop(host, {}).values()), losses=int(blame))
        self.in_flight_on.pop(host, None)
        self.circuits.lost(host)
        self._suspects.apart.discard(host)
        for group_id in {self.space.group(one.key) for one in lost.planned_again}:
            hosts = self._groups[group_id].hosts
            if host in hosts:  # its place in the group is for another one
                hosts.remove(host)
        return lost

    def runs_suspects_only(self, host: str) -> bool:
        """Whether all that a host holds may be what ends it: then its loss says nothing of its node."""
        held = self.held[host]
        return bool(held) and all(map(is_suspect, held.values()))

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
        waiting, todo = self._backoff.drop(wanted), self._suspects.drop(wanted)
        for group_id in {self.space.group(key) for key in wanted} & self._groups.keys():
            todo += self._order.drop(self._groups[group_id], wanted)
        self.todo_count -= len(todo)
        dropped = waiting + todo
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
        return [*todo, *self._backoff.waiting, *self._suspects.todo]

    def dead_models(self) -> list[int]:
        """Models whose breaker has given up and that still have rollouts in the plan."""
        return [
            model
            for model, breaker in enumerate(self.breakers)
            if breaker.state is BreakerState.DEAD and (self._order.has_todo(model) or self._waits(model))
        ]

    def _waits(self, model: int) -> bool:
        return any(self.space.model(key) == model for key in (*self._backoff.waiting, *self._suspects.todo))

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
        times = (self._backoff.next_end(), self.circuits.next_opening())
        return min((each for each in times if each is not None), default=None)
