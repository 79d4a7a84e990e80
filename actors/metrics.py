"""Gives a process's metrics to Ray, whose agent on each node serves them to Prometheus under `ray_`."""

from __future__ import annotations

from functools import cache
from typing import Any

from ray.util.metrics import Counter, Gauge

from rollout_engine.metrics import CATALOGUE, Buckets, Exporter, Kind, Series, Snapshot, cumulative, grown


class RayMetrics(Exporter):
    """Increments Ray's counters by what the tally of this process has grown, and sets what stands as it is.

    A histogram of Ray's takes values one by one, and keeps no sum: each would cost the process some 2 µs and the
    node's agent much more. So the series of ours (`_bucket` with `le`, `_sum`, `_count`) are gauges for Ray.
    """

    def __init__(self, host: str) -> None:
        """`host`: whose process this is; what others count they show themselves."""
        self._host = host
        self._before = Snapshot()

    def publish(self, host: str, snapshot: Snapshot) -> None:
        if host != self._host:
            return
        growth, self._before = grown(self._before, snapshot), snapshot
        for (name, values), by in growth.items():
            _made(name).inc(by, _tags(name, values, host))
        for (name, values), value in snapshot.gauges.items():
            _made(name).set(value, _tags(name, values, host))
        for series, buckets in snapshot.histograms.items():
            self._show(series, buckets)

    def _show(self, series: Series, buckets: Buckets) -> None:
        name, values = series
        tags = _tags(name, values, self._host)
        bounds = cumulative(buckets)
        for bound, count in bounds:
            _made(name, "_bucket").set(count, {**tags, "le": bound})
        _made(name, "_count").set(bounds[-1][1], tags)
        _made(name, "_sum").set(buckets.sum, tags)

    def forget(self, host: str) -> None:
        """Ray itself drops the series of a process that has ended."""

    def close(self) -> None:
        return None


@cache
def _made(name: str, part: str = "") -> Any:
    """Ray's metric of this name: one per process, whoever asks, and not before Ray is up. `part`: of a histogram."""
    metric = CATALOGUE[name]
    tags = (*metric.labels, "host", *(["le"] if part == "_bucket" else []))
    return (Counter if metric.kind is Kind.COUNTER else Gauge)(name + part, metric.help, tags)


def _tags(name: str, values: tuple[str, ...], host: str) -> dict[str, str]:
    return {**dict(zip(CATALOGUE[name].labels, values, strict=True)), "host": host}
