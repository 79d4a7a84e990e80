"""Rows on their way to the disk, and from there to whoever waits for them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

import pyarrow as pa

from rollout_engine.circuits import Outcome
from rollout_engine.committer import Committer, Seal
from rollout_engine.events import Event
from rollout_engine.link import Link
from rollout_engine.plan import Planner
from rollout_engine.progress import Progress
from rollout_engine.schema import records_to_batch
from rollout_engine.spending import Spending
from rollout_engine.submission import Submission
from rollout_engine.tries import Try
from rollout_engine.types import Boundary, Failure, RolloutRecord, Status, new_record

IDLE_S = 1.0
"""How often the store is asked for its heartbeat and live tables while nothing is written."""
BATCH_ROWS = 1024
"""Rows of rollouts that no host ran, made into one batch."""
_VALID, _BOXED = Outcome(), Outcome(boxed=True)


class RowStore(Protocol):
    """Where rows are kept. All methods are called in the committer's thread."""

    @property
    def seal(self) -> tuple[float, int] | None:
        """Seconds and bytes at which what has gathered is written; None: as soon as it comes."""
        ...

    def write(self, batches: list[pa.RecordBatch]) -> None:
        """Makes rows durable, and everything planned before them."""
        ...

    def record(self, events: list[Event]) -> None:
        """Keeps what happened to hosts and nodes."""
        ...

    def idle(self) -> None:
        """Heartbeat and live tables, when they are due."""
        ...


class _Item(NamedTuple):
    batch: pa.RecordBatch | None
    size: int
    link: Link | None
    seq: int
    came: float
    """When it was submitted, on the monotonic clock."""
    event: Event | None = None


def _size_of(item: _Item) -> int:
    return item.size


class Commits:
    """Has rows written in order, then acknowledges them to their host, counts them and delivers them."""

    def __init__(
        self,
        store: RowStore,
        planner: Planner[Submission],
        progress: Progress,
        spending: Spending,
        committed: Callable[[], None],
        failed: Callable[[BaseException], None],
        counted: Callable[[pa.RecordBatch, int, float], None],
    ) -> None:
        """On the driver's loop, where `committed` (after each write), `failed` and `counted` are called, too.

        `counted` gets the rows of each batch that is on the disk, their bytes, and the seconds since they came.
        """
        self._store, self._planner, self._progress, self._told = store, planner, progress, committed
        self._spending = spending
        self._counted = counted
        seal = None if store.seal is None else Seal(*store.seal, _size_of)
        self._committer: Committer[_Item] = Committer(self._write, self._committed, failed, store.idle, IDLE_S, seal)
        self.waiting_bytes = 0
        """Rows that have arrived and are not on the disk yet."""
        self.waiting_since: float | None = None
        """When the disk took rows last, or the first that it has not taken arrived; None: it has all."""
        self._clock = asyncio.get_running_loop().time

    def submit(self, batch: pa.RecordBatch, link: Link | None = None, seq: int = 0) -> None:
        """Rows to be written; once they are, batch `seq` of the host behind `link` is acknowledged."""
        size = batch.nbytes if batch.num_rows else 0
        self.waiting_bytes += size
        if size and self.waiting_since is None:
            self.waiting_since = self._clock()
        self._committer.submit(_Item(batch if size else None, size, link, seq, time.monotonic()))

    def record(self, event: Event) -> None:
        """Something that happened, to be kept beside the rows."""
        self._committer.submit(_Item(None, 0, None, 0, time.monotonic(), event))

    def give_up(self, tries: Iterable[Try], failure: Failure | None) -> None:
        """Rows for rollouts that no host will run: failed, or cancelled where `failure` says so or is None."""
        records = [self._ended(one, failure) for one in tries]
        for start in range(0, len(records), BATCH_ROWS):
            self.submit(records_to_batch(records[start : start + BATCH_ROWS]))

    def _ended(self, one: Try, failure: Failure | None) -> RolloutRecord:
        record = new_record(self._planner.spec(one), time.time())
        self._spending.stamp_record(record)
        if failure is None or failure.boundary is Boundary.CANCEL:
            record.cancel(failure)
        else:
            record.fail(failure)
        return record

    async def close(self, seconds: float) -> bool:
        """Returns once everything submitted is written and told; False where that took longer than `seconds`."""
        return await self._committer.close(seconds)

    def _write(self, items: list[_Item]) -> None:
        """In the committer's thread."""
        batches = [item.batch for item in items if item.batch is not None]
        if batches:
            self._store.write(batches)
        events = [item.event for item in items if item.event is not None]
        if events:
            self._store.record(events)

    def _committed(self, items: list[_Item]) -> None:
        """The rows are on disk: the host may forget them, and whoever waits may have them."""
        for item in items:
            if item.link is not None:
                item.link.acked_seq = max(item.link.acked_seq, item.seq)
            if item.batch is not None:
                self.waiting_bytes -= item.size
                self._progress.add(item.batch)
                self._spending.commit(item.batch)
                self._counted(item.batch, item.size, time.monotonic() - item.came)
                self._deliver(item.batch)
        self.waiting_since = self._clock() if self.waiting_bytes else None
        self._told()

    def _deliver(self, batch: pa.RecordBatch) -> None:
        owners: dict[Submission, list[int]] = {}
        for row, key in enumerate(batch.column("key").to_pylist()):
            opened, _ = self._planner.committed(key)
            owners.setdefault(opened.owner, []).append(row)
            if not opened.left:
                opened.owner.open_slots -= 1
        for owner, rows in owners.items():
            if owner.stream is not None:
                part = batch if len(rows) == batch.num_rows else batch.take(pa.array(rows))
                owner.stream.put(part, part.num_rows, part.nbytes)
            owner.settle()


def outcomes_of(batch: pa.RecordBatch) -> list[Outcome]:
    """The scheduler's view of each row."""
    boxed = [name != "none" for name in batch.column("sandbox").to_pylist()]
    if not batch.column("score").null_count:
        return [_BOXED if each else _VALID for each in boxed]
    names = ("status", "score", "failure_boundary", "failure_type", "retryable")
    columns = (batch.column(name).to_pylist() for name in names)
    return [_outcome(each, *row) for each, *row in zip(boxed, *columns, strict=True)]


def _outcome(
    boxed: bool, status: str, score: float | None, boundary: str | None, kind: str | None, retryable: bool | None
) -> Outcome:
    if score is not None:
        return _BOXED if boxed else _VALID
    ended = status not in (Status.FAILED.value, Status.CANCELLED.value)
    return Outcome(
        failed=status == Status.FAILED.value,
        retryable=bool(retryable),
        cancelled=status == Status.CANCELLED.value,
        kind=f"{boundary}:{kind}",
        boxed=boxed,
        no_verdict=ended and boundary == Boundary.VERIFIER.value,
    )
