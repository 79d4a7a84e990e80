"""A host's finished rows: gathered into numbered batches, and kept until they are acknowledged."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import pyarrow as pa

from rollout_engine.config import HostSpec
from rollout_engine.errors import describe
from rollout_engine.exchange import scramble
from rollout_engine.schema import records_to_batch
from rollout_engine.types import Boundary, Failure, RolloutRecord, Turn

ROW_BYTES = 400
"""About what a row without turns weighs."""
BIG_ROW_BYTES = 256 * 1024
"""A row above this size is made into a table beside the event loop."""


class Outbox:
    """`on_news` is called when a waiting exchange may have to return earlier than it thought."""

    def __init__(self, spec: HostSpec, on_news: Callable[[], None]) -> None:
        self._spec = spec
        self._on_news = on_news
        self._rows: deque[tuple[RolloutRecord, int]] = deque()
        self._big: deque[tuple[int, pa.RecordBatch]] = deque()
        """Keys, and their rows that were made into tables beside the event loop."""
        self.unsent: set[int] = set()
        """Keys whose rows are in no batch yet: the driver must take them for held."""
        self.unsent_hash = 0
        self._row_bytes = 0
        self._batches: dict[int, tuple[pa.RecordBatch, int]] = {}
        self._batch_bytes = 0
        self._seq = 0
        self.oldest: float | None = None
        """When the oldest news (a row, a freed slot) that no reply has told came up."""

    @property
    def full(self) -> bool:
        return len(self._rows) >= self._spec.max_batch_rows or self._row_bytes >= self._spec.max_batch_bytes

    @property
    def unacked_bytes(self) -> int:
        return self._row_bytes + self._batch_bytes

    def add(self, record: RolloutRecord, size: int, now: float) -> None:
        """A row, and about how much it weighs (`row_bytes`)."""
        self._rows.append((record, size))
        self._added(record.key, size, now)

    def add_big(self, key: int, row: pa.RecordBatch, now: float) -> None:
        """A row that `to_row` made in a thread, because it takes so long."""
        self._big.append((key, row))
        self._added(key, row.nbytes, now)

    def _added(self, key: int, size: int, now: float) -> None:
        self._row_bytes += size
        self.unsent.add(key)
        self.unsent_hash ^= scramble(key)
        self.freed(now)
        if self.full:
            self._on_news()

    def freed(self, now: float) -> None:
        """A slot is free: worth telling, after the linger."""
        if self.oldest is None:
            self.oldest = now
            self._on_news()

    def has_unsent(self, received_seq: int) -> bool:
        """Whether a batch that was sent before has not arrived."""
        return self._seq > received_seq and any(seq > received_seq for seq in self._batches)

    def acknowledge(self, seq: int) -> None:
        """Forgets the batches up to `seq`: they are committed."""
        for number in [number for number in self._batches if number <= seq]:
            self._batch_bytes -= self._batches.pop(number)[1]

    def take(self, received_seq: int) -> tuple[tuple[int, pa.RecordBatch], ...]:
        """All batches after `received_seq`, with rows that were added since, as many as one reply should hold.

        What is left over is news as old as before, so that the next reply does not wait.
        """
        left = self._spec.max_batch_bytes
        rows: list[RolloutRecord] = []
        while self._rows and left > 0 and len(rows) < self._spec.max_batch_rows:
            record, size = self._rows.popleft()
            rows.append(record)
            self._taken(record.key, size)
            left -= size
        if rows:
            self._number(_to_batch(rows))
        while self._big and left > 0:
            key, row = self._big.popleft()
            self._taken(key, row.nbytes)
            left -= row.nbytes
            self._number(row)
        if not self._rows and not self._big:
            self.oldest = None
        return tuple((seq, batch) for seq, (batch, _) in self._batches.items() if seq > received_seq)

    def _taken(self, key: int, size: int) -> None:
        self._row_bytes -= size
        self.unsent.remove(key)
        self.unsent_hash ^= scramble(key)

    def _number(self, batch: pa.RecordBatch) -> None:
        self._seq += 1
        self._batches[self._seq] = (batch, batch.nbytes)
        self._batch_bytes += batch.nbytes


def _to_batch(rows: list[RolloutRecord]) -> pa.RecordBatch:
    """The rows as a table; one that an agent's turns do not fit fails alone."""
    try:
        return records_to_batch(rows)
    except Exception:
        return pa.concat_batches([to_row(record) for record in rows])


def to_row(record: RolloutRecord) -> pa.RecordBatch:
    """One row of the log; a failed one where no table holds what an agent put into it."""
    try:
        return records_to_batch([record])
    except Exception as error:
        record.turns, record.final_answer = [], None
        record.fail(Failure(Boundary.AGENT, type(error).__name__, f"no table holds its turns: {describe(error)}"))
        return records_to_batch([record])


def row_bytes(record: RolloutRecord) -> int:
    """About how much a row weighs."""
    return ROW_BYTES + len(record.final_answer or "") + turns_bytes(record.turns)


def turns_bytes(turns: list[Turn]) -> int:
    """About how much the turns of a rollout weigh in a table; 0 where an agent made them of something else."""
    try:
        return sum(map(_turn_bytes, turns))
    except (AttributeError, TypeError):
        return 0


def _turn_bytes(turn: Turn) -> int:
    size, completion = 0, turn.completion
    for tokens in (completion.prompt_token_ids, completion.completion_token_ids, completion.logprobs):
        size += 4 * len(tokens) if tokens else 0
    for message in turn.messages:
        content = message.get("content")
        size += len(content) if isinstance(content, str) else 64
        if len(message) > 2:
            size += len(str(message.get("tool_calls") or ""))
    return size
