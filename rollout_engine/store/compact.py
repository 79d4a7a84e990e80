"""Compaction: from the commit log, which is the truth, to Parquet tables that every tool reads."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rollout_engine.errors import RunError
from rollout_engine.schema import (
    LOG,
    ROLLOUTS,
    SCHEMA_VERSION,
    TURNS,
    log_to_rollouts,
    log_to_turns,
    rollout_ids,
    trace_to_turns,
)
from rollout_engine.store.files import FROM_COPY, RUN_AGAIN, read_record, sync_file, write_atomic
from rollout_engine.store.layout import Layout
from rollout_engine.store.ledger import Ints
from rollout_engine.store.mirrors import named
from rollout_engine.store.planfile import headers
from rollout_engine.store.scan import read_segment, segments
from rollout_engine.store.swap import locate, new_set
from rollout_engine.store.traces import TraceReader
from rollout_engine.store.winners import winning
from rollout_engine.types import KeySpace

logger = logging.getLogger(__name__)

CHUNK_BYTES = 32 << 20
"""Rows of about this size, their traces included, are in memory at once and become one part."""
ROW_GROUP_ROWS = 32_000
ROW_GROUP_BYTES = 16 << 20
"""Above this size of its turns a row group has fewer rows: to read one rollout is to read one group."""
END_MARK_BYTES = 8
"""The end mark of a segment is not synced: a machine that goes down may take it along."""
_KEEP_MISSING = 100


class Compaction(NamedTuple):
    """What a compaction wrote."""

    rollouts: int
    turns: int
    parts: int
    missing_traces: tuple[str, ...]
    """Rollouts that have no rows in `turns` because their trace cannot be read, and why. At most 100 are kept."""


class PartSet(NamedTuple):
    """The Parquet files of one table."""

    made: str
    """Names the compaction: two reads that see the same name saw the same set."""
    paths: tuple[Path, ...]


def compact(
    layout: Layout,
    run_id: str,
    space: KeySpace,
    *,
    check: Callable[[], None] = lambda: None,
    chunk_bytes: int = CHUNK_BYTES,
) -> Compaction:
    """Rewrites the Parquet tables from the log. `check` is called first, and before they replace the old ones.

    Raises RunError where the log is damaged or the disk full; the old tables stay then.
    """
    check()
    source = log_sizes(layout)
    with new_set(layout) as directory, TraceReader(layout.traces) as traces:
        parts = _Parts(directory, run_id, traces)
        for rows in _chunks(winning(layout, space, LOG.names), traces, chunk_bytes):
            parts.write(rows)
        if not parts.number:
            parts.write([])
        done = Compaction(parts.rollouts, parts.turns, parts.number, tuple(parts.missing))
        manifest = {
            "schema_version": SCHEMA_VERSION,
            "run_id": run_id,
            "made": uuid4().hex,
            "log": source,
            **done._asdict(),
        }
        write_atomic(directory / layout.compacted.name, json.dumps(manifest).encode())
        check()
    return done


def log_sizes(layout: Layout) -> dict[str, int]:
    """The log as far as it goes now: bytes of each segment."""
    return {segment.path.name: segment.path.stat().st_size for segment in segments(layout)}


def check_log(layout: Layout) -> None:
    """Raises RunError where a resume would silently run again what has its rows.

    A segment from which tables were made is gone or shorter, or a plan by which rows were committed is not there.
    """
    planned = headers(layout)
    for segment in segments(layout):
        if segment.epoch not in planned and any(read_segment(segment.path, ["key"])):
            raise RunError(f"{named(layout.plan_file(segment.epoch))}: is gone, and rows rest on it\n  {FROM_COPY}")
    check_sizes(layout)


def check_sizes(layout: Layout) -> None:
    """Raises RunError where a segment from which tables were made is gone or shorter."""
    sizes = _sizes_then(layout)
    log = log_sizes(layout)
    for name, size in sizes.items():
        found = log.get(name, 0)
        if found < size - END_MARK_BYTES:
            text = f"has {found} of the {size} bytes from which the tables were made"
            raise RunError(f"{named(layout.log / name)}: {text}\n  {RUN_AGAIN}")


def _sizes_then(layout: Layout) -> dict[str, int]:
    """As `log_sizes`, when the tables were made; empty where none were, or the file tells nothing."""
    try:
        return {str(name): int(size) for name, size in _manifest(layout)["log"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def has_only_tables(layout: Layout) -> bool:
    """Whether the log was left out of this copy of a run."""
    return bool(_sizes_then(layout)) and not log_sizes(layout) and current_parts(layout, "rollouts") is not None


def current_parts(layout: Layout, name: str) -> PartSet | None:
    """A table's Parquet files, where they hold all that the log does (or the log was left out of a copy)."""
    try:
        manifest = _manifest(layout)
        sizes, parts, made = manifest["log"], int(manifest["parts"]), str(manifest["made"])
        known = manifest["schema_version"] == SCHEMA_VERSION
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    log = log_sizes(layout)
    if not known or log not in (sizes, {}):
        return None
    directory = locate(layout, name)
    paths = tuple(directory / _part(number) for number in range(parts))
    return PartSet(made, paths) if not log or all(path.exists() for path in paths) else None


def _manifest(layout: Layout) -> dict[str, Any]:
    manifest: dict[str, Any] = json.loads(read_record(locate(layout, layout.compacted.name)))
    return manifest


def _part(number: int) -> str:
    return f"part-{number:05d}.parquet"


def _chunks(batches: Iterator[pa.RecordBatch], traces: TraceReader, limit: int) -> Iterator[list[pa.RecordBatch]]:
    """Batches gathered, or cut, to about `limit` bytes with the traces that belong to them."""
    waiting: list[pa.RecordBatch] = []
    total = 0
    for batch in batches:
        ends = np.cumsum(_row_bytes(batch, traces))
        start = 0
        while start < len(batch):
            before = int(ends[start - 1]) if start else 0
            stop = max(int(np.searchsorted(ends, before + limit - total, side="right")), start + (not waiting))
            if stop > start:
                waiting.append(batch.slice(start, stop - start))
                total += int(ends[stop - 1]) - before
                start = stop
            if start < len(batch):
                yield waiting
                waiting, total = [], 0
    if waiting:
        yield waiting


def _row_bytes(batch: pa.RecordBatch, traces: TraceReader) -> Ints:
    """The size of each row: its part of the batch, and its trace."""
    sizes = np.full(len(batch), batch.nbytes // len(batch) + 1, np.int64)
    for row, file, offset in _traced(batch):
        with suppress(RunError):  # it is said when the trace is read
            sizes[row] += traces.size(file, offset)
    return sizes


class _Parts:
    """Writes part after part of both tables, with the same number for a rollout and its turns."""

    def __init__(self, directory: Path, run_id: str, traces: TraceReader) -> None:
        self.number = self.rollouts = self.turns = 0
        self.missing: list[str] = []
        self._directory, self._run_id, self._traces = directory, run_id, traces

    def write(self, batches: list[pa.RecordBatch]) -> None:
        self._put_rollouts(batches)
        self._put_turns(batches)
        self.number += 1
        pa.default_memory_pool().release_unused()

    def _put_rollouts(self, batches: list[pa.RecordBatch]) -> None:
        rows = [log_to_rollouts(batch, self._run_id, ROLLOUTS.names) for batch in batches]
        table = pa.Table.from_batches(rows, ROLLOUTS)
        self._put("rollouts", table, max(len(table), 1))

    def _put_turns(self, batches: list[pa.RecordBatch]) -> None:
        rows = (turns for batch in batches for turns in turns_of(batch, self._traces, self._miss))
        table = sort_turns(pa.Table.from_batches(rows, TURNS))
        self._put("turns", table, _row_group(table))

    def _put(self, name: str, table: pa.Table, row_group: int) -> None:
        path = self._directory / name / _part(self.number)
        pq.write_table(table, str(path), compression="zstd", row_group_size=row_group)
        sync_file(path)
        setattr(self, name, getattr(self, name) + len(table))

    def _miss(self, rollout_id: str, error: RunError) -> None:
        _warn(rollout_id, error)
        if len(self.missing) < _KEEP_MISSING:
            self.missing.append(f"{rollout_id}: {error}")


def _warn(rollout_id: str, error: RunError) -> None:
    logger.warning("rollout=%s has lost its turns: %s", rollout_id, error)


def turns_of(
    rows: pa.RecordBatch, traces: TraceReader, missing: Callable[[str, RunError], None] = _warn
) -> Iterator[pa.RecordBatch]:
    """The turns of rows of the log, inline or in trace files. `missing` is told of a trace that cannot be read."""
    yield log_to_turns(rows)
    for row, file, offset in _traced(rows):
        rollout_id = rollout_ids(rows.slice(row, 1))[0].as_py()
        try:
            trace = traces.read(file, offset, rows.column("trace_sha256")[row].as_py())
        except RunError as error:
            missing(rollout_id, error)
        else:
            yield trace_to_turns(trace, rollout_id)


def _traced(rows: pa.RecordBatch) -> Iterator[tuple[int, str, int]]:
    """(row, file, offset) of the rows whose turns are in a trace file."""
    files, offsets = rows.column("trace_file"), rows.column("trace_offset")
    for row in np.flatnonzero(files.is_valid().to_numpy(zero_copy_only=False)).tolist():
        yield row, files[row].as_py(), offsets[row].as_py()


def sort_turns(turns: pa.Table) -> pa.Table:
    """By rollout_id and index."""
    return turns.combine_chunks().sort_by([("rollout_id", "ascending"), ("index", "ascending")])


def _row_group(turns: pa.Table) -> int:
    by_size: int = len(turns) * ROW_GROUP_BYTES // max(turns.nbytes, 1)
    return max(min(ROW_GROUP_ROWS, by_size), 1)
