"""Trace files: large trajectories, written by the host that ran them, found by file, offset and hash."""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from rollout_engine.errors import RunError
from rollout_engine.schema import TRACE, batch_to_turns, turns_to_batch
from rollout_engine.store.files import read_record, reading, sync_directory, write_all
from rollout_engine.store.layout import Layout
from rollout_engine.store.mirrors import named
from rollout_engine.types import Turn

_LENGTH = struct.Struct("<Q")
_OPTIONS = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)


class TraceRef(NamedTuple):
    """Where a trajectory lies: a file name under RUN/traces, the offset of its length prefix, its hash."""

    file: str
    offset: int
    sha256: str


def sees_run(run_dir: str | os.PathLike[str], run_id: str) -> bool:
    """Whether this machine finds, at that path, the run directory that the driver means."""
    try:
        raw = json.loads(read_record(Layout(Path(run_dir)).run_json))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(raw, dict) and raw.get("run_id") == run_id


class TraceWriter:
    """Appends trajectories to the host's own file. Safe from several threads; whoever makes it closes it.

    The file appears with the first write. Raises OSError where the disk refuses; what was written before stays good.
    """

    def __init__(self, run_dir: str | os.PathLike[str], host_id: str, epoch: int) -> None:
        self.file = f"{re.sub(r'[^A-Za-z0-9_.-]', '_', host_id).lstrip('.') or 'host'}-{epoch}.bin"
        self.path = Layout(Path(run_dir)).traces / self.file
        self._handle: int | None = None
        self._append_lock = threading.Lock()
        self._sync_lock = threading.Lock()
        self._synced = 0

    def write(self, turns: Sequence[Turn]) -> TraceRef:
        """Returns once the turns are durable: a row that names them may be committed at any later moment."""
        sink = pa.BufferOutputStream()
        batch = turns_to_batch(turns)
        with pa.ipc.new_stream(sink, batch.schema, options=_OPTIONS) as writer:
            writer.write_batch(batch)
        payload = memoryview(sink.getvalue())
        with self._append_lock:
            offset = self._append(payload)
        self._sync(offset + _LENGTH.size + len(payload))
        return TraceRef(self.file, offset, hashlib.sha256(payload).hexdigest())

    def _append(self, payload: memoryview) -> int:
        if self._handle is None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
            self._handle = os.open(self.path, flags, 0o644)
            sync_directory(self.path.parent)
        offset = os.fstat(self._handle).st_size
        write_all(self._handle, _LENGTH.pack(len(payload)))
        write_all(self._handle, payload)
        return offset

    def sync(self) -> None:
        """Makes everything written so far durable (`write` has done so for its own)."""
        if self._handle is not None:
            self._sync(os.fstat(self._handle).st_size)

    def _sync(self, end: int) -> None:
        """One thread's sync serves all that wait with it."""
        with self._sync_lock:
            if self._synced >= end or self._handle is None:
                return
            size = os.fstat(self._handle).st_size
            os.fdatasync(self._handle)
            self._synced = size

    def close(self) -> None:
        with self._append_lock, self._sync_lock:
            if self._handle is not None:
                os.close(self._handle)
                self._handle = None


class TraceReader:
    """Reads trajectories of one run; keeps its files open until it is closed."""

    def __init__(self, traces: Path) -> None:
        self._traces = traces
        self._handles: dict[str, int] = {}

    def __enter__(self) -> TraceReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        while self._handles:
            os.close(self._handles.popitem()[1])

    def size(self, file: str, offset: int) -> int:
        """Bytes of a trajectory as it is stored. Raises RunError."""
        path = self._traces / file
        with reading(path):
            handle = self._open(file)
            head = os.pread(handle, _LENGTH.size, offset)
            length: int = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else -1
            if not 0 <= length <= os.fstat(handle).st_size - offset - _LENGTH.size:
                raise RunError(f"{named(path)}: no trace lies at offset {offset}")
            return length

    def read(self, file: str, offset: int, sha256: str) -> pa.RecordBatch:
        """The turns as rows. Raises RunError where they are missing or not the ones that the row names."""
        length = self.size(file, offset)
        path = self._traces / file
        with reading(path):
            payload = os.pread(self._open(file), length, offset + _LENGTH.size)
            if hashlib.sha256(payload).hexdigest() != sha256:
                raise RunError(f"{named(path)}: the trace at offset {offset} is not the one of its row (sha256)")
            batch = pa.ipc.open_stream(pa.py_buffer(payload)).read_next_batch()
            batch.validate(full=True)
            if not batch.schema.equals(TRACE):
                raise RunError(f"{named(path)}: the trace at offset {offset} has another schema than this version's")
            return batch

    def _open(self, file: str) -> int:
        if file in ("", ".", "..") or "/" in file or "\0" in file:
            raise RunError(f"trace file {file!r} is not a plain name under {named(self._traces)}")
        if file not in self._handles:
            self._handles[file] = os.open(
                self._traces / file, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            )
        return self._handles[file]


def read_trace(run_dir: str | os.PathLike[str], file: str, offset: int, sha256: str) -> list[Turn]:
    """The turns of one trajectory. Raises RunError where they are missing, changed, or outside RUN/traces."""
    with TraceReader(Layout(Path(run_dir)).traces) as traces:
        return batch_to_turns(traces.read(file, offset, sha256))
