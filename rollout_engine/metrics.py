"""What is counted of a run: the catalogue of its metrics, and the tally in which a process counts them.

Counting is a few dictionary steps and no I/O. A tally is cumulative; whoever exports it (Ray, an HTTP endpoint) takes
its snapshot now and then. Labels have few values by construction: never a task, never a rollout.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Protocol, TypeAlias

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
"""Upper bounds of every histogram's buckets."""


class Kind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Metric(NamedTuple):
    """One name of the catalogue. Exporters add `_total` to counters; every histogram is in seconds."""

    kind: Kind
    labels: tuple[str, ...]
    help: str


def _counter(help: str, *labels: str) -> Metric:
    return Metric(Kind.COUNTER, labels, help)


def _gauge(help: str, *labels: str) -> Metric:
    return Metric(Kind.GAUGE, labels, help)


def _seconds(help: str, *labels: str) -> Metric:
    return Metric(Kind.HISTOGRAM, labels, help)


CATALOGUE: Mapping[str, Metric] = {
    # The driver's.
    "rollout_ended": _counter("Rollouts with a committed row, by how they ended.", "model", "status"),
    "rollout_scores": _counter("Committed rows with a score.", "model"),
    "rollout_failures": _counter("Committed rows without a score, by the boundary that failed.", "boundary"),
    "rollout_retries": _counter("Fresh starts of attempts after infrastructure failed."),
    "rollout_written_bytes": _counter("Bytes of committed rows, as Arrow."),
    "rollout_queued": _gauge("Planned rollouts that no host holds."),
    "rollout_held": _gauge("Rollouts that hosts hold, in any phase."),
    "rollout_hosts": _gauge("Hosts that are served."),
    "rollout_leased_permits": _gauge("Calls in flight that hosts have been lent, of limited models.", "model"),
    "rollout_breaker_open": _gauge("1 while a model is paused or given up, else 0.", "model"),
    "rollout_exchange_seconds": _seconds("Round trip of an exchange, without the host's own wait for news."),
    "rollout_commit_seconds": _seconds("From the arrival of rows at the driver until they are synced."),
    # The hosts'.
    "rollout_slots": _gauge("Rollouts that a host runs at once, between start and end of the agent."),
    "rollout_phase": _gauge("Rollouts on a host, by phase.", "phase"),
    "rollout_tokens": _counter("Tokens as servers counted them, retried rollouts included.", "model", "kind"),
    "rollout_cost_usd": _counter("US dollars, retried rollouts included.", "model"),
    "rollout_model_calls": _counter("Model calls, by how they ended (ok, failed).", "model", "status"),
    "rollout_model_call_seconds": _seconds("From a model call to its answer, the client's retries included.", "model"),
    "rollout_model_rate_limited": _counter("Tries of model calls that got a 429.", "model"),
    "rollout_model_retries": _counter("Tries of model calls after the first.", "model"),
    "rollout_model_calls_in_flight": _gauge("Model calls between permit and answer.", "model"),
    "rollout_model_calls_waiting": _gauge("Model calls that wait for a permit or a request rate.", "model"),
    "rollout_sandbox_create_seconds": _seconds("From asking for a sandbox until it is ready."),
    "rollout_sandbox_failures": _counter("Sandboxes that could not be made."),
    "rollout_verifier_seconds": _seconds("A rollout's verification, the wait for its turn included."),
    # Of both: host="driver" is the driver.
    "rollout_loop_lag_seconds": _gauge("The longest that an event loop was late, since the last report."),
}
"""Name -> what it is. Every series has the further label `host`."""

DRIVER = "driver"
"""The label `host` of what the driver itself counts."""

Series: TypeAlias = tuple[str, tuple[str, ...]]
"""A metric's name, and the values of its labels in their order."""


class Buckets(NamedTuple):
    """A histogram: how many values fell under each of SECONDS (and above them all), and their sum."""

    counts: tuple[int, ...]
    sum: float


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A tally at one moment: cumulative counters and histograms, and gauges as they stand. Picklable."""

    counters: Mapping[Series, float] = field(default_factory=dict)
    gauges: Mapping[Series, float] = field(default_factory=dict)
    histograms: Mapping[Series, Buckets] = field(default_factory=dict)

    def total(self, name: str, *labels: str) -> float:
        """The counters of one name, added up over the labels that are not given."""
        return sum(
            value for (each, values), value in self.counters.items() if each == name and values[: len(labels)] == labels
        )


class Metrics:
    """A process's tally. Used from one thread."""

    def __init__(self) -> None:
        self._counters: dict[Series, float] = {}
        self._gauges: dict[Series, float] = {}
        self._counts: dict[Series, list[int]] = {}
        self._sums: dict[Series, float] = {}

    def count(self, name: str, by: float = 1, *labels: str) -> None:
        """Adds to a counter."""
        series = (name, labels)
        self._counters[series] = self._counters.get(series, 0) + by

    def reach(self, name: str, value: float, *labels: str) -> None:
        """Sets a counter that somebody else keeps."""
        self._counters[name, labels] = value

    def gauge(self, name: str, value: float, *labels: str) -> None:
        self._gauges[name, labels] = value

    def observe(self, name: str, seconds: float, *labels: str) -> None:
        """Adds one value to a histogram."""
        series = (name, labels)
        counts = self._counts.get(series)
        if counts is None:
            counts = self._counts[series] = [0] * (len(SECONDS) + 1)
            self._sums[series] = 0.0
        counts[bisect_left(SECONDS, seconds)] += 1
        self._sums[series] += seconds

    def snapshot(self) -> Snapshot:
        histograms = {series: Buckets(tuple(counts), self._sums[series]) for series, counts in self._counts.items()}
        return Snapshot(dict(self._counters), dict(self._gauges), histograms)


class Exporter(Protocol):
    """Shows tallies to whoever collects metrics."""

    def publish(self, host: str, snapshot: Snapshot) -> None:
        """The newest tally of one host (or of "driver"). Cumulative: one that is skipped is not missed."""
        ...

    def forget(self, host: str) -> None:
        """The host is gone: its gauges must not stand for ever. Its counters have been counted."""
        ...

    def close(self) -> None: ...


def grown(before: Snapshot, now: Snapshot) -> dict[Series, float]:
    """What was added to counters between two snapshots of one tally."""
    added = {series: value - before.counters.get(series, 0) for series, value in now.counters.items()}
    return {series: by for series, by in added.items() if by}


def added(one: Snapshot, other: Snapshot) -> Snapshot:
    """The counters of both; gauges and histograms are left out."""
    counters = dict(one.counters)
    for series, value in other.counters.items():
        counters[series] = counters.get(series, 0) + value
    return Snapshot(counters)


def cumulative(buckets: Buckets) -> list[tuple[str, float]]:
    """(`le`, values up to it) as Prometheus wants them: each bucket with all below it."""
    total, found = 0, []
    for bound, count in zip((*map(str, SECONDS), "+Inf"), buckets.counts, strict=True):
        total += count
        found.append((bound, float(total)))
    return found
