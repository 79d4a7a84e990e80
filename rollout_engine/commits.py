"""Rows on their way to the disk, and from there to whoever waits for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

import pyarrow as pa

from rollout_engine.committer import Committer
from rollout_engine.link import Link
from rollout_engine.plan import Planner
from rollout_engine.progress import Progress
from rollout_engine.scheduler import Outcome, Try
from rollout_engine.schema import records_to_batch
from rollout_engine.submission import Submission
from rollout_engine.types import Boundary, Failure, RolloutRecord, Status, new_record

IDLE_S = 1.0
"""How often the store is asked for its heartbeat and live tables while nothing is written."""
BATCH_ROWS = 1024
"""Rows of rollouts that no host ran, made into one batch."""
_VALID = Outcome()


class RowStore(Protocol):
    """Where rows are kept. Both are called in the committer's thread."""

    def write(self, batches: list[pa.RecordBatch]) -> None:
        """Makes rows durable, and everything planned before them."""
        ...

    def idle(self) -> None:
        """Heartbeat and live tables, when they are due."""
        ...


class _Item(NamedTuple):
    batch: pa.RecordBatch | None
    size: int
    link: Link | None
    seq: int


class Commits:
    """Has rows written in order, then acknowledges them to their host, counts them and delivers them."""

    def __init__(
        self,
        store: RowStore,
        planner: Planner[Submission],
        progress: Progress,
        committed: Callable[[], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        """On the driver's loop, where `committed` (after each write) and `failed` are called, too."""
        self._store, self._planner, self._progress, self._told = store, planner, progress, committed
        self._committer: Committer[_Item] = Committer(self._write, self._committed, failed, store.idle, idle_s=IDLE_S)
        self.waiting_bytes = 0
        """Rows that have arrived and are not on the disk yet."""

    def submit(self, batch: pa.RecordBatch, link: Link | None = None, seq: int = 0) -> None:
        """Rows to be written; once they are, batch `seq` of the host behind `link` is acknowledged."""
        size = batch.nbytes if batch.num_rows else 0
        self.waiting_bytes += size
        self._committer.submit(_Item(batch if size else None, size, link, seq))

    def give_up(self, tries: Iterable[Try], failure: Failure | None) -> None:
        """Rows for rollouts that no host will run: failed, or cancelled where `failure` says so or is None."""
        records = [self._ended(one, failure) for one in tries]
        for start in range(0, len(records), BATCH_ROWS):
            self.submit(records_to_batch(records[start : start + BATCH_ROWS]))

    def _ended(self, one: Try, failure: Failure | None) -> RolloutRecord:
        record = new_record(self._planner.spec(one), time.time())
        if failure is None or failure.boundary is Boundary.CANCEL:
            record.cancel(failure)
        else:
            record.fail(failure)
        return record

    async def close(self) -> None:
        """Returns once everything submitted is written and told."""
        await self._committer.close()

    def _write(self, items: list[_Item]) -> None:
        """In the committer's thread."""
        batches = [item.batch for item in items if item.batch is not None]
        if batches:
            self._store.write(batches)

    def _committed(self, items: list[_Item]) -> None:
        """The rows are on disk: the host may forget them, and whoever waits may have them."""
        for item in items:
            if item.link is not None:
                item.link.acked_seq = max(item.link.acked_seq, item.seq)
            if item.batch is not None:
                self.waiting_bytes -= item.size
                self._progress.add(item.batch)
                self._deliver(item.batch)
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
    statuses = batch.column("status").to_pylist()
    if Status.FAILED.value not in statuses and Status.CANCELLED.value not in statuses:
        return [_VALID] * len(statuses)
    columns = (batch.column(name).to_pylist() for name in ("failure_boundary", "failure_type", "retryable"))
    return [
        Outcome(
            failed=status == Status.FAILED.value,
            retryable=bool(retryable),
            cancelled=status == Status.CANCELLED.value,
            kind=f"{boundary}:{kind}",
        )
        for status, boundary, kind, retryable in zip(statuses, *columns, strict=True)
    ]
