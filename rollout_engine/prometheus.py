"""Serves a run's metrics as Prometheus text over HTTP, from the driver's process, with or without Ray."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, cast
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from rollout_engine.errors import InputError, describe
from rollout_engine.metrics import CATALOGUE, Exporter, Kind, Metric, Snapshot, cumulative

CLIENT_S = 5.0
"""How long a scraper may take to ask, or to read."""
STOP_S = 5.0
"""The longest that closing waits for a scrape that is under way."""


class Endpoint(Exporter):
    """`http://ADDRESS:PORT/metrics`. Scrapes are answered by a thread of its own, from the newest snapshots."""

    def __init__(self, address: str, port: int) -> None:
        """`port` 0 takes a free one. Raises InputError."""
        registry = CollectorRegistry()
        self._collector = Snapshots()
        registry.register(self._collector)
        try:
            self._server: WSGIServer
            self._server, self._thread = start_http_server(port, address, registry)
        except (OSError, OverflowError) as error:
            raise InputError(
                f"cannot listen on {address}:{port} for metrics: {describe(error)}",
                where="metrics.port",
                fix="take another port (--metrics-port, 0 takes a free one), or leave it out",
            ) from error
        # Of http.server's handlers: a client that asks nothing must not keep its thread.
        cast(Any, self._server.RequestHandlerClass).timeout = CLIENT_S
        self.url = f"http://{address}:{self._server.server_port}/metrics"

    def publish(self, host: str, snapshot: Snapshot) -> None:
        self._collector.publish(host, snapshot)

    def forget(self, host: str) -> None:
        self._collector.forget(host)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(STOP_S)


class Snapshots(Collector):
    """The newest snapshot of every host, as metric families."""

    def __init__(self) -> None:
        self._newest: dict[str, Snapshot] = {}
        self._lock = threading.Lock()

    def publish(self, host: str, snapshot: Snapshot) -> None:
        with self._lock:
            self._newest[host] = snapshot

    def forget(self, host: str) -> None:
        """What a lost host has counted stays: a counter that falls would look like a restart."""
        with self._lock:
            if host in self._newest:
                self._newest[host] = replace(self._newest[host], gauges={})

    def collect(self) -> Iterator[Family]:
        with self._lock:
            newest = list(self._newest.items())
        for name, metric in CATALOGUE.items():
            yield _family(name, metric, newest)


def _family(name: str, metric: Metric, newest: Iterable[tuple[str, Snapshot]]) -> Family:
    labels = (*metric.labels, "host")
    if metric.kind is Kind.HISTOGRAM:
        histogram = HistogramMetricFamily(name, metric.help, labels=labels)
        for host, snapshot in newest:
            for (each, values), buckets in snapshot.histograms.items():
                if each == name:
                    histogram.add_metric((*values, host), cumulative(buckets), buckets.sum)
        return histogram
    plain: CounterMetricFamily | GaugeMetricFamily
    counts = metric.kind is Kind.COUNTER
    plain = (CounterMetricFamily if counts else GaugeMetricFamily)(name, metric.help, labels=labels)
    for host, snapshot in newest:
        for (each, values), value in (snapshot.counters if counts else snapshot.gauges).items():
            if each == name:
                plain.add_metric((*values, host), value)
    return plain
