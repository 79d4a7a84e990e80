"""The rollouts that a host holds: granted, running in its slots, and ended, until their rows are in its outbox."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pyarrow as pa

from rollout_engine.bodies import Bodies
from rollout_engine.errors import failure_of
from rollout_engine.exchange import HandBack, scramble
from rollout_engine.hostmeter import HostMeter
from rollout_engine.hostplan import HostPlan
from rollout_engine.hosttraces import HostTraces
from rollout_engine.loglines import About, speak_of
from rollout_engine.outbox import BIG_ROW_BYTES, Outbox, row_bytes, to_row
from rollout_engine.resources import Resources
from rollout_engine.rollout import Rollout
from rollout_engine.types import Boundary, Failure, RolloutRecord, RolloutSpec, new_record
from rollout_engine.waiting import OLDEST, Waiting, waiting

log = logging.getLogger(__name__)

SWEEP_S = 5.0
"""How often the host looks for rollouts that should have ended."""
OVERDUE_S = 10.0
"""A rollout that goes on for so long after its deadline, or after its cancellation, is given up."""


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


class Held:
    """All methods but `waiting_for` run on the host's event loop."""

    def __init__(
        self,
        plan: HostPlan,
        resources: Resources,
        bodies: Bodies,
        outbox: Outbox,
        traces: HostTraces,
        meter: HostMeter,
    ) -> None:
        self._plan, self._resources, self._bodies = plan, resources, bodies
        self._outbox, self._traces, self._meter = outbox, traces, meter
        self._loop = asyncio.get_running_loop()
        self._spec = plan.config.host
        self._big_bytes = min(plan.config.store.inline_trace_bytes, BIG_ROW_BYTES)
        """Rows above this are looked at: their turns may go into a trace, or be made into a table beside the loop."""
        self.entries: dict[int, _Entry] = {}
        """By key."""
        self.hash = 0
        """Of all keys."""
        self.homeless: dict[str, list[_Entry]] = {}
        """Those whose task's body is not here, by its digest."""
        self.active = 0
        """Rollouts that have begun and whose rows are not in the outbox."""
        self.started = self.finished = 0
        """Counts since the host was opened."""
        self.paused = False
        """Whether nothing more may start."""
        self._queue: deque[_Entry] = deque()
        self._running = 0
        self._closing = False
        self._abandoned: set[asyncio.Task[None]] = set()

    # -- grants -------------------------------------------------------------------------------------------------

    def free_slots(self) -> int:
        """Room for grants: slots and prefetch, but never more than twice that many held in all phases."""
        if self._closing or self._outbox.unacked_bytes > self._spec.max_unacked_bytes:
            return 0
        room = self._spec.slots + int(self._spec.slots * self._spec.prefetch)
        return max(0, min(room - self._running - len(self._queue), 2 * room - len(self.entries)))

    def add_body(self, digest: str, raw: bytes) -> None:
        """The body of a task, and a queue for those that waited for it."""
        self._bodies.add(digest, raw)
        for entry in self.homeless.pop(digest, ()):
            self._bodies.use(digest)
            self._queue.append(entry)

    def hold(self, spec: RolloutSpec) -> None:
        """Takes a granted rollout; `pump` starts it."""
        entry = _Entry(spec)
        self.entries[spec.key] = entry
        self.hash ^= scramble(spec.key)
        if self._bodies.use(spec.digest):
            self._queue.append(entry)
        else:
            self.homeless.setdefault(spec.digest, []).append(entry)

    def pump(self) -> None:
        """Starts queued rollouts while there are slots."""
        if self.paused or self._outbox.unacked_bytes > self._spec.max_unacked_bytes:
            return
        while self._queue and self._running < self._spec.slots and not self._closing:
            entry = self._queue.popleft()
            if entry.cancelled or entry.ended:
                continue
            try:
                prepared = self._bodies.prepared(entry.spec.digest)
            except Exception as error:
                record = self._unstarted(entry.spec)
                record.fail(failure_of(error))
                self._finish_unrun(entry, record)
                continue
            self._running += 1
            self.active += 1
            self.started += 1
            entry.rollout = Rollout(entry.spec, prepared, self._resources, self._slot_free)
            entry.ends_at = self._loop.time() + prepared.deadline_s + OVERDUE_S
            entry.task = self._loop.create_task(self._run(entry, entry.rollout))

    # -- running ------------------------------------------------------------------------------------------------

    async def _run(self, entry: _Entry, rollout: Rollout) -> None:
        speak_of(About(self._plan.run_id, self._plan.epoch, self._plan.host_id, entry.spec))
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
            await self._traces.spill(record)
            size = row_bytes(record)
            row = await asyncio.to_thread(to_row, record) if size > BIG_ROW_BYTES else None
        self.active -= 1
        self._finish(entry, record, size, row)

    def _slot_free(self) -> None:
        self._running -= 1
        self._outbox.freed(self._loop.time())
        self.pump()

    async def sweep(self) -> None:
        """Gives up rollouts that are long overdue: user code that swallows its cancellation holds nobody up."""
        while True:
            await asyncio.sleep(SWEEP_S)
            now = self._loop.time()
            for entry in [entry for entry in self.entries.values() if entry.ends_at < now and not entry.ended]:
                if entry.rollout is not None and entry.task is not None:
                    self._abandon(entry, entry.rollout, entry.task)

    def _abandon(self, entry: _Entry, rollout: Rollout, task: asyncio.Task[None]) -> None:
        """Writes the row of a rollout that does not end; what it still does counts no more."""
        message = f"it did not let itself be ended; was in phase {rollout.phase}"
        log.error("host=%s rollout=%s %s", self._plan.host_id, entry.spec, message)
        entry.ended = True
        record = replace(rollout.record, turns=list(rollout.record.turns), ended_at=self._resources.clock())
        record.num_turns = len(record.turns)
        failure = Failure(Boundary.DEADLINE, "DeadlineError", message, retryable=False)
        record.cancel(failure) if entry.cancelled else record.fail(failure)
        for left in (task, self._loop.create_task(rollout.abandon())):
            self._leave(left)
        task.cancel()
        self.active -= 1
        self._finish_unrun(entry, record)

    def _leave(self, task: asyncio.Task[None]) -> None:
        """A task that counts no more; it is referred to until it has ended."""
        self._abandoned.add(task)
        task.add_done_callback(self._abandoned.discard)

    # -- endings ------------------------------------------------------------------------------------------------

    def cancel(self, key: int) -> None:
        entry = self.entries.get(key)
        if entry is None or entry.cancelled or entry.ended:
            return
        entry.cancelled = True
        entry.ends_at = min(entry.ends_at, self._loop.time() + self._plan.config.limits.close_s + OVERDUE_S)
        if entry.task is not None:
            # Not before its first step: a coroutine that was never entered could not make its row.
            self._loop.call_soon(_interrupt, entry)
        else:
            record = self._unstarted(entry.spec)
            record.cancel()
            self._finish_unrun(entry, record)

    def hand_back(self, what: HandBack) -> None:
        """Forgets rollouts without a row: the driver finds them missing in `held` and plans them elsewhere."""
        if what is HandBack.NOTHING:
            return
        for entry in [each for each in self.entries.values() if not each.ended]:
            if entry.task is None or what is HandBack.ALL:
                entry.ended = True
                self._forget(entry)
                if entry.task is not None:
                    self.active -= 1
                    self._leave(entry.task)
                    self._loop.call_soon(entry.task.cancel)

    def end(self) -> list[asyncio.Task[None]]:
        """Starts nothing more and cancels what runs; returns what will end by that."""
        self._closing = True
        tasks = [entry.task for entry in self.entries.values() if entry.task is not None]
        for task in (*tasks, *self._abandoned):
            task.cancel()
        return tasks

    def _unstarted(self, spec: RolloutSpec) -> RolloutRecord:
        record = new_record(spec, self._resources.clock())
        record.host_id, record.node_id = self._plan.host_id, self._plan.node_id
        return record

    def _finish_unrun(self, entry: _Entry, record: RolloutRecord) -> None:
        """The end of a rollout that did not get to its own."""
        self._meter.ended(record)
        self._finish(entry, record, row_bytes(record))

    def _finish(self, entry: _Entry, record: RolloutRecord, size: int, row: pa.RecordBatch | None = None) -> None:
        """The rollout's row, of about this size, waits to be sent; `row`: as a table, where that is made already."""
        self._forget(entry)
        self.finished += 1
        if row is None:
            self._outbox.add(record, size, self._loop.time())
        else:
            self._outbox.add_big(record.key, row, self._loop.time())

    def _forget(self, entry: _Entry) -> None:
        del self.entries[entry.spec.key]
        self.hash ^= scramble(entry.spec.key)
        digest = entry.spec.digest
        if not self._bodies.release(digest):
            self.homeless[digest].remove(entry)
            if not self.homeless[digest]:
                del self.homeless[digest]

    # -- for whoever asks what they wait for --------------------------------------------------------------------

    @property
    def held_count(self) -> int:
        return len(self.entries)

    def phases(self) -> Iterator[str]:
        """The phase of each rollout."""
        for entry in self.entries.values():
            yield "commit" if entry.ended else "queue" if entry.rollout is None else entry.rollout.at.phase

    def waiting_for(self, limit: int = OLDEST) -> list[Waiting]:
        """What the oldest rollouts wait for. May be called from any thread."""
        return [self._waiting(entry) for entry in list(self.entries.values())[:limit]]

    def _waiting(self, entry: _Entry) -> Waiting:
        now = self._resources.clock()
        if entry.rollout is None:
            return waiting(entry.spec, "queue", self._queued_for(entry), entry.since, now)
        at = entry.rollout.at
        if entry.ended:
            return waiting(entry.spec, "commit", "its turns to be written", at.since, now)
        return waiting(entry.spec, at.phase, at.what, at.since, now)

    def _queued_for(self, entry: _Entry) -> str:
        if entry.spec.digest in self.homeless:
            return "its task's body from the driver"
        if self.paused:
            return "nothing: the host was told to start no more"
        full = self._outbox.unacked_bytes > self._spec.max_unacked_bytes
        return "finished rows of its host to be committed" if full else f"a slot on {self._plan.host_id}"


def _interrupt(entry: _Entry) -> None:
    if entry.task is not None and not entry.ended:
        entry.task.cancel()
