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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import pyarrow as pa

from rollout_engine.agents import make_agent
from rollout_engine.config import RunConfig
from rollout_engine.errors import HostError, TaskBodyError, failure_of
from rollout_engine.exchange import HostLimits, Reply, Request, scramble
from rollout_engine.machine import check_descriptors
from rollout_engine.models import make_client, sampling_of
from rollout_engine.outbox import BIG_ROW_BYTES, Outbox, row_bytes, to_row, turns_bytes
from rollout_engine.prepare import prepare
from rollout_engine.probe import Probe, probe
from rollout_engine.rollout import Model, PreparedTask, Resources, Rollout
from rollout_engine.sandboxes import make_provider
from rollout_engine.store.traces import TraceWriter, sees_run
from rollout_engine.types import Boundary, Failure, RolloutRecord, RolloutSpec, new_record
from rollout_engine.verifiers.workshop import Workshop

log = logging.getLogger(__name__)

IDLE_BODIES = 1024
"""Task bodies kept after their last rollout, in case another one of the same task comes."""
SWEEP_S = 5.0
"""How often the host looks for rollouts that should have ended."""
OVERDUE_S = 10.0
"""A rollout that goes on for so long after its deadline, or after its cancellation, is given up."""
CLOSE_S = 20.0
"""The longest that a stopping host waits for its rollouts to clean up."""


@dataclass(frozen=True, slots=True)
class HostPlan:
    """All that a host is told when it is made. Picklable; holds no secrets."""

    run_id: str
    epoch: int
    host_id: str
    node_id: str
    config: RunConfig
    run_dir: str | None = None
    """Where trace files may go; None: turns travel inline."""


@dataclass(slots=True)
class _Entry:
    spec: RolloutSpec
    rollout: Rollout | None = None
    task: asyncio.Task[None] | None = None
    cancelled: bool = False
    ended: bool = False
    """The rollout itself is over; only its row is still on its way."""
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
    ) -> None:
        """`keys`: model name -> API key. `on_expired` is called when the lease has ended and all is cleaned up."""
        self.plan = plan
        self._on_expired = on_expired
        self._keys = dict(keys or {})
        self._spec = plan.config.host
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
        self._nudged = False
        self._closing = False
        self._heard = 0.0
        self._watch: asyncio.Task[None] | None = None
        self._sweeper: asyncio.Task[None] | None = None
        self._abandoned: set[asyncio.Task[None]] = set()

    # -- life ---------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Makes clients and agent. Raises InputError, SandboxUnavailable."""
        check_descriptors(self._spec.slots)
        config = self.plan.config
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._outbox = Outbox(self._spec, self._wake.set)
        self._traces = trace_writer(self.plan)
        self._models = {
            spec.name: Model(
                spec,
                make_client(spec, api_key=self._keys.get(spec.name)),
                sampling_of(spec),
            )
            for spec in config.models
        }
        provider = None if config.sandbox == "none" else make_provider(config.sandbox)
        self._workshop = Workshop(provider)
        self._resources = Resources(
            config=config,
            agent=make_agent(config.agent, config.agent_options),
            models=self._models,
            provider=provider,
            starting=asyncio.Semaphore(self._spec.starting),
            verifying=asyncio.Semaphore(self._spec.verifying),
            host_id=self.plan.host_id,
            node_id=self.plan.node_id,
        )
        self._heard = self._loop.time()
        self._watch = asyncio.create_task(self._watch_lease(), name="lease watchdog")
        self._sweeper = asyncio.create_task(self._sweep(), name="sweeper")

    async def close(self) -> None:
        """Cancels what runs, removes every sandbox and closes every connection, in bounded time."""
        self._closing = True
        tasks = [entry.task for entry in self._held.values() if entry.task is not None]
        tasks += [each for each in (self._watch, self._sweeper) if each not in (None, asyncio.current_task())]
        for task in (*tasks, *self._abandoned):
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_S)
        if self._traces is not None:
            await asyncio.to_thread(self._traces.close)
        await self._workshop.close()
        if self._resources.provider is not None:
            await self._resources.provider.close()
        for model in self._models.values():
            await model.client.close()
        self._wake.set()

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
        if request.number > self._number:
            self._number = request.number
            self._take_in(request)
        await self._wait(request)
        self._heard = self._loop.time()
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
            demand={name: model.permits.demand for name, model in self._models.items()},
            running=self._active + len(self._outbox.unsent),
            stats={
                "cpu_s": time.process_time(),
                "started": self._counts.started,
                "finished": self._counts.finished,
            },
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
            if entry.cancelled:
                continue
            try:
                prepared = self._prepared(entry.spec.digest)
            except Exception as error:
                record = self._unstarted(entry.spec)
                record.fail(failure_of(error))
                self._finish(entry, record)
                continue
            self._running += 1
            self._active += 1
            self._counts.started += 1
            entry.rollout = Rollout(entry.spec, prepared, self._resources, self._slot_free)
            entry.ends_at = self._loop.time() + prepared.deadline_s + OVERDUE_S
            entry.task = self._loop.create_task(self._run(entry, entry.rollout))

    async def _run(self, entry: _Entry, rollout: Rollout) -> None:
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
        await self._spill(record)
        row = await asyncio.to_thread(to_row, record) if row_bytes(record) > BIG_ROW_BYTES else None
        self._active -= 1
        self._finish(entry, record, row)

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
        record = replace(rollout.record, turns=list(rollout.record.turns), ended_at=time.time())
        record.num_turns = len(record.turns)
        failure = Failure(Boundary.DEADLINE, "DeadlineError", message, retryable=False)
        record.cancel(failure) if entry.cancelled else record.fail(failure)
        for left in (task, self._loop.create_task(rollout.abandon())):
            self._abandoned.add(left)
            left.add_done_callback(self._abandoned.discard)
        task.cancel()
        self._active -= 1
        self._finish(entry, record)

    async def _spill(self, record: RolloutRecord) -> None:
        """Moves large turns into this host's trace file, where hosts can reach the run directory."""
        if self._traces is None or turns_bytes(record.turns) <= self.plan.config.store.inline_trace_bytes:
            return
        try:
            where = await asyncio.to_thread(self._traces.write, record.turns)
        except Exception as error:  # the disk refuses, or an agent's turns fit no table: the outbox finds that out
            log.warning("host=%s could not write a trace, sending it inline: %s", self.plan.host_id, error)
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
            self._finish(entry, record)

    def _interrupt(self, entry: _Entry) -> None:
        if entry.task is not None and not entry.ended:
            entry.task.cancel()

    def _unstarted(self, spec: RolloutSpec) -> RolloutRecord:
        record = new_record(spec, time.time())
        record.host_id, record.node_id = self.plan.host_id, self.plan.node_id
        return record

    def _finish(self, entry: _Entry, record: RolloutRecord, row: pa.RecordBatch | None = None) -> None:
        """The rollout's row waits to be sent; `row` is the record as a table, where that is made already."""
        del self._held[entry.spec.key]
        self._held_hash ^= scramble(entry.spec.key)
        self._counts.finished += 1
        self._release_body(entry)
        if row is None:
            self._outbox.add(record, self._loop.time())
        else:
            self._outbox.add_big(record.key, row, self._loop.time())

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
                del self._bodies[self._idle.popitem(last=False)[0]]

    # -- for the watchdog ---------------------------------------------------------------------------------------

    async def probe(self, body: bytes) -> Probe:
        """The dry run of a task, beside the rollouts. Raises HostError once closed, TaskBodyError."""
        if self._closing:
            raise HostError(f"host {self.plan.host_id} is closed")
        try:
            return await probe(body, self.plan.config, self._resources, self._workshop)
        except Exception as error:
            raise TaskBodyError(f"{type(error).__name__}: {error}") from error

    def waiting_for(self, limit: int = 20) -> list[str]:
        """What the oldest held rollouts wait for, one line each."""
        lines = []
        for entry in list(self._held.values())[:limit]:
            phase = entry.rollout.phase if entry.rollout is not None else "slot"
            age = time.time() - entry.spec.queued_at
            lines.append(f"{entry.spec.model}/{entry.spec.attempt}/{entry.spec.task_id}: {phase} ({age:.0f} s)")
        return lines


def trace_writer(plan: HostPlan) -> TraceWriter | None:
    """A trace file of this host's own, if it sees the run directory that the driver means."""
    if plan.run_dir is None or not sees_run(plan.run_dir, plan.run_id):
        return None
    return TraceWriter(plan.run_dir, plan.host_id, plan.epoch)
