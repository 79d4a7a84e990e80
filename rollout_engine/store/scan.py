"""Reading the commit log: every committed row, in the one order that decides which of two rows of a key counts."""

from __future__ import annotations

import logging
import mmap
import re
import struct
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from rollout_engine.errors import RunError, describe
from rollout_engine.schema import LOG, SCHEMA_VERSION
from rollout_engine.store.files import RUN_AGAIN, open_regular, reading
from rollout_engine.store.layout import Layout
from rollout_engine.store.mirrors import named
from rollout_engine.store.planfile import headers, slot_limits
from rollout_engine.types import KeySpace

logger = logging.getLogger(__name__)

_NAME = re.compile(r"(\d+)-(\d+)\.arrows")
_HEAD = struct.Struct("<II")
_MAPPED_BYTES = 8 << 20
_CONTINUATION = 0xFFFFFFFF


class Segment(NamedTuple):
    """A file of the log. Segments order as their (epoch, number) do."""

    epoch: int
    number: int
    path: Path


def segments(layout: Layout) -> list[Segment]:
    """All segments, in order."""
    names = ((_NAME.fullmatch(path.name), path) for path in layout.log.glob("*.arrows"))
    return sorted(Segment(int(found[1]), int(found[2]), path) for found, path in names if found)


class Placed(NamedTuple):
    """A batch of a segment, and where it stands there."""

    path: Path
    offset: int
    """Of its message in the file."""
    rows: pa.RecordBatch


def scan(layout: Layout, space: KeySpace, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Committed rows with these columns of LOG, in order of (epoch, segment, position).

    Rows that a superseded driver committed for slots that were given out anew are left out. Raises RunError where
    a segment is damaged before its end.
    """
    return (placed.rows for placed in scan_placed(layout, space, columns))


def scan_placed(layout: Layout, space: KeySpace, columns: Sequence[str]) -> Iterator[Placed]:
    """As `scan`, with the place of each batch."""
    limits = slot_limits(headers(layout))
    wanted = list(columns)
    read = list(dict.fromkeys((*wanted, "key")))
    for segment in segments(layout):
        stop = limits.get(segment.epoch)
        for offset, batch in _read_placed(segment.path, read):
            kept = batch if stop is None else _below(batch, stop * space.per_slot)
            if len(kept):
                yield Placed(segment.path, offset, kept if read == wanted else kept.select(wanted))


def _below(batch: pa.RecordBatch, stop: int) -> pa.RecordBatch:
    keys = batch.column("key").to_numpy()
    return batch if not len(keys) or keys.max() < stop else batch.filter(pa.array(keys < stop))


def read_segment(path: Path, columns: Iterable[str]) -> Iterator[pa.RecordBatch]:
    """The whole batches of one segment; a torn last one was never acknowledged and is left out."""
    return (batch for _, batch in _read_placed(path, columns))


def read_batch(path: Path, offset: int) -> pa.RecordBatch:
    """The whole batch whose message starts there. Raises RunError."""
    with reading(path, RUN_AGAIN), pa.OSFile(str(path)) as source:
        source.seek(offset)
        batch = pa.ipc.read_record_batch(pa.ipc.read_message(source), LOG)
        batch.validate(full=True)
        return batch


def _read_placed(path: Path, columns: Iterable[str]) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Batches with the offsets of their messages."""
    names = list(columns)
    with reading(path, RUN_AGAIN), open_regular(path) as file:
        if not path.stat().st_size:
            return
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    source = pa.BufferReader(pa.py_buffer(mapped))
    reader = _open(path, source, names)
    kept_from = 0
    while reader is not None:
        position = source.tell()
        if position - kept_from > _MAPPED_BYTES:
            # Pages that were read stay in the page cache, but count as this process's memory no longer.
            kept_from = position // mmap.PAGESIZE * mmap.PAGESIZE
            mapped.madvise(mmap.MADV_DONTNEED, 0, kept_from)
        try:
            batch = reader.read_next_batch()
            batch.validate(full=True)
        except StopIteration:
            return
        except (OSError, pa.ArrowException) as error:
            _end_or_raise(path, source, position, error)
            return
        yield position, batch.select(names)


def _open(path: Path, source: pa.NativeFile, columns: Sequence[str]) -> pa.RecordBatchReader | None:
    """A reader of these columns alone; None where the segment ends in its first message."""
    try:
        schema = pa.ipc.read_schema(source)
    except (OSError, pa.ArrowException) as error:
        _end_or_raise(path, source, 0, error)
        return None
    if not schema.equals(LOG):
        raise RunError(f"{named(path)}: its schema is not version {SCHEMA_VERSION} of the log")
    source.seek(0)
    fields = sorted(LOG.get_field_index(name) for name in columns)
    return pa.ipc.open_stream(source, options=pa.ipc.IpcReadOptions(use_threads=False, included_fields=fields))


def _end_or_raise(path: Path, source: pa.NativeFile, position: int, error: Exception) -> None:
    """Passes over a message that is the last of its segment; damage before the end is an error."""
    size = source.size()
    end = _next_message(source, position)
    if end < size:
        raise RunError(
            f"{named(path)}: damaged at byte {position} of {size}: {describe(error)}\n  {RUN_AGAIN}"
        ) from error
    # A batch that is torn off is what a kill leaves; one that is all there was hit by more than a kill.
    level = logging.WARNING if end == size else logging.INFO
    logger.log(level, "segment=%s ends in a torn batch, %d bytes are left out", path, size - position)


def _next_message(source: pa.NativeFile, position: int) -> int:
    """Where the message after the one at `position` starts, also if that is past the end. 0: this is no message."""
    head: bytes = source.read_at(8, position)
    if len(head) < 8:
        return position + 8
    marker, length = _HEAD.unpack(head)
    if marker != _CONTINUATION:
        return 0
    start = position + 8
    metadata: bytes = source.read_at(length, start) if start + length < source.size() else b""
    end: int = start + length + (_body_length(metadata) if metadata else 0)
    return end


def _body_length(metadata: bytes) -> int:
    """`Message.bodyLength`: the fourth field of the flatbuffer's root table."""
    try:
        (root,) = struct.unpack_from("<I", metadata, 0)
        (back,) = struct.unpack_from("<i", metadata, root)
        (field,) = struct.unpack_from("<H", metadata, root - back + 4 + 2 * 3)
        length: int = struct.unpack_from("<q", metadata, root + field)[0] if field else 0
    except struct.error:
        return 0
    return max(length, 0)
