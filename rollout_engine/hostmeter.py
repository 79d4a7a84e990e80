"""What a host counts of its rollouts, and says of itself."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Protocol

from rollout_engine.loglines import About
from rollout_engine.metered import CallEnded, MeteredProvider, call_meter
from rollout_engine.metrics import Exporter, Metrics
from rollout_engine.models.base import ModelClient
from rollout_engine.models.retry import TryCounts
from rollout_engine.permits import Permits
from rollout_engine.pulse import Pulse
from rollout_engine.rolloutline import RolloutLines
from rollout_engine.sandboxes.base import SandboxProvider
from rollout_engine.types import RolloutRecord
from rollout_engine.vitals import SLOWEST, VITALS_S, Vitals
from rollout_engine.waiting import Waiting

PHASES = ("queue", "start", "setup", "agent", "verify", "close", "commit")


class Watched(Protocol):
    """What a host holds, as far as it is looked at here."""

    @property
    def held_count(self) -> int: ...

    def phases(self) -> Iterable[str]:
        """The phase of each rollout that it holds."""
        ...

    def waiting_for(self, limit: int) -> list[Waiting]:
        """What its oldest rollouts wait for."""
        ...


class HostMeter:
    """A host's tally. `start` on its loop, `stop` at its end."""

    def __init__(self, about: About, host_id: str, slots: int, exporter: Exporter | None = None) -> None:
        """`exporter`: where this process shows its tally besides the driver."""
        self._about, self._host_id, self._slots, self._exporter = about, host_id, slots, exporter
        self._lines = RolloutLines()
        self._metrics = Metrics()
        self._tries: dict[str, TryCounts | None] = {}
        self._pulse = Pulse()
        self._node = socket.gethostname()
        self._next, self._told, self._ended = 0.0, 0, 0

    def start(self) -> None:
        self._pulse.start()

    async def stop(self) -> None:
        await self._pulse.stop()
        self._lines.say(self._about)
        if self._exporter is not None:
            self._exporter.publish(self._host_id, self._metrics.snapshot())
            self._exporter.close()

    def calls(self, name: str, client: ModelClient) -> CallEnded:
        """Where the calls of a model are told; what its client counts itself is looked at."""
        found = getattr(client, "tries", None)
        self._tries[name] = found if isinstance(found, TryCounts) else None
        return call_meter(name, self._metrics)

    def provider(self, provider: SandboxProvider) -> MeteredProvider:
        return MeteredProvider(provider, self._metrics)

    def ended(self, record: RolloutRecord) -> None:
        """A rollout is over. Call it while the record still has its turns."""
        self._ended += 1
        metrics, model = self._metrics, record.model
        if record.prompt_tokens or record.completion_tokens:
            metrics.count("rollout_tokens", record.prompt_tokens, model, "prompt")
            metrics.count("rollout_tokens", record.completion_tokens, model, "completion")
        if record.cost_usd:
            metrics.count("rollout_cost_usd", record.cost_usd, model)
        if record.verifier_isolation is not None:
            metrics.observe("rollout_verifier_seconds", record.verify_s)
        self._lines.add(record)

    def vitals(self, now: float, host: Watched, permits: Mapping[str, Permits], paused: bool) -> Vitals | None:
        """What to tell the driver with this reply; None: nothing yet.

        What has just ended is told at once where nothing else is held, so that the end of a run is not missed.
        """
        self._lines.say(self._about)
        news = self._told != self._ended and not host.held_count
        if now < self._next and not news:
            return None
        self._next, self._told = now + VITALS_S, self._ended
        phases = Counter(host.phases())
        self._gauge(phases, permits)
        snapshot = self._metrics.snapshot()
        if self._exporter is not None:
            self._exporter.publish(self._host_id, snapshot)
        slowest = tuple(host.waiting_for(SLOWEST))
        return Vitals(self._node, os.getpid(), self._slots, paused, dict(phases), slowest, snapshot)

    def _gauge(self, phases: Mapping[str, int], permits: Mapping[str, Permits]) -> None:
        metrics = self._metrics
        metrics.gauge("rollout_slots", self._slots)
        metrics.gauge("rollout_loop_lag_seconds", self._pulse.worst())
        for phase in PHASES:
            metrics.gauge("rollout_phase", phases.get(phase, 0), phase)
        for name, tries in self._tries.items():
            metrics.gauge("rollout_model_calls_in_flight", permits[name].in_use, name)
            metrics.gauge("rollout_model_calls_waiting", permits[name].waiting, name)
            if tries is not None:
                metrics.reach("rollout_model_rate_limited", tries.rate_limited, name)
                metrics.reach("rollout_model_retries", tries.retries, name)
