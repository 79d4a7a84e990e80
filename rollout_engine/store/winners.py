"""Which row counts for each rollout of a run, and those rows themselves, in one or two passes over the log."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa

from rollout_engine.errors import RunError
from rollout_engine.store.layout import Layout
from rollout_engine.store.ledger import COLUMNS, Ledger
from rollout_engine.store.mirrors import named
from rollout_engine.store.scan import scan
from rollout_engine.types import KeySpace

_GATHER_ROWS = 1 << 16
_DECIDING = ("key", "generation", "status", "score", "passed", "failure_boundary")
_MAX_KEY = 1 << 48


def winners(layout: Layout, space: KeySpace) -> Ledger:
    """The ledger of everything committed. Raises RunError where the log is damaged."""
    ledger = Ledger(space)
    waiting: list[pa.RecordBatch] = []
    rows = 0
    for batch in scan(layout, space, COLUMNS):
        waiting.append(batch)
        rows += len(batch)
        if rows >= _GATHER_ROWS:
            ledger.add(_checked(layout, waiting))
            waiting, rows = [], 0
    if waiting:
        ledger.add(_checked(layout, waiting))
    return ledger


def _checked(layout: Layout, batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    """All of them as one: a log may hold some rows a batch. Raises RunError where a key is none."""
    rows = pa.concat_batches(batches)
    keys = rows.column("key")
    numbers = keys.to_numpy(zero_copy_only=False)
    if keys.null_count or numbers.min() < 0 or numbers.max() > _MAX_KEY:
        raise RunError(f"{named(layout.log)}: a row has no usable key; the log was edited, or is another program's")
    return rows


def winning(layout: Layout, space: KeySpace, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """The rows that count, with these columns of LOG, in the order of the log; each key once."""
    ledger = winners(layout, space)
    for batch in scan(layout, space, list(dict.fromkeys((*columns, *_DECIDING)))):
        chosen = ledger.take(batch)
        kept = batch if chosen.all() else batch.filter(pa.array(chosen))
        if len(kept):
            yield kept.select(list(columns))
