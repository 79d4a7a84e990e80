"""The commit log: rows become durable in Arrow IPC stream segments of their own epoch, many batches to one sync."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa

from rollout_engine.errors import RunError
from rollout_engine.schema import LOG, SCHEMA_VERSION
from rollout_engine.store.files import sync_directory, write_all, writing
from rollout_engine.store.layout import Layout

logger = logging.getLogger(__name__)

OPTIONS = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
_BUFFER_BYTES = 1 << 20
_SMALL_ROWS = 64
_MERGED_ROWS = 1024


class _Sink:
    """The file under a segment's writer. Once a write has failed it swallows all others.

    Arrow's buffer keeps what it could not write and would write it again, behind the torn piece, on close.
    """

    closed = False

    def __init__(self, path: Path) -> None:
        self.handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self.size = 0
        self._failed = False

    def write(self, data: bytes) -> int:
        if not self._failed:
            try:
                write_all(self.handle, data)
            except BaseException:
                self._failed = True
                raise
            self.size += len(data)
        return len(data)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            os.close(self.handle)


class _Segment:
    """One segment that is being written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._sink = _Sink(path)
        self._stream = pa.BufferedOutputStream(pa.PythonFile(self._sink, mode="w"), _BUFFER_BYTES)
        self._writer = pa.ipc.new_stream(self._stream, LOG, options=OPTIONS)
        self._named = False

    @property
    def size(self) -> int:
        return self._sink.size

    def append(self, batches: Iterator[pa.RecordBatch]) -> None:
        for batch in batches:
            self._writer.write_batch(batch)
        self._stream.flush()
        os.fdatasync(self._sink.handle)
        if not self._named:
            sync_directory(self.path.parent)
            self._named = True

    def close(self) -> None:
        """Marks the end of the stream. A failure loses nothing: a segment without the mark reads as well."""
        try:
            self._writer.close()
            self._stream.flush()
        except (OSError, pa.ArrowException) as error:
            logger.warning("segment=%s has no end mark: %s", self.path, error)
        finally:
            self._sink.close()


class CommitLog:
    """The segments of one epoch, for its driver to append to. Used from one thread; whoever makes it closes it."""

    def __init__(self, layout: Layout, epoch: int, segment_bytes: int) -> None:
        self._layout = layout
        self._epoch = epoch
        self._segment_bytes = segment_bytes
        self._number = 0
        self._segment: _Segment | None = None

    def commit(self, batches: Sequence[pa.RecordBatch]) -> None:
        """Returns once all rows are durable. Raises RunError where they may not be.

        Rows of a failed commit may be in the log or not; everything committed before stays readable, and another
        commit may be tried (it starts a new segment).
        """
        check_schema(batches)
        if not sum(map(len, batches)):
            return
        with writing(self._layout.segment(self._epoch, self._number)):
            try:
                segment = self._open()
                segment.append(merged(batches))
            except BaseException:
                self._roll()
                raise
        if segment.size >= self._segment_bytes:
            self._roll()

    def _open(self) -> _Segment:
        if self._segment is None:
            self._segment = _Segment(self._layout.segment(self._epoch, self._number))
        return self._segment

    def _roll(self) -> None:
        self._number += 1
        if self._segment is not None:
            self._segment.close()
            self._segment = None

    def close(self) -> None:
        """Safe to call twice."""
        self._roll()


def check_schema(batches: Sequence[pa.RecordBatch]) -> None:
    """Raises RunError where rows are not of this version's log."""
    for batch in batches:
        if not batch.schema.equals(LOG):
            raise RunError(
                f"a batch has another schema than version {SCHEMA_VERSION} of the log: is rollout-engine of the "
                "same version on all hosts?"
            )


def merged(batches: Sequence[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Joins runs of small batches, in order: a batch of its own costs 6 KB, to whoever reads it too."""
    waiting: list[pa.RecordBatch] = []
    rows = 0
    for batch in batches:
        if waiting and (len(batch) >= _SMALL_ROWS or rows >= _MERGED_ROWS):
            yield pa.concat_batches(waiting)
            waiting, rows = [], 0
        if len(batch) >= _SMALL_ROWS:
            yield batch
        elif len(batch):
            waiting.append(batch)
            rows += len(batch)
    if waiting:
        yield pa.concat_batches(waiting)
