"""Gives a process's metrics to Ray, whose agent on each node serves them to Prometheus under `ray_`."""

from __future__ import annotations

from functools import cache
from typing import Any

from ray.util.metrics import Counter, Gauge, Histogram

from rollout_engine.metrics import CATALOGUE, SECONDS, Exporter, Kind, Snapshot, grown, middle


class RayMetrics(Exporter):
    """Increments Ray's metrics by what the tally of this process has grown."""

    def __init__(self, host: str) -> None:
        """`host`: whose process this is; what others count they show themselves."""
        self._host = host
        self._before = Snapshot()

    def publish(self, host: str, snapshot: Snapshot) -> None:
        if host != self._host:
            return
        growth, self._before = grown(self._before, snapshot), snapshot
        for (name, values), by in growth.counters.items():
            _made(name).inc(by, _tags(name, values, host))
        for (name, values), value in growth.gauges.items():
            _made(name).set(value, _tags(name, values, host))
        for (name, values), buckets in growth.histograms.items():
            tags = _tags(name, values, host)
            # Ray takes values one by one and keeps no sum of its own: the middle of a bucket loses nothing there.
            for bucket, count in enumerate(buckets.counts):
                for _ in range(count):
                    _made(name).observe(middle(bucket), tags)

    def forget(self, host: str) -> None:
        """Ray itself drops the series of a process that has ended."""

    def close(self) -> None:
        return None


@cache
def _made(name: str) -> Any:
    """Ray's metric of this name: one per process, whoever asks, and not before Ray is up."""
    metric = CATALOGUE[name]
    tags = (*metric.labels, "host")
    if metric.kind is Kind.HISTOGRAM:
        return Histogram(name, metric.help, list(SECONDS), tags)
    return (Counter if metric.kind is Kind.COUNTER else Gauge)(name, metric.help, tags)


def _tags(name: str, values: tuple[str, ...], host: str) -> dict[str, str]:
    return {**dict(zip(CATALOGUE[name].labels, values, strict=True)), "host": host}
