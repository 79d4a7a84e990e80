"""Who is to blame for a failure, and which breakers that opens: pure, no I/O, no clock.

Every row says something about some of: its model, its agent, the host that it ran on, the image of its sandbox, the
setup of its task, the kind of its verifier. Each has a breaker of its own; but for the models', only those that have
something against them are kept.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from rollout_engine.breaker import Breaker, BreakerState
from rollout_engine.config import RetrySpec
from rollout_engine.errors import SandboxAway
from rollout_engine.specs import Task
from rollout_engine.types import Boundary

SubjectKind: TypeAlias = Literal["model", "agent", "host", "image", "setup", "verifier"]

MAX_SUBJECTS = 10_000
"""Subjects with something against them that are remembered; the oldest are forgotten first."""

BOUNDARY_OF: dict[SubjectKind, Boundary] = {
    "model": Boundary.MODEL,
    "agent": Boundary.AGENT,
    "host": Boundary.SANDBOX,
    "image": Boundary.SANDBOX,
    "setup": Boundary.SETUP,
    "verifier": Boundary.VERIFIER,
}
"""What the rows of rollouts say that were given up with a subject."""

_AWAY = f"{Boundary.SANDBOX}:{SandboxAway.__name__}"
_NOT_THE_MODELS = frozenset(
    {Boundary.AGENT.value, Boundary.SANDBOX.value, Boundary.SETUP.value, Boundary.HOST.value, Boundary.TASK.value}
)

_JUDGED_BY_TASKS = frozenset({"agent", "verifier"})
"""Kinds whose failures with one task count once in a row: it may be the task that they cannot work with."""


class Subject(NamedTuple):
    """Something that can be broken."""

    kind: SubjectKind
    name: str

    def __str__(self) -> str:
        return f"the setup of task {self.name}" if self.kind == "setup" else f"{self.kind} {self.name}"


class Outcome(NamedTuple):
    """What the scheduler needs to know of a row."""

    failed: bool = False
    retryable: bool = False
    cancelled: bool = False
    kind: str = ""
    """boundary:type of the failure, or of the verifier's."""
    boxed: bool = False
    """It had a sandbox."""
    no_verdict: bool = False
    """The agent ended as it should, and its verifier came to no finding."""

    @property
    def away(self) -> bool:
        """The provider of its sandbox did not answer: that says nothing but of its host."""
        return self.failed and self.kind == _AWAY


def subjects_of(task: Task, agent: str) -> tuple[Subject, ...]:
    """What all rollouts of a task depend on, whatever their model and host."""
    found = [Subject("verifier", _kind_of(task.verifier or {})), Subject("agent", agent)]
    env = task.environment
    root = env and (env.image or env.directory or env.tar)
    if root:
        found.append(Subject("image", root))
    if task.files or task.setup or task.services:
        found.append(Subject("setup", task.task_id))
    return tuple(found)


def _kind_of(verifier: Mapping[str, Any]) -> str:
    """Its type, and the judges that it may ask: one that is down says nothing against another."""
    judges, todo = set(), [verifier]
    while todo:
        spec = todo.pop()
        if spec.get("type") == "judge":
            judges.add(str(spec.get("judge") or "the only judge"))
        todo += [inner for inner in spec.values() if isinstance(inner, Mapping)]
    asked = f" ({', '.join(sorted(judges))})" if judges else ""
    return f"{verifier.get('type', '')}{asked}"


def finding(kind: SubjectKind, outcome: Outcome) -> bool | None:
    """Whether a row speaks for a subject of this kind, or against it; None: it says nothing."""
    boundary = outcome.kind.partition(":")[0]
    if outcome.cancelled or (outcome.away and kind != "host"):
        return None
    if kind == "model":
        return None if outcome.failed and boundary in _NOT_THE_MODELS else not outcome.failed
    if kind == "verifier":
        return None if outcome.failed else not outcome.no_verdict
    if kind == "agent":
        return (False if boundary == Boundary.AGENT else None) if outcome.failed else True
    if outcome.failed and boundary == (Boundary.SETUP if kind == "setup" else Boundary.SANDBOX):
        return False
    return True if outcome.boxed else None


class Circuits:
    """All breakers of a run."""

    def __init__(self, rules: RetrySpec, models: int) -> None:
        self._rules = rules
        self.models = [Breaker(rules) for _ in range(models)]
        self._others: dict[Subject, Breaker] = {}

    # -- who may start ------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether anything but a model has something against it."""
        return bool(self._others)

    def room(self, subjects: Iterable[Subject], now: float) -> int | None:
        """How many rollouts that depend on all of these may start; None: no limit."""
        if not self._others:
            return None
        rooms = [
            room
            for subject in subjects
            if (breaker := self._others.get(subject)) is not None and (room := breaker.allowance(now)) is not None
        ]
        return min(rooms, default=None)

    def started(self, key: int, model: int, subjects: Iterable[Subject]) -> None:
        """A rollout was granted; where a breaker is half-open it is the probe."""
        self.models[model].started(key)
        for _, breaker in self._known(subjects):
            breaker.started(key)

    # -- what is learned ----------------------------------------------------------------------------------------

    def ended(
        self, key: int, slot: int, model: int, subjects: Sequence[Subject], outcome: Outcome, now: float,
        *, patient: bool = False,
    ) -> None:  # fmt: skip
        """A rollout has its row. `slot` is its task's: agents and verifiers are judged by different tasks.

        `patient`: what it failed by comes back by itself, so that one failure is enough, and none is the last one.
        """
        _learn(self.models[model], finding("model", outcome), key, outcome.kind, now)
        if not self._others and not outcome.kind:
            return
        for subject in subjects:
            good = finding(subject.kind, outcome)
            breaker = self._others.get(subject)
            if breaker is None and good is False:
                breaker = self._others[subject] = self._make(subject)
            if breaker is not None:
                source = slot if subject.kind in _JUDGED_BY_TASKS else None
                _learn(breaker, good, key, outcome.kind, now, source, patient=patient)
                if breaker.state is BreakerState.CLOSED and not breaker.count:
                    del self._others[subject]

    def forget(self, key: int, model: int, subjects: Iterable[Subject]) -> None:
        """A rollout ended without a finding (its host was lost)."""
        self.models[model].forget(key)
        for _, breaker in self._known(subjects):
            breaker.forget(key)

    def lost(self, host: str) -> None:
        self._others.pop(Subject("host", host), None)

    def done_with(self, subjects: Iterable[Subject]) -> None:
        """Nothing depends on these any more."""
        for subject in subjects:
            self._others.pop(subject, None)

    def _make(self, subject: Subject) -> Breaker:
        while len(self._others) >= MAX_SUBJECTS:
            del self._others[next(iter(self._others))]
        if subject.kind == "setup":
            return Breaker(self._rules, failures=self._rules.breaker_setup_failures)
        # A host is never given up: another one may be broken as well, and it may be mended.
        return Breaker(self._rules, mortal=subject.kind != "host")

    # -- what is told -------------------------------------------------------------------------------------------

    def shut(self) -> Iterator[tuple[Subject, Breaker]]:
        """Everything but models that is paused, probed or given up."""
        return ((subject, each) for subject, each in self._others.items() if each.state is not BreakerState.CLOSED)

    def dead(self) -> list[tuple[Subject, Breaker]]:
        """Everything but models that was given up."""
        return [(subject, each) for subject, each in self.shut() if each.state is BreakerState.DEAD]

    def hopeless(self, hosts: Collection[str]) -> Breaker | None:
        """A breaker of these hosts where none of them makes a sandbox any more, after all pauses."""
        if not self._others or not hosts:
            return None
        breakers = [self._others.get(Subject("host", host)) for host in hosts]
        return breakers[0] if all(each is not None and each.exhausted for each in breakers) else None

    def is_dead(self, model: int, subjects: Iterable[Subject]) -> bool:
        """Whether a rollout that depends on these will never start again."""
        breakers = [self.models[model], *(each for _, each in self._known(subjects))]
        return any(each.state is BreakerState.DEAD for each in breakers)

    def next_opening(self) -> float | None:
        """When the first pause ends."""
        breakers = [*self.models, *self._others.values()]
        return min((each.opens_at for each in breakers if each.state is BreakerState.OPEN), default=None)

    def _known(self, subjects: Iterable[Subject]) -> Iterator[tuple[Subject, Breaker]]:
        if self._others:
            for subject in subjects:
                if (breaker := self._others.get(subject)) is not None:
                    yield subject, breaker


def _learn(
    breaker: Breaker, good: bool | None, key: int, kind: str, now: float, source: int | None = None,
    *, patient: bool = False,
) -> None:  # fmt: skip
    if good is None:
        breaker.forget(key)
    elif good:
        breaker.succeeded()
    else:
        breaker.failed(key, kind, now, source, patient=patient)
