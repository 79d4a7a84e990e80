"""Reading a run: from Parquet where that holds all that the log does, else from the log itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from rollout_engine.errors import InputError, RunError
from rollout_engine.schema import (
    IDENTITY,
    METADATA,
    ROLLOUTS,
    TURNS,
    batch_to_turns,
    log_columns,
    log_to_rollouts,
    log_to_turns,
    rollout_ids,
)
from rollout_engine.store.compact import current_parts, sort_turns, turns_of
from rollout_engine.store.files import MAKE_ANEW, open_regular, reading
from rollout_engine.store.layout import Layout
from rollout_engine.store.ledger import COLUMNS, Ledger
from rollout_engine.store.mirrors import named
from rollout_engine.store.scan import Placed, read_batch, scan_placed
from rollout_engine.store.traces import TraceReader
from rollout_engine.store.winners import winning
from rollout_engine.types import KeySpace, Turn

T = TypeVar("T")
_TRACE = ("trace_file", "trace_offset", "trace_sha256")


def rollouts_table(layout: Layout, run_id: str, space: KeySpace, columns: Sequence[str] | None = None) -> pa.Table:
    """One row per rollout that has one, in the order of the log. Raises RunError where a file is damaged."""
    names = list(ROLLOUTS.names if columns is None else columns)
    unknown = [name for name in names if name not in ROLLOUTS.names]
    if unknown:
        raise InputError(f"rollouts have no column {unknown[0]!r}", fix=f"known: {', '.join(ROLLOUTS.names)}")
    found = _from_parts(layout, "rollouts", lambda parts: [_part_table(part, ROLLOUTS, names) for part in parts])
    if found is not None:
        return pa.concat_tables(found)
    schema = pa.schema([ROLLOUTS.field(name) for name in names], metadata=METADATA)
    batches = winning(layout, space, log_columns(names))
    return pa.Table.from_batches((log_to_rollouts(batch, run_id, names) for batch in batches), schema)


def turns_table(layout: Layout, space: KeySpace) -> pa.Table:
    """The turns of all rollouts, but for traces that cannot be read. Raises RunError where a file is damaged."""
    found = _from_parts(layout, "turns", lambda parts: [_part_table(part, TURNS, TURNS.names) for part in parts])
    if found is not None:
        return pa.concat_tables(found)
    with TraceReader(layout.traces) as traces:
        batches = winning(layout, space, (*IDENTITY, *_TRACE, "turns"))
        rows = [turns for batch in batches for turns in turns_of(batch, traces)]
    return sort_turns(pa.Table.from_batches(rows, TURNS))


def _from_parts(layout: Layout, table: str, read: Callable[[Sequence[Path]], T]) -> T | None:
    """What `read` makes of the table's parts; None where the log knows more. A swap meanwhile is read again."""
    for last in (False, False, True):
        before = current_parts(layout, table)
        if before is None:
            return None
        try:
            found = read(before.paths)
        except RunError:
            if last or current_parts(layout, table) == before:
                raise
            continue
        after = current_parts(layout, table)
        if last or (after is not None and after.made == before.made):
            return found
    return None


def _open_part(path: Path, schema: pa.Schema) -> pq.ParquetFile:
    open_regular(path).close()
    file = pq.ParquetFile(path)
    if not file.schema_arrow.equals(schema):
        raise RunError(f"{named(path)}: has another schema than the one that this version writes")
    return file


def _part_table(path: Path, schema: pa.Schema, columns: Sequence[str]) -> pa.Table:
    plain = pa.schema([schema.field(name) for name in columns], metadata=METADATA)
    with reading(path, MAKE_ANEW), _open_part(path, schema) as file:
        # Parquet's field numbers come back as metadata of each field; from the log there are none.
        return pa.Table.from_arrays(file.read(list(columns), use_threads=False).select(columns).columns, schema=plain)


def rollout_turns(layout: Layout, space: KeySpace, rollout_id: str) -> list[Turn]:
    """The turns of one rollout, in order. Raises InputError where there is no such rollout, RunError for damage."""
    found = _from_parts(layout, "turns", lambda parts: [row for part in parts for row in _part_turns(part, rollout_id)])
    if found or _from_parts(layout, "rollouts", lambda parts: any(_has_no_turns(part, rollout_id) for part in parts)):
        return found or []
    return _log_turns(layout, space, rollout_id)  # which also knows of a trace that compaction could not read


def _has_no_turns(path: Path, rollout_id: str) -> bool:
    rows = _part_table(path, ROLLOUTS, ["rollout_id", "num_turns"])
    found = rows.filter(pc.equal(rows.column("rollout_id"), rollout_id)).column("num_turns").to_pylist()
    return bool(found == [0])


def _part_turns(path: Path, rollout_id: str) -> list[Turn]:
    turns: list[Turn] = []
    with reading(path, MAKE_ANEW), _open_part(path, TURNS) as file:
        for group in range(file.num_row_groups):
            range_ = file.metadata.row_group(group).column(0).statistics
            if range_ is not None and range_.has_min_max and not range_.min <= rollout_id <= range_.max:
                continue
            ids = file.read_row_group(group, columns=["rollout_id"], use_threads=False).column(0)
            hits = pc.indices_nonzero(pc.equal(ids, rollout_id))
            if len(hits):
                rows = file.read_row_group(group, use_threads=False).slice(hits[0].as_py(), len(hits))
                turns += batch_to_turns(rows)
    return turns


def _log_turns(layout: Layout, space: KeySpace, rollout_id: str) -> list[Turn]:
    found: list[Placed] = []
    for placed in scan_placed(layout, space, (*COLUMNS, *IDENTITY)):
        rows = placed.rows.filter(pc.equal(rollout_ids(placed.rows), rollout_id))
        found += [Placed(placed.path, placed.offset, rows.slice(row, 1)) for row in range(len(rows))]
    if not found:
        raise InputError(
            f"there is no rollout {rollout_id!r}", where=named(layout.root), fix="ids: see rollouts.rollout_id"
        )
    ledger = Ledger(space)
    together = pa.concat_batches([placed.rows for placed in found])
    ledger.add(together)
    winner = found[ledger.take(together).tolist().index(True)]
    nth = sum(1 for placed in found[: found.index(winner)] if placed[:2] == winner[:2])
    batch = read_batch(winner.path, winner.offset)
    return _row_turns(layout, batch.filter(pc.equal(rollout_ids(batch), rollout_id)).slice(nth, 1))


def _row_turns(layout: Layout, row: pa.RecordBatch) -> list[Turn]:
    file, offset, sha256 = (row.column(name)[0].as_py() for name in _TRACE)
    if file is None:
        return batch_to_turns(log_to_turns(row))
    with TraceReader(layout.traces) as traces:
        return batch_to_turns(traces.read(file, offset, sha256))
