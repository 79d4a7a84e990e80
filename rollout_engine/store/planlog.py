"""The plan: which task each slot stands for, append-only, readable by slot without holding any task in memory."""

from __future__ import annotations

import os
import threading
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from rollout_engine.errors import RunError
from rollout_engine.store.files import reading, sync_directory, write_all, writing
from rollout_engine.store.layout import Layout
from rollout_engine.store.mirrors import mirror_of, named
from rollout_engine.store.planfile import (
    Header,
    PlanEntry,
    entry_line,
    header_line,
    headers,
    name_hash,
    parse_entry,
    quoted,
    read_lines,
    slot_limits,
)
from rollout_engine.store.slotindex import SlotIndex

_BUFFER_BYTES = 1 << 20
_STRIDE = 64
"""The offset of every 64th line of a file is kept, and the length of each line."""


class _File:
    """One epoch's plan file: where its lines are."""

    def __init__(self, handle: int, first_slot: int, start: int) -> None:
        self.handle = handle
        self.first_slot = first_slot
        self.end = start
        self._lengths = array("I")
        self._offsets = array("Q")

    def add(self, length: int) -> None:
        if len(self._lengths) % _STRIDE == 0:
            self._offsets.append(self.end)
        self._lengths.append(length)
        self.end += length

    def extend(self, lengths: npt.NDArray[np.int64]) -> None:
        """As `add` for each of them."""
        starts = np.cumsum(lengths) - lengths + self.end
        marked = starts[-len(self._lengths) % _STRIDE :: _STRIDE]
        self._offsets.frombytes(marked.astype(np.uint64).tobytes())
        self._lengths.frombytes(lengths.astype(np.uint32).tobytes())
        self.end += int(lengths.sum())

    def read(self, first: int, stop: int) -> list[PlanEntry]:
        """Slots of this file. Raises ValueError where a line is not what was written."""
        row, end = first - self.first_slot, stop - self.first_slot
        mark = row // _STRIDE
        offset = self._offsets[mark] + sum(self._lengths[mark * _STRIDE : row])
        lengths = self._lengths[row:end]
        data = os.pread(self.handle, sum(lengths), offset)
        found, start = [], 0
        for slot, length in enumerate(lengths, first):
            entry = parse_entry(data[start : start + length])
            if entry is None or entry.slot != slot:
                raise ValueError(f"the entry of slot {slot} was changed")
            found.append(entry)
            start += length
        return found


class PlanLog:
    """All slots of a run, and where this epoch's new ones are appended. Safe from several threads."""

    def __init__(self, layout: Layout) -> None:
        """The plan as earlier epochs left it; `begin` makes it writable. Raises RunError where a file is damaged."""
        self._layout = layout
        self._mirror = mirror_of(layout.root)
        self._published = 0
        """Bytes of this epoch's file that are on the object store, where the run is on one."""
        self._files: list[_File] = []
        self._firsts: list[int] = []
        self._index = SlotIndex()
        self._lock = threading.RLock()
        self._sync_lock = threading.Lock()
        self._buffer = bytearray()
        self._unsynced = False
        self._broken = False
        self._writable = False
        self.header: Header | None = None
        """The newest header: m, k and the models' names."""
        try:
            self._load()
        except BaseException:
            self.close()
            raise

    def _load(self) -> None:
        known = headers(self._layout)
        limits = slot_limits(known)
        for epoch, header in known.items():
            path = self._layout.plan_file(epoch)
            if header.first_slot > len(self):
                raise RunError(
                    f"{named(path)}: starts at slot {header.first_slot}, the plan before has {len(self)} slots"
                )
            with reading(path):
                handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                file = self._append_file(handle, header, os.pread(handle, 1 << 20, 0).index(b"\n") + 1)
            hashes = array("I")
            for lines in read_lines(path, header.first_slot, limits.get(epoch)):
                file.extend(lines.lengths)
                hashes.extend(lines.hashes)
            self._index.extend(hashes)

    def _append_file(self, handle: int, header: Header, start: int) -> _File:
        file = _File(handle, header.first_slot, start)
        self._files.append(file)
        self._firsts.append(header.first_slot)
        self.header = header
        return file

    def __len__(self) -> int:
        """The number of slots."""
        return len(self._index)

    def begin(self, epoch: int, models: Sequence[str], k: int) -> None:
        """Opens this epoch's own file, durably. Raises RunError."""
        path = self._layout.plan_file(epoch)
        header = Header(epoch, len(self), len(models), k, tuple(models))
        with writing(path):
            # What a killed driver wrote but never synced is in this plan now, so it must not vanish any more.
            for file in self._files if self._mirror is None else ():
                os.fsync(file.handle)
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
            line = header_line(header)
            self._append_file(handle, header, len(line))
            write_all(handle, line)
            self._make_durable()
            sync_directory(self._layout.plan)
        self._writable = True

    def _make_durable(self) -> None:
        """Syncs this epoch's file, or sends what was appended to it. Raises OSError."""
        file, header = self._files[-1], self.header
        if self._mirror is None or header is None:
            os.fdatasync(file.handle)
            return
        size = os.fstat(file.handle).st_size
        self._mirror.publish_plan(header.epoch, os.pread(file.handle, size - self._published, self._published))
        self._published = size

    def append(self, round: int, task_id: str, digest: str, body: bytes) -> int:
        """The new slot. Durable after `sync`; the store syncs the plan before it commits rows. Raises RunError."""
        if b"\n" in body:
            raise ValueError(f"the body of task {task_id!r} is not the one line that task_body makes")
        name = quoted(task_id)
        with self._lock:
            if not self._writable:
                raise RunError(f"the plan in {named(self._layout.plan)} is open for reading only")
            slot = len(self)
            line = entry_line(slot, round, name, digest, body)
            self._files[-1].add(len(line))
            self._index.add(name_hash(round, name))
            self._buffer += line
            self._unsynced = True
            if len(self._buffer) > _BUFFER_BYTES:
                self._write()
        return slot

    def _write(self) -> None:
        """Hands the buffer to the kernel. What a full disk leaves over stays in the buffer for the next call."""
        with writing(self._layout.plan):
            while self._buffer:
                del self._buffer[: os.write(self._files[-1].handle, self._buffer)]

    def sync(self) -> None:
        """Makes every slot so far durable. Raises RunError."""
        with self._sync_lock:
            with self._lock:
                if not self._unsynced:
                    return
                if self._broken:
                    raise RunError(f"{named(self._layout.plan)}: could not be synced; `rollout resume` the run")
                self._write()
                self._unsynced = False
            # Slots may be appended meanwhile. After a failed sync the kernel may drop what it could not write, and
            # a second sync would report success: this epoch is over then.
            with writing(self._layout.plan):
                try:
                    self._make_durable()
                except BaseException:
                    self._broken = self._unsynced = True
                    raise

    def find(self, round: int, task_id: str) -> int | None:
        """The first slot of this task in this round, of this epoch or an earlier one."""
        name = quoted(task_id)
        for slot in self._index.find(name_hash(round, name)):
            entry = self.entry(slot)
            if entry.round == round and entry.task_id == task_id:
                return slot
        return None

    def entry(self, slot: int) -> PlanEntry:
        """Reads a slot from its file. Raises IndexError where there is none, RunError where the file was changed."""
        if not 0 <= slot < len(self):
            raise IndexError(f"the plan has {len(self)} slots, and none numbered {slot}")
        return self._read(slot, slot + 1)[0]

    def _read(self, first: int, stop: int) -> list[PlanEntry]:
        with self._lock:
            if self._buffer:
                self._write()
        found: list[PlanEntry] = []
        while first < stop:
            number = bisect_right(self._firsts, first) - 1
            upto = min([stop, *self._firsts[number + 1 : number + 2]])
            with reading(self._layout.plan):
                found += self._files[number].read(first, upto)
            first = upto
        return found

    def body(self, slot: int) -> bytes:
        """The body of a slot's task, as it was appended."""
        return self.entry(slot).body

    def entries(self, first: int = 0, stop: int | None = None) -> Iterator[PlanEntry]:
        """The slots from `first` up to `stop`, read some dozens at a time. Raises RunError."""
        end = len(self) if stop is None else min(stop, len(self))
        while first < end:
            last = min(first + _STRIDE, end)
            yield from self._read(first, last)
            first = last

    def close(self) -> None:
        """Writes what is buffered, and closes. Safe to call twice."""
        try:
            if self._writable:
                self.sync()
        finally:
            self._writable = False
            while self._files:
                os.close(self._files.pop().handle)
