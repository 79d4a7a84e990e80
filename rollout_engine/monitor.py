"""What the driver counts of its run, and shows: metrics to who collects them, and status.json to other terminals.

Nothing here decides anything; a run whose monitor cannot write goes on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence

import pyarrow as pa

from rollout_engine.breaker import BreakerState
from rollout_engine.config import ModelSpec
from rollout_engine.errors import describe
from rollout_engine.loglines import About, speak_of
from rollout_engine.metrics import DRIVER, Exporter, Metrics, Snapshot, added
from rollout_engine.picture import (
    ErrorBook,
    Glance,
    Rate,
    SeenHost,
    host_statuses,
    model_statuses,
    notes_of,
    phases_of,
    progress_status,
    slowest_of,
)
from rollout_engine.pulse import Pulse
from rollout_engine.status import MAX_HOSTS, Status
from rollout_engine.vitals import Vitals

log = logging.getLogger(__name__)

STATUS_S = 1.0
"""How often the status is written and metrics are published, at most."""
WRITE_S = 10.0
"""The longest that the end of a run waits for its last status to be written."""


class Monitor:
    """Belongs to the driver's loop."""

    def __init__(
        self,
        run_id: str,
        epoch: int,
        models: Sequence[ModelSpec],
        write: Callable[[bytes], None] | None = None,
        exporters: Iterable[Exporter] = (),
    ) -> None:
        """`write` replaces the status; it is called in a thread. None: there is no status."""
        self._run_id, self._epoch, self._models = run_id, epoch, models
        self._write, self._exporters = write, list(exporters)
        self._metrics, self._errors, self._pulse = Metrics(), ErrorBook(), Pulse()
        self._vitals: dict[str, Vitals] = {}
        self._heard: dict[str, float] = {}
        self._gone = Snapshot()
        """What hosts had counted that are served no more."""
        self._tokens = defaultdict[str, Rate](Rate, {model.name: Rate() for model in models})
        self._ended = Rate()
        self._next = 0.0
        self._writing: asyncio.Task[None] | None = None
        self._refused = False

    def start(self) -> None:
        """What this task logs from now on, and what tasks log that it starts, is this run's driver's."""
        speak_of(About(self._run_id, self._epoch))
        self._pulse.start()

    # -- what happens -------------------------------------------------------------------------------------------

    def answered(self, host: str, took_s: float, waited_s: float, vitals: Vitals | None, now: float) -> None:
        """A host has replied, after `took_s`, of which it waited `waited_s` for something to say."""
        self._metrics.observe("rollout_exchange_seconds", max(took_s - waited_s, 0.0))
        self._heard[host] = now
        if vitals is not None:
            self._vitals[host] = vitals
            for exporter in self._exporters:
                exporter.publish(host, vitals.metrics)

    def lost(self, host: str) -> None:
        """A host is served no more."""
        self._heard.pop(host, None)
        vitals = self._vitals.pop(host, None)
        if vitals is not None:
            self._gone = added(self._gone, vitals.metrics)
        for exporter in self._exporters:
            exporter.forget(host)

    def committed(self, batch: pa.RecordBatch, size: int, took_s: float) -> None:
        """Rows are on the disk, `took_s` after their arrival."""
        metrics = self._metrics
        metrics.count("rollout_written_bytes", size)
        metrics.observe("rollout_commit_seconds", took_s)
        models = batch.column("model").to_pylist()
        for (model, status), count in Counter(zip(models, batch.column("status").to_pylist(), strict=True)).items():
            metrics.count("rollout_ended", count, model, status)
        scores = batch.column("score")
        if not scores.null_count:
            for model, count in Counter(models).items():
                metrics.count("rollout_scores", count, model)
            return
        for model, valid in zip(models, scores.is_valid().to_pylist(), strict=True):
            metrics.count("rollout_scores", valid, model)
        for boundary, count in Counter(batch.column("failure_boundary").to_pylist()).items():
            if boundary is not None:
                metrics.count("rollout_failures", count, boundary)
        self._errors.add(batch)

    # -- what is shown ------------------------------------------------------------------------------------------

    def is_due(self, now: float) -> bool:
        """Whether it is time to show where the run stands."""
        return now >= self._next

    def show(self, glance: Glance) -> None:
        """Publishes metrics, and has the status written beside the loop, unless the last one is still being written."""
        self._next = glance.now + STATUS_S
        self._gauge(glance)
        snapshot = self._metrics.snapshot()
        for exporter in self._exporters:
            exporter.publish(DRIVER, snapshot)
        self._rate(glance)
        if self._write is not None and (self._writing is None or self._writing.done()):
            data = self._status(glance).encoded()
            self._writing = asyncio.get_running_loop().create_task(self._put(self._write, data), name="status")

    async def close(self, glance: Glance) -> None:
        """Shows the end, in bounded time."""
        await self._pulse.stop()
        if self._writing is not None:
            await asyncio.wait({self._writing}, timeout=WRITE_S)
        self.show(glance)
        if self._writing is not None:
            await asyncio.wait({self._writing}, timeout=WRITE_S)
        for exporter in self._exporters:
            await asyncio.to_thread(exporter.close)

    def _gauge(self, glance: Glance) -> None:
        metrics = self._metrics
        metrics.reach("rollout_retries", glance.progress.retries)
        metrics.gauge("rollout_queued", glance.progress.pending)
        metrics.gauge("rollout_held", sum(host.held for host in glance.hosts))
        metrics.gauge("rollout_hosts", len(glance.hosts))
        metrics.gauge("rollout_loop_lag_seconds", self._pulse.worst())
        for model, permits in glance.lent.items():
            metrics.gauge("rollout_leased_permits", permits, model)
        for spec, breaker in zip(self._models, glance.breakers, strict=True):
            metrics.gauge("rollout_breaker_open", breaker.state is not BreakerState.CLOSED, spec.name)

    def _rate(self, glance: Glance) -> None:
        self._ended.saw(glance.now, glance.progress.done)
        for model, rate in self._tokens.items():
            rate.saw(glance.now, sum(tally.total("rollout_tokens", model) for tally in self._tallies()))

    def _tallies(self) -> list[Snapshot]:
        return [self._gone, *(vitals.metrics for vitals in self._vitals.values())]

    def _status(self, glance: Glance) -> Status:
        vitals = {host.host_id: self._vitals[host.host_id] for host in glance.hosts if host.host_id in self._vitals}
        seen = [
            SeenHost(each, max(glance.now - self._heard.get(each.host_id, glance.now), 0.0), vitals.get(each.host_id))
            for each in glance.hosts
        ]
        breakers = {spec.name: breaker for spec, breaker in zip(self._models, glance.breakers, strict=True)}
        return Status(
            run_id=self._run_id,
            epoch=self._epoch,
            written_at=time.time(),
            state=glance.state,
            progress=progress_status(glance.progress, self._ended.per_s, glance.state == "ended"),
            hosts=tuple(host_statuses(seen)),
            more_hosts=max(len(seen) - MAX_HOSTS, 0),
            models=tuple(model_statuses(breakers, self._tallies(), self._tokens, glance.limits)),
            phases=phases_of(vitals.values()),
            slowest=tuple(slowest_of(vitals)),
            errors=tuple(self._errors.statuses()),
            notes=notes_of(glance.progress.notes),
        )

    async def _put(self, write: Callable[[bytes], None], data: bytes) -> None:
        try:
            await asyncio.to_thread(write, data)
            self._refused = False
        except OSError as error:
            if not self._refused:
                log.warning("status.json cannot be written, the run goes on: %s", describe(error))
            self._refused = True
