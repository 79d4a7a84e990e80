"""Serves `exchange`: one per node, in-process or inside a Ray actor; takes grants, gives rows and what it has to say.

A granted key is queued, then running, then finished (its row waits to be sent) and forgotten once its batch is
acknowledged. Slots are freed when the agent is done, before verification and teardown.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

from rollout_engine.bodies import Bodies
from rollout_engine.bound import Model
from rollout_engine.config import ModelSpec
from rollout_engine.errors import HostError, TaskBodyError
from rollout_engine.exchange import HostLimits, Reply, Request
from rollout_engine.held import Held
from rollout_engine.hooks import TEARDOWN_S
from rollout_engine.hostclock import DriverClock
from rollout_engine.hostmeter import HostMeter
from rollout_engine.hostplan import HostPlan
from rollout_engine.hosttraces import HostTraces
from rollout_engine.loglines import About
from rollout_engine.machine import check_descriptors, cores
from rollout_engine.metrics import Exporter
from rollout_engine.models import make_client, sampling_of
from rollout_engine.outbox import Outbox
from rollout_engine.permits import Permits
from rollout_engine.probe import Probe, probe
from rollout_engine.resources import make_resources
from rollout_engine.sandboxes import Origin, make_provider
from rollout_engine.sandboxes.base import SandboxProvider
from rollout_engine.teardown import finish
from rollout_engine.verifiers.workshop import Workshop
from rollout_engine.waiting import OLDEST, Waiting

log = logging.getLogger(__name__)

MAX_TROUBLES = 16
"""Troubles of the node that are told; more say nothing new."""
CLOSE_S = 20.0
"""The longest that a stopping host waits for its rollouts to clean up."""
PART_CLOSE_S = 60.0
"""The longest that each of its parts (sandboxes' provider, verifiers, model clients, traces) may take after that."""


class Host:
    """Owns a node's sandboxes and model clients. All methods run on the event loop that `open` ran on."""

    def __init__(
        self,
        plan: HostPlan,
        keys: Mapping[str, str] | None = None,
        on_expired: Callable[[], None] | None = None,
        exporter: Exporter | None = None,
    ) -> None:
        """`keys`: model name -> API key. `on_expired` is called when the lease has ended and all is cleaned up.

        `exporter`: where the metrics of this process go besides the driver.
        """
        self.plan = plan
        self._on_expired = on_expired
        self._keys = dict(keys or {})
        self._spec = plan.config.host
        self._number = 0
        self._granted = 0
        self._limits = HostLimits()
        self._waited = 0.0
        self._meter = HostMeter(About(plan.run_id, plan.epoch, plan.host_id), plan.host_id, self._spec.slots, exporter)
        self._nudged = False
        self._closing = False
        self._heard = 0.0
        self._clock = DriverClock()
        self._troubles: dict[str, None] = {}
        self._watches: list[asyncio.Task[None]] = []

    # -- life ---------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Makes clients and agent. Raises InputError, SandboxUnavailable."""
        check_descriptors(self._spec.slots)
        config = self.plan.config
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._outbox = Outbox(self._spec, self._wake.set)
        self._traces = HostTraces(self.plan, self._trouble)
        self._models = {spec.name: self._model(spec) for spec in config.clients}
        provider = self._provider()
        self._workshop = Workshop(provider, scoring=self._spec.scoring or max(cores() // config.hosts_per_node, 1))
        self._resources = make_resources(self.plan, self._models, provider, self._clock.now)
        self._bodies = Bodies(config, self._workshop, self._hook_failed)
        self._held = Held(self.plan, self._resources, self._bodies, self._outbox, self._traces, self._meter)
        self._heard = self._loop.time()
        self._watches.append(asyncio.create_task(self._watch_lease(), name="lease watchdog"))
        self._watches.append(asyncio.create_task(self._held.sweep(), name="sweeper"))
        self._meter.start()

    def _model(self, spec: ModelSpec) -> Model:
        client = make_client(spec, api_key=self._keys.get(spec.name))
        return Model(spec, client, sampling_of(spec), Permits(self.nudge), ended=self._meter.calls(spec.name, client))

    def _provider(self) -> SandboxProvider | None:
        config = self.plan.config
        if config.sandbox == "none":
            return None
        origin = Origin(self.plan.run_id, self.plan.host_id, self.plan.epoch)
        rates, settings = self._spec.creations_per_minute, config.sandbox_options
        provider = make_provider(config.sandbox, creations_per_minute=rates, settings=settings, origin=origin)
        return self._meter.provider(provider)

    async def close(self) -> None:
        """Cancels what runs, removes every sandbox and closes every connection, in bounded time."""
        self._closing = True
        tasks = self._held.end()
        for watch in self._watches:
            if watch is not asyncio.current_task():
                watch.cancel()
                tasks.append(watch)
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_S)
        await finish(self._resources.leftovers.close(), PART_CLOSE_S)
        await finish(self._bodies.tear_down(self._resources.agent), TEARDOWN_S + 1.0)
        parts = [self._workshop.close(), *(model.client.close() for model in self._models.values())]
        parts.append(self._traces.close())
        if self._resources.provider is not None:
            parts.append(self._resources.provider.close())
        await asyncio.gather(*(finish(part, PART_CLOSE_S) for part in parts))
        await finish(self._meter.stop(), PART_CLOSE_S)
        self._wake.set()

    def _hook_failed(self, what: str) -> None:
        log.warning("host=%s hook %s", self.plan.host_id, what)
        self._trouble(f"hook {what}")

    def _trouble(self, message: str) -> None:
        if len(self._troubles) < MAX_TROUBLES:
            self._troubles[message] = None

    async def _watch_lease(self) -> None:
        """A host that its driver has forgotten ends its rollouts: they may be running elsewhere by now."""
        while (left := self._heard + self._spec.lease_s - self._loop.time()) > 0:
            await asyncio.sleep(left)
        log.error(
            "host=%s has not heard from its driver for %g s: cancelling %d rollouts",
            self.plan.host_id,
            self._spec.lease_s,
            len(self._held.entries),
        )
        await self.close()
        if self._on_expired is not None:
            self._on_expired()

    # -- the exchange -------------------------------------------------------------------------------------------

    async def exchange(self, request: Request) -> Reply:
        """Takes a request in, waits until there is something to say, and says it. Raises HostError once closed."""
        if self._closing:
            raise HostError(f"host {self.plan.host_id} is closed (its lease ended, or it was stopped)")
        if request.epoch != self.plan.epoch:
            raise HostError(f"host {self.plan.host_id} belongs to epoch {self.plan.epoch}, not {request.epoch}")
        self._heard = self._loop.time()
        self._clock.heard(request.sent_at)
        if request.number > self._number:
            self._number = request.number
            self._take_in(request)
        began = self._loop.time()
        await self._wait(request)
        self._heard = self._loop.time()
        self._waited = self._heard - began
        return self._reply(request)

    def nudge(self) -> None:
        """Makes a waiting exchange return at once."""
        self._nudged = True
        self._wake.set()

    def _take_in(self, request: Request) -> None:
        self._limits = request.limits
        self._held.paused = request.limits.paused
        self._outbox.acknowledge(request.acked_seq)
        for name, lease in request.limits.leases.items():
            self._models[name].permits.renew(lease)
        for digest, raw in request.bodies.items():
            self._held.add_body(digest, raw)
        first = request.grant_seq - len(request.specs) + 1
        for number, spec in enumerate(request.specs, first):
            if number == self._granted + 1:
                self._granted = number
                self._held.hold(spec)
        for key in request.cancel_keys:
            self._held.cancel(key)
        self._held.hand_back(request.limits.hand_back)
        self._held.pump()

    async def _wait(self, request: Request) -> None:
        """Until a full batch is ready, the linger of the oldest news is over, a nudge, or the heartbeat."""
        loop, limits = self._loop, self._limits
        ends = loop.time() + limits.wait_s
        if self._outbox.has_unsent(request.received_seq):
            return
        while not self._nudged and not self._closing and not self._outbox.full:
            news = self._outbox.oldest if self._outbox.oldest is not None else ends
            until = min(ends, news + limits.linger_s)
            left = until - loop.time()
            if left <= 0:
                break
            self._wake.clear()
            timer = loop.call_later(left, self._wake.set)
            try:
                await self._wake.wait()
            finally:
                timer.cancel()
        self._nudged = False

    def _reply(self, request: Request) -> Reply:
        held, outbox = self._held, self._outbox
        return Reply(
            batches=outbox.take(request.received_seq),
            grant_seq_received=self._granted,
            held_count=held.held_count + len(outbox.unsent),
            held_hash=held.hash ^ outbox.unsent_hash,
            held=(*held.entries, *outbox.unsent) if request.want_held else None,
            missing=tuple(held.homeless),
            free_slots=held.free_slots(),
            demand={name: model.permits.demand() for name, model in self._models.items()},
            running=held.active + len(outbox.unsent),
            stats={
                "cpu_s": time.process_time(),
                "started": held.started,
                "finished": held.finished,
                "moves": self._resources.activity.moves,
                "waited_s": self._waited,
                "clock": time.time(),
            },
            troubles=tuple(self._troubles),
            vitals=self._meter.vitals(
                self._heard, held, {name: model.permits for name, model in self._models.items()}, held.paused
            ),
        )

    async def probe(self, body: bytes) -> Probe:
        """The dry run of a task, beside the rollouts. Raises HostError once closed, TaskBodyError."""
        if self._closing:
            raise HostError(f"host {self.plan.host_id} is closed")
        try:
            return await probe(body, self.plan.config, self._resources, self._workshop)
        except Exception as error:
            raise TaskBodyError(f"{type(error).__name__}: {error}") from error

    def waiting_for(self, limit: int = OLDEST) -> list[Waiting]:
        """What the oldest held rollouts wait for. May be called from any thread."""
        return self._held.waiting_for(limit)
