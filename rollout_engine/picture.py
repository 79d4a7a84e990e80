"""Builds a run's status from what its driver holds. Pure: no clock, no I/O."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import pyarrow as pa

from rollout_engine.breaker import Breaker, BreakerState
from rollout_engine.lending import CallLimits
from rollout_engine.metrics import Snapshot
from rollout_engine.progress import Progress
from rollout_engine.schema import rollout_id
from rollout_engine.status import (
    MAX_ERRORS,
    MAX_HOSTS,
    MAX_MODELS,
    MAX_NOTES,
    MAX_SLOWEST,
    ErrorStatus,
    HostStatus,
    ModelStatus,
    ProgressStatus,
    RunState,
    SlowStatus,
    short,
)
from rollout_engine.vitals import Vitals

WINDOW_S = 30.0
"""Rates of "now" are means over about this long."""


class ServedHost(NamedTuple):
    """A host as the driver's board has it."""

    host_id: str
    held: int
    running: int
    draining: bool


class Glance(NamedTuple):
    """What the driver's board says at one moment."""

    now: float
    """On the loop's clock."""
    progress: Progress
    hosts: list[ServedHost]
    breakers: Sequence[Breaker]
    """One per model."""
    lent: Mapping[str, int]
    """Permits out in the cluster, of limited models."""
    limits: Mapping[str, CallLimits]
    """What calls to each model, and judge, are held to."""
    state: RunState


class SeenHost(NamedTuple):
    """A served host, and what it has said of itself."""

    served: ServedHost
    heard_s: float
    vitals: Vitals | None


def host_statuses(hosts: Iterable[SeenHost]) -> list[HostStatus]:
    """In the driver's order; at most MAX_HOSTS, those that have been silent longest first among them."""
    kept = sorted(hosts, key=lambda host: -host.heard_s)[:MAX_HOSTS]
    return [_host(host) for host in sorted(kept, key=lambda host: host.served.host_id)]


def _host(host: SeenHost) -> HostStatus:
    served, vitals = host.served, host.vitals
    known = HostStatus(
        host_id=short(served.host_id),
        held=served.held,
        running=served.running,
        heard_s=host.heard_s,
        draining=served.draining or (vitals is not None and vitals.paused),
    )
    if vitals is None:
        return known
    lag_s = vitals.metrics.gauges.get(("rollout_loop_lag_seconds", ()), 0.0)
    return known.model_copy(
        update={"node": short(vitals.node), "pid": vitals.pid, "slots": vitals.slots, "loop_lag_s": lag_s}
    )


def model_statuses(
    breakers: Mapping[str, Breaker],
    tallies: Iterable[Snapshot],
    rates: Mapping[str, Rate],
    limits: Mapping[str, CallLimits],
) -> list[ModelStatus]:
    """What all hosts say of each model, and then of each judge. `tallies`: also of hosts that are gone: counts stay.

    Only models have breakers; `limits` are of all that is called.
    """
    known = list(tallies)
    names = [*breakers, *(name for name in limits if name not in breakers)][:MAX_MODELS]
    return [_model(name, breakers.get(name), known, rates[name], limits.get(name, CallLimits())) for name in names]


def _model(
    name: str, breaker: Breaker | None, tallies: Sequence[Snapshot], tokens: Rate, limits: CallLimits
) -> ModelStatus:
    known = ModelStatus(
        name=name,
        in_flight=int(_gauged(tallies, "rollout_model_calls_in_flight", name)),
        waiting=int(_gauged(tallies, "rollout_model_calls_waiting", name)),
        limit=limits.at_once,
        limit_per_s=limits.per_s,
        adaptive=limits.adaptive,
        judge=breaker is None,
        calls=int(_counted(tallies, "rollout_model_calls", name)),
        rate_limited=int(_counted(tallies, "rollout_model_rate_limited", name)),
        retries=int(_counted(tallies, "rollout_model_retries", name)),
        tokens=int(_counted(tallies, "rollout_tokens", name)),
        tokens_per_s=tokens.per_s,
        cost_usd=_counted(tallies, "rollout_cost_usd", name),
    )
    if breaker is None or breaker.state is BreakerState.CLOSED:
        return known
    return known.model_copy(update={"breaker": breaker.state.value, "breaker_kind": short(breaker.kind)})


def _counted(tallies: Iterable[Snapshot], name: str, model: str) -> float:
    return sum(tally.total(name, model) for tally in tallies)


def _gauged(tallies: Iterable[Snapshot], name: str, model: str) -> float:
    return sum(tally.gauges.get((name, (model,)), 0) for tally in tallies)


def phases_of(vitals: Iterable[Vitals]) -> dict[str, int]:
    """How many rollouts are in each phase, over all hosts."""
    total: Counter[str] = Counter()
    for each in vitals:
        total.update(each.phases)
    return {phase: count for phase, count in total.items() if count}


def slowest_of(vitals: Mapping[str, Vitals]) -> list[SlowStatus]:
    """Those that were planned longest ago, over all hosts."""
    found = [(host, row) for host, each in vitals.items() for row in each.slowest]
    return [
        SlowStatus(
            rollout=short(row.rollout),
            host_id=short(host),
            phase=row.phase,
            waits_for=short(row.waits_for),
            since_s=max(row.since_s, 0.0),
            age_s=max(row.age_s, 0.0),
        )
        for host, row in sorted(found, key=lambda pair: -pair[1].age_s)[:MAX_SLOWEST]
    ]


def progress_status(progress: Progress, rate_now: float, ended: bool) -> ProgressStatus:
    """`rate_now`: rollouts a second of late; what is left is taken to go on like that."""
    left = None if progress.total is None else max(progress.total - progress.before - progress.done, 0)
    return ProgressStatus(
        total=progress.total,
        before=progress.before,
        done=progress.done,
        queued=progress.pending,
        running=0 if ended else (progress.running or 0),
        valid=progress.valid,
        failed=progress.failed_count,
        verifier_errors=progress.verifier_errors,
        cancelled=progress.cancelled,
        retries=progress.retries,
        prompt_tokens=progress.prompt_tokens,
        completion_tokens=progress.completion_tokens,
        cost_usd=progress.cost_usd,
        elapsed_s=max(progress.now - progress.started, 0.0),
        rate=progress.rate,
        rate_now=rate_now,
        eta_s=left / rate_now if left is not None and rate_now > 0 else progress.eta_s,
    )


def notes_of(notes: Iterable[str]) -> tuple[str, ...]:
    """The newest."""
    return tuple(map(short, list(notes)[-MAX_NOTES:]))


class Rate:
    """How fast a count has grown lately."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float]] = deque()

    def saw(self, now: float, count: float) -> None:
        self._seen.append((now, count))
        while len(self._seen) > 2 and self._seen[1][0] <= now - WINDOW_S:
            self._seen.popleft()

    @property
    def per_s(self) -> float:
        if len(self._seen) < 2 or self._seen[-1][0] <= self._seen[0][0]:
            return 0.0
        (began, first), (now, last) = self._seen[0], self._seen[-1]
        return max(last - first, 0.0) / (now - began)


@dataclass(slots=True)
class ErrorBook:
    """Rows without a score, counted by what failed, each kind with its first message."""

    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Kind -> (rollout_id, message)."""

    def add(self, batch: pa.RecordBatch) -> None:
        if batch.column("failure_type").null_count == batch.num_rows:
            return
        names = ("failure_type", "failure_boundary", "failure_message", "round", "task_id", "model", "attempt")
        for kind, boundary, message, *identity in zip(*(batch.column(name).to_pylist() for name in names), strict=True):
            if kind is not None:
                name = f"{boundary}:{kind}"
                self.counts[name] += 1
                if name not in self.examples and len(self.examples) < MAX_ERRORS * 4:
                    self.examples[name] = (rollout_id(*identity), short(message or ""))

    def statuses(self) -> list[ErrorStatus]:
        """The most frequent first."""
        found = []
        for kind, count in self.counts.most_common(MAX_ERRORS):
            rollout, example = self.examples.get(kind, ("", ""))
            found.append(ErrorStatus(kind=short(kind), count=count, example=example, rollout=short(rollout)))
        return found
