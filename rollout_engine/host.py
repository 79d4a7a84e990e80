"""Runs many rollouts on one event loop behind `exchange`. The same object serves in-process and inside a Ray actor.

A granted key is queued, then running, then finished (its row waits to be sent) and forgotten once its batch is
acknowledged. Slots are freed when the agent is done, before verification and teardown.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import pyarrow as pa

from rollout_engine.agents import make_agent
from rollout_engine.bound import Model
from rollout_engine.config import LogLevel, ModelSpec, RunConfig
from rollout_engine.errors import HostError, TaskBodyError, describe, failure_of
from rollout_engine.exchange import HandBack, HostLimits, Reply, Request, scramble
from rollout_engine.hooks import TEARDOWN_S, has_hook, tear_down
from rollout_engine.hostclock import DriverClock
from rollout_engine.hostmeter import HostMeter
from rollout_engine.loglines import About, speak_of
from rollout_engine.machine import check_descriptors
from rollout_engine.metrics import Exporter
from rollout_engine.models import make_client, sampling_of
from rollout_engine.outbox import BIG_ROW_BYTES, Outbox, row_bytes, to_row, turns_bytes
from rollout_engine.permits import Permits
from rollout_engine.prepare import prepare
from rollout_engine.probe import Probe, probe
from rollout_engine.rollout import PreparedTask, Resources, Rollout
from rollout_engine.sandboxes import Origin, make_provider
from rollout_engine.sandboxes.paced import at_once
from rollout_engine.store.traces import TraceWriter, sees_run
from rollout_engine.teardown import Leftovers, finish
from rollout_engine.threads import in_own_thread
from rollout_engine.types import Boundary, Failure, RolloutRecord, RolloutSpec, new_record
from rollout_engine.verifiers.workshop import Workshop
from rollout_engine.waiting import OLDEST, Waiting, waiting

log = logging.getLogger(__name__)

IDLE_BODIES = 1024
"""Task bodies kept after their last rollout, in case another one of the same task comes."""
SWEEP_S = 5.0
"""How often the host looks for rollouts that should have ended."""
OVERDUE_S = 10.0
"""A rollout that goes on for so long after its deadline, or after its cancellation, is given up."""
MAX_TROUBLES = 16
"""Troubles of the node that are told; more say nothing new."""
CLOSE_S = 20.0
"""The longest that a stopping host waits for its rollouts to clean up."""
PART_CLOSE_S = 60.0
"""The longest that each of its parts (sandboxes' provider, verifiers, model clients, traces) may take after that."""
TRACE_S = 60.0
"""A trace that is not written by then travels inline."""


@dataclass(frozen=True, slots=True)
class HostPlan:
    """All that a host is told when it is made. Picklable; holds no secrets."""

    run_id: str
    epoch: int
    host_id: str
    node_id: str
    config: RunConfig
    run_dir: str | None = None
    """Where trace and log files may go; None: turns travel inline."""
    log_level: LogLevel = "info"


@dataclass(slots=True)
class _Entry:
    spec: RolloutSpec
    rollout: Rollout | None = None
    task: asyncio.Task[None] | None = None
    cancelled: bool = False
    ended: bool = False
    """The rollout itself is over; only its row is still on its way."""
    since: float = field(default_factory=time.monotonic)
    """When it was granted."""
    ends_at: float = math.inf
    """By then it has ended, unless its agent or verifier does not let itself be cancelled."""


@dataclass(slots=True)
class _Body:
    raw: bytes
    prepared: PreparedTask | None = None
    users: int = 0


@dataclass(slots=True)
class _Counts:
    started: int = 0
    finished: int = 0


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
        self._big_bytes = min(plan.config.store.inline_trace_bytes, BIG_ROW_BYTES)
        """Rows above this are looked at: their turns may go into a trace, or be made into a table beside the loop."""
        self._held: dict[int, _Entry] = {}
        self._held_hash = 0
        self._queue: deque[_Entry] = deque()
        self._homeless: dict[str, list[_Entry]] = {}
        self._bodies: dict[str, _Body] = {}
        self._idle: OrderedDict[str, None] = OrderedDict()
        """Digests of bodies that nothing uses, the longest unused first."""
        self._running = 0
        self._active = 0
        self._number = 0
        self._granted = 0
        self._limits = HostLimits()
        self._counts = _Counts()
        self._waited = 0.0
        self._meter = HostMeter(About(plan.run_id, plan.epoch, plan.host_id), plan.host_id, self._spec.slots, exporter)
        self._nudged = False
        self._closing = False
        self._heard = 0.0
        self._clock = DriverClock()
        self._troubles: dict[str, None] = {}
        self._watch: asyncio.Task[None] | None = None
        self._sweeper: asyncio.Task[None] | None = None
        self._abandoned: set[asyncio.Task[None]] = set()
        self._retiring: set[asyncio.Task[None]] = set()
        """Teardowns of verifiers whose task is forgotten."""

    # -- life ---------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Makes clients and agent. Raises InputError, SandboxUnavailable."""
        check_descriptors(self._spec.slots)
        config = self.plan.config
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._outbox = Outbox(self._spec, self._wake.set)
        self._traces = trace_writer(self.plan)
        self._models = {spec.name: self._model(spec) for spec in config.clients}
        rates = self._spec.creations_per_minute
        provider = None
        if config.sandbox != "none":
            origin = Origin(self.plan.run_id, self.plan.host_id, self.plan.epoch)
            made = make_provider(config.sandbox, creations_per_minute=rates, origin=origin)
            provider = self._meter.provider(made)
        starting = at_once(self._spec.starting, rates, config.sandbox, config.limits.start_s)
        verifying = at_once(self._spec.verifying, rates, config.sandbox, config.limits.verify_s)
        self._workshop = Workshop(provider)
        self._resources = Resources(
            config=config,
            agent=make_agent(config.agent, config.agent_options),
            models=self._models,
            provider=provider,
            starting=asyncio.Semaphore(starting),
            verifying=asyncio.Semaphore(verifying),
            host_id=self.plan.host_id,
            node_id=self.plan.node_id,
            leftovers=Leftovers(config.limits.close_s),
            clock=self._clock.now,
        )
        self._heard = self._loop.time()
        self._watch = asyncio.create_task(self._watch_lease(), name="lease watchdog")
        self._sweeper = asyncio.create_task(self._sweep(), name="sweeper")
        self._meter.start()

    def _model(self, spec: ModelSpec) -> Model:
        client = make_client(spec, api_key=self._keys.get(spec.name))
        return Model(spec, client, sampling_of(spec), Permits(self.nudge), ended=self._meter.calls(spec.name, client))

    async def close(self) -> None:
        """Cancels what runs, removes every sandbox and closes every connection, in bounded time."""
        self._closing = True
        tasks = [entry.task for entry in self._held.values() if entry.task is not None]
        tasks += [each for each in (self._watch, self._sweeper) if each not in (None, asyncio.current_task())]
        for task in (*tasks, *self._abandoned):
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_S)
        await finish(self._resources.leftovers.close(), PART_CLOSE_S)
        await finish(self._tear_down(), TEARDOWN_S + 1.0)
        parts = [self._workshop.close(), *(model.client.close() for model in self._models.values())]
        if self._traces is not None:
            parts.append(in_own_thread(self._traces.close, "close traces"))
        if self._resources.provider is not None:
            parts.append(self._resources.provider.close())
        await asyncio.gather(*(finish(part, PART_CLOSE_S) for part in parts))
        await finish(self._meter.stop(), PART_CLOSE_S)
        self._wake.set()

    async def _tear_down(self) -> None:
        """The last hooks of the agent and of every verifier that is still here."""
        verifiers = [body.prepared.verifier for body in self._bodies.values() if body.prepared is not None]
        await tear_down([self._resources.agent, *verifiers], self._hook_failed)
        await asyncio.gather(*self._retiring)

    def _retire(self, body: _Body) -> None:
        if body.prepared is not None and has_hook(body.prepared.verifier, "teardown"):
            task = self._loop.create_task(tear_down([body.prepared.verifier], self._hook_failed))
            self._retiring.add(task)
            task.add_done_callback(self._retiring.discard)

    def _hook_failed(self, what: str) -> None:
        log.warning("host=%s hook %s", self.plan.host_id, what)
        self._trouble(f"hook {what}")

    async def _watch_lease(self) -> None:
        """A host that its driver has forgotten ends its rollouts: they may be running elsewhere by now."""
        while (left := self._heard + self._spec.lease_s - self._loop.time()) > 0:
            await asyncio.sleep(left)
        log.error(
            "host=%s has not heard from its driver for %g s: cancelling %d rollouts",
            self.plan.host_id,
            self._spec.lease_s,
            len(self._held),
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
        self._outbox.acknowledge(request.acked_seq)
        for name, lease in request.limits.leases.items():
            self._models[name].permits.renew(lease)
        for digest, raw in request.bodies.items():
            self._add_body(digest, raw)
        first = request.grant_seq - len(request.specs) + 1
        for number, spec in enumerate(request.specs, first):
            if number == self._granted + 1:
                self._granted = number
                self._hold(spec)
        for key in request.cancel_keys:
            self._cancel(key)
        self._hand_back(request.limits.hand_back)
        self._pump()

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
        batches = self._outbox.take(request.received_seq)
        return Reply(
            batches=batches,
            grant_seq_received=self._granted,
            held_count=len(self._held) + len(self._outbox.unsent),
            held_hash=self._held_hash ^ self._outbox.unsent_hash,
            held=(*self._held, *self._outbox.unsent) if request.want_held else None,
            missing=tuple(self._homeless),
            free_slots=self._free_slots(),
            demand={name: model.permits.demand() for name, model in self._models.items()},
            running=self._active + len(self._outbox.unsent),
            stats={
                "cpu_s": time.process_time(),
                "started": self._counts.started,
                "finished": self._counts.finished,
                "moves": self._resources.activity.moves,
                "waited_s": self._waited,
                "clock": time.time(),
            },
            troubles=tuple(self._troubles),
            vitals=self._meter.vitals(
                self._heard, self, {name: model.permits for name, model in self._models.items()}, self._limits.paused
            ),
        )

    def _free_slots(self) -> int:
        """Room for grants: slots and prefetch, but never more than twice that many held in all phases."""
        if self._closing or self._outbox.unacked_bytes > self._spec.max_unacked_bytes:
            return 0
        room = self._spec.slots + int(self._spec.slots * self._spec.prefetch)
        return max(0, min(room - self._running - len(self._queue), 2 * room - len(self._held)))

    # -- rollouts -----------------------------------------------------------------------------------------------

    def _add_body(self, digest: str, raw: bytes) -> None:
        if digest not in self._bodies:
            self._bodies[digest] = _Body(raw)
            self._idle[digest] = None
        for entry in self._homeless.pop(digest, ()):
            self._use(entry)

    def _hold(self, spec: RolloutSpec) -> None:
        entry = _Entry(spec)
        self._held[spec.key] = entry
        self._held_hash ^= scramble(spec.key)
        if spec.digest in self._bodies:
            self._use(entry)
        else:
            self._homeless.setdefault(spec.digest, []).append(entry)

    def _use(self, entry: _Entry) -> None:
        """Queues a rollout whose task's body is here."""
        digest = entry.spec.digest
        self._bodies[digest].users += 1
        self._idle.pop(digest, None)
        self._queue.append(entry)

    def _pump(self) -> None:
        """Starts queued rollouts while there are slots."""
        if self._limits.paused or self._outbox.unacked_bytes > self._spec.max_unacked_bytes:
            return
        while self._queue and self._running < self._spec.slots and not self._closing:
            entry = self._queue.popleft()
            if entry.cancelled or entry.ended:
                continue
            try:
                prepared = self._prepared(entry.spec.digest)
            except Exception as error:
                record = self._unstarted(entry.spec)
                record.fail(failure_of(error))
                self._finish_unrun(entry, record)
                continue
            self._running += 1
            self._active += 1
            self._counts.started += 1
            entry.rollout = Rollout(entry.spec, prepared, self._resources, self._slot_free)
            entry.ends_at = self._loop.time() + prepared.deadline_s + OVERDUE_S
            entry.task = self._loop.create_task(self._run(entry, entry.rollout))

    async def _run(self, entry: _Entry, rollout: Rollout) -> None:
        speak_of(About(self.plan.run_id, self.plan.epoch, self.plan.host_id, entry.spec))
        try:
            await rollout.run()
        except asyncio.CancelledError:
            # Cancelled by key: that is the rollout's row. By the host's own end: nobody is left to tell.
            if not entry.cancelled or entry.ended:
                raise
            rollout.record.cancel()
        if entry.ended:
            return
        entry.ended = True
        record = rollout.record
        self._meter.ended(record)
        size = row_bytes(record)
        row = None
        if size > self._big_bytes:
            await self._spill(record)
            size = row_bytes(record)
            row = await asyncio.to_thread(to_row, record) if size > BIG_ROW_BYTES else None
        self._active -= 1
        self._finish(entry, record, size, row)

    async def _sweep(self) -> None:
        """Gives up rollouts that are long overdue: user code that swallows its cancellation holds nobody up."""
        while True:
            await asyncio.sleep(SWEEP_S)
            now = self._loop.time()
            for entry in [entry for entry in self._held.values() if entry.ends_at < now and not entry.ended]:
                if entry.rollout is not None and entry.task is not None:
                    self._abandon(entry, entry.rollout, entry.task)

    def _abandon(self, entry: _Entry, rollout: Rollout, task: asyncio.Task[None]) -> None:
        """Writes the row of a rollout that does not end; what it still does counts no more."""
        message = f"it did not let itself be ended; was in phase {rollout.phase}"
        log.error("host=%s rollout=%s %s", self.plan.host_id, entry.spec, message)
        entry.ended = True
        record = replace(rollout.record, turns=list(rollout.record.turns), ended_at=self._clock.now())
        record.num_turns = len(record.turns)
        failure = Failure(Boundary.DEADLINE, "DeadlineError", message, retryable=False)
        record.cancel(failure) if entry.cancelled else record.fail(failure)
        for left in (task, self._loop.create_task(rollout.abandon())):
            self._abandoned.add(left)
            left.add_done_callback(self._abandoned.discard)
        task.cancel()
        self._active -= 1
        self._finish_unrun(entry, record)

    async def _spill(self, record: RolloutRecord) -> None:
        """Moves large turns into this host's trace file, where hosts can reach the run directory."""
        if self._traces is None or turns_bytes(record.turns) <= self.plan.config.store.inline_trace_bytes:
            return
        try:
            async with asyncio.timeout(TRACE_S):
                where = await asyncio.to_thread(self._traces.write, record.turns)
        except Exception as error:  # the disk refuses, or an agent's turns fit no table: the outbox finds that out
            log.warning("host=%s could not write a trace, sending it inline: %s", self.plan.host_id, describe(error))
            self._trouble(f"{self._traces.path}: traces travel inline: {error}; make room there, or mend its rights")
            return
        record.trace_file, record.trace_offset, record.trace_sha256 = where
        record.turns = []

    def _slot_free(self) -> None:
        self._running -= 1
        self._outbox.freed(self._loop.time())
        self._pump()

    def _prepared(self, digest: str) -> PreparedTask:
        body = self._bodies[digest]
        if body.prepared is None:
            try:
                body.prepared = prepare(body.raw, self.plan.config, self._workshop)
            except Exception as error:
                raise TaskBodyError(f"{type(error).__name__}: {error}") from error
        return body.prepared

    def _cancel(self, key: int) -> None:
        entry = self._held.get(key)
        if entry is None or entry.cancelled or entry.ended:
            return
        entry.cancelled = True
        entry.ends_at = min(entry.ends_at, self._loop.time() + self.plan.config.limits.close_s + OVERDUE_S)
        if entry.task is not None:
            # Not before its first step: a coroutine that was never entered could not make its row.
            self._loop.call_soon(self._interrupt, entry)
        else:
            record = self._unstarted(entry.spec)
            record.cancel()
            self._finish_unrun(entry, record)

    def _hand_back(self, what: HandBack) -> None:
        """Forgets rollouts without a row: the driver finds them missing in `held` and plans them elsewhere."""
        if what is HandBack.NOTHING:
            return
        for entry in [each for each in self._held.values() if not each.ended]:
            if entry.task is None or what is HandBack.ALL:
                entry.ended = True
                self._forget(entry)
                if entry.task is not None:
                    self._active -= 1
                    self._abandoned.add(entry.task)
                    entry.task.add_done_callback(self._abandoned.discard)
                    self._loop.call_soon(entry.task.cancel)

    def _interrupt(self, entry: _Entry) -> None:
        if entry.task is not None and not entry.ended:
            entry.task.cancel()

    def _unstarted(self, spec: RolloutSpec) -> RolloutRecord:
        record = new_record(spec, self._clock.now())
        record.host_id, record.node_id = self.plan.host_id, self.plan.node_id
        return record

    def _finish_unrun(self, entry: _Entry, record: RolloutRecord) -> None:
        """The end of a rollout that did not get to its own."""
        self._meter.ended(record)
        self._finish(entry, record, row_bytes(record))

    def _finish(self, entry: _Entry, record: RolloutRecord, size: int, row: pa.RecordBatch | None = None) -> None:
        """The rollout's row, of about this size, waits to be sent; `row`: as a table, where that is made already."""
        self._forget(entry)
        self._counts.finished += 1
        if row is None:
            self._outbox.add(record, size, self._loop.time())
        else:
            self._outbox.add_big(record.key, row, self._loop.time())

    def _forget(self, entry: _Entry) -> None:
        del self._held[entry.spec.key]
        self._held_hash ^= scramble(entry.spec.key)
        self._release_body(entry)

    def _trouble(self, message: str) -> None:
        if len(self._troubles) < MAX_TROUBLES:
            self._troubles[message] = None

    def _release_body(self, entry: _Entry) -> None:
        digest = entry.spec.digest
        body = self._bodies.get(digest)
        if body is None:
            self._homeless[digest].remove(entry)
            if not self._homeless[digest]:
                del self._homeless[digest]
            return
        body.users -= 1
        if not body.users:
            self._idle[digest] = None
            while len(self._idle) > IDLE_BODIES:
                self._retire(self._bodies.pop(self._idle.popitem(last=False)[0]))

    # -- for the watchdog ---------------------------------------------------------------------------------------

    async def probe(self, body: bytes) -> Probe:
        """The dry run of a task, beside the rollouts. Raises HostError once closed, TaskBodyError."""
        if self._closing:
            raise HostError(f"host {self.plan.host_id} is closed")
        try:
            return await probe(body, self.plan.config, self._resources, self._workshop)
        except Exception as error:
            raise TaskBodyError(f"{type(error).__name__}: {error}") from error

    @property
    def held_count(self) -> int:
        return len(self._held)

    def phases(self) -> Iterator[str]:
        """The phase of each rollout that it holds."""
        for entry in self._held.values():
            yield "commit" if entry.ended else "queue" if entry.rollout is None else entry.rollout.at.phase

    def waiting_for(self, limit: int = OLDEST) -> list[Waiting]:
        """What the oldest held rollouts wait for. May be called from any thread."""
        return [self._waiting(entry) for entry in list(self._held.values())[:limit]]

    def _waiting(self, entry: _Entry) -> Waiting:
        now = self._clock.now()
        if entry.rollout is None:
            return waiting(entry.spec, "queue", self._queued_for(entry), entry.since, now)
        at = entry.rollout.at
        if entry.ended:
            return waiting(entry.spec, "commit", "its turns to be written", at.since, now)
        return waiting(entry.spec, at.phase, at.what, at.since, now)

    def _queued_for(self, entry: _Entry) -> str:
        if entry.spec.digest in self._homeless:
            return "its task's body from the driver"
        if self._limits.paused:
            return "nothing: the host was told to start no more"
        full = self._outbox.unacked_bytes > self._spec.max_unacked_bytes
        return "finished rows of its host to be committed" if full else f"a slot on {self.plan.host_id}"


def trace_writer(plan: HostPlan) -> TraceWriter | None:
    """A trace file of this host's own, if it sees the run directory that the driver means."""
    if plan.run_dir is None or not sees_run(plan.run_dir, plan.run_id):
        return None
    return TraceWriter(plan.run_dir, plan.host_id, plan.epoch)
