"""The commit log on an object store: each commit becomes whole segments, and returns when they are on the store."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa

from rollout_engine.schema import LOG
from rollout_engine.store.files import writing
from rollout_engine.store.layout import Layout
from rollout_engine.store.log import OPTIONS, check_schema, merged


class ObjectLog:
    """The segments of one epoch, for its driver to append to, in the place of `CommitLog`. Used from one thread."""

    def __init__(self, layout: Layout, epoch: int, segment_bytes: int, publish: Callable[[Path], None]) -> None:
        """`publish` sends a file of the run, and raises OSError where it may not have arrived."""
        self._layout, self._epoch, self._segment_bytes, self._publish = layout, epoch, segment_bytes, publish
        self._number = 0

    def commit(self, batches: Sequence[pa.RecordBatch]) -> None:
        """Returns once all rows are on the store. Raises RunError where they may not be: the epoch is over then."""
        check_schema(batches)
        for rows in _sized(merged(batches), self._segment_bytes):
            path = self._layout.segment(self._epoch, self._number)
            with writing(path):
                try:
                    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, LOG, options=OPTIONS) as writer:
                        for batch in rows:
                            writer.write_batch(batch)
                    self._publish(path)
                except BaseException:
                    path.unlink(missing_ok=True)  # whether it is on the store, only the store knows
                    raise
            self._number += 1

    def close(self) -> None:
        """Nothing is open between commits."""


def _sized(batches: Iterator[pa.RecordBatch], limit: int) -> Iterator[list[pa.RecordBatch]]:
    """Batches in groups of about `limit` bytes; none is cut."""
    waiting: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        if waiting and size + batch.nbytes > limit:
            yield waiting
            waiting, size = [], 0
        waiting.append(batch)
        size += batch.nbytes
    if waiting:
        yield waiting
