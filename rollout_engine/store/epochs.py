"""Epochs: at most one driver works on a run, and one that was superseded finds out before it commits.

An epoch is one life of the run's driver. It is a file that is made by exclusive creation, so that of two drivers one
gets the number. Whether its holder lives is decided by pid and start time on the same machine, and from another one by
the age of its record, which one clock tells: that of the file system or store that holds it. No two machines' clocks
are compared.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from rollout_engine.errors import InputError, RunError, describe
from rollout_engine.specs import Spec
from rollout_engine.store.epochroom import room_of
from rollout_engine.store.files import writing
from rollout_engine.store.mirrors import named

DEAD_AFTER_BEATS = 6
MAX_ASKER_CHARS = 200
"""What is kept of the name that a request to cancel gives."""


class EpochRecord(Spec):
    """What `epochs/N.json` says about its holder."""

    epoch: int
    host: str
    pid: int
    process_start: str
    """The kernel's start time of the process: a pid that was given to another process differs in it."""
    machine: str
    """Boot id and pid namespace: only where they are the same does a pid mean the same process."""
    started_at: float
    heartbeat: float
    heartbeat_s: float
    released: bool = False


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def machine_id() -> str:
    """Names the space in which this process's pid is unique; empty where the system does not tell."""
    boot = _read_text("/proc/sys/kernel/random/boot_id")
    try:
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}" if boot else ""
    except OSError:
        return ""


def process_start(pid: int) -> str:
    """The start time of a live process in the kernel's ticks; empty where there is none (a zombie is none)."""
    _, _, tail = _read_text(f"/proc/{pid}/stat").rpartition(")")
    fields = tail.split()
    return fields[19] if len(fields) > 19 and fields[0] not in "ZX" else ""


def is_alive(record: EpochRecord, machine: str, silent_s: float) -> bool:
    """Whether the holder of an epoch may still be at work, seen from `machine`; `silent_s`: the record's age."""
    if record.released:
        return False
    if machine and record.machine == machine:
        return process_start(record.pid) == record.process_start
    return silent_s < DEAD_AFTER_BEATS * record.heartbeat_s


class Holder(NamedTuple):
    """Who holds an epoch, or held it last, as seen from here."""

    record: EpochRecord
    silent_s: float
    """Seconds since its heartbeat."""
    alive: bool


def newest_epoch(epochs: Path) -> int:
    """The highest epoch that was ever taken; 0 where none was. Raises InputError."""
    try:
        return max(room_of(epochs).numbers(), default=0)
    except OSError as error:
        raise InputError(f"cannot be read: {describe(error)}", where=named(epochs)) from error


def read_epoch(epochs: Path, number: int) -> EpochRecord | None:
    """The record of an epoch; None where its maker was killed before it wrote it. Raises InputError."""
    room = room_of(epochs)
    try:
        raw = room.read(number)
        return EpochRecord.model_validate_json(raw) if raw else None
    except (OSError, ValidationError) as error:
        raise InputError(
            f"is no epoch record: {describe(error)}",
            where=room.name(number),
            fix="if no driver works on this run, remove the file's content (keep the file) and resume",
        ) from error


class Epoch:
    """An epoch that this process holds. Whoever takes it releases it."""

    def __init__(self, epochs: Path, record: EpochRecord, clock: Callable[[], float]) -> None:
        self._epochs = epochs
        self._room = room_of(epochs)
        self._record = record
        self._clock = clock

    @property
    def number(self) -> int:
        return self._record.epoch

    @property
    def released(self) -> bool:
        return self._record.released

    @property
    def superseded(self) -> bool:
        """Whether another driver has taken over. One stat: cheap enough for every commit. Raises RunError."""
        # Numbers are given out without gaps, so the next one exists if any later one does.
        with writing(self._epochs):
            return self._room.exists(self.number + 1)

    def check(self) -> None:
        """Raises RunError where another driver has taken over."""
        if self.superseded:
            self._stop(self.number + 1)

    def beat(self) -> None:
        """Renews the heartbeat where it is due, after a check. Raises RunError."""
        now = self._clock()
        if 0 <= now - self._record.heartbeat < self._record.heartbeat_s:
            return
        newest = newest_epoch(self._epochs)
        if newest > self.number:
            self._stop(newest)
        self._write(self._record.model_copy(update={"heartbeat": now}))

    def cancel_asked(self) -> str | None:
        """Who has asked this driver to cancel the run; None: nobody. Raises RunError."""
        with writing(self._epochs):
            found = self._room.cancel_asked(self.number)
        return None if found is None else found.decode("utf-8", "replace")[:MAX_ASKER_CHARS] or "somebody"

    def release(self) -> None:
        """Lets the next driver start at once. Safe to call twice."""
        if not self._record.released:
            self._write(self._record.model_copy(update={"heartbeat": self._clock(), "released": True}))

    def _stop(self, newer: int) -> None:
        raise RunError(
            f"another driver has taken over this run (epoch {newer}, {self._room.name(newer)}); "
            f"this one (epoch {self.number}) commits nothing more"
        )

    def _write(self, record: EpochRecord) -> None:
        with writing(self._epochs / f"{self.number}.json"):
            self._room.replace(self.number, record.model_dump_json().encode())
        self._record = record


def ask_cancel(epochs: Path, number: int, who: str) -> None:
    """Asks the driver that holds this epoch to cancel the run. Raises InputError."""
    try:
        room_of(epochs).ask_cancel(number, who.encode())
    except OSError as error:
        raise InputError(f"cannot be written: {describe(error)}", where=named(epochs)) from error


def live_driver(epochs: Path) -> EpochRecord | None:
    """The driver that is at work on a run now, as far as can be seen from here. Raises InputError."""
    holder = newest_holder(epochs)
    return holder.record if holder is not None and holder.alive else None


def newest_holder(epochs: Path) -> Holder | None:
    """Of the newest epoch, dead or alive; None where there is none. Raises InputError."""
    newest = newest_epoch(epochs)
    record = read_epoch(epochs, newest) if newest else None
    return None if record is None else _holder(epochs, record)


def _holder(epochs: Path, record: EpochRecord) -> Holder:
    machine = machine_id()
    if machine and record.machine == machine:  # its clock is ours
        silent_s = max(time.time() - record.heartbeat, 0.0)
    else:
        silent_s = _silent_s(epochs, record.epoch)
    return Holder(record, silent_s, is_alive(record, machine, silent_s))


def _silent_s(epochs: Path, number: int) -> float:
    try:
        return room_of(epochs).silent_s(number)
    except OSError as error:
        raise InputError(f"cannot be read: {describe(error)}", where=named(epochs)) from error


def take_epoch(epochs: Path, heartbeat_s: float, clock: Callable[[], float] = time.time) -> Epoch:
    """Takes the next epoch of a run. Raises InputError where its driver is alive or the directory refuses."""
    machine = machine_id()
    while True:
        newest = newest_epoch(epochs)
        if newest:
            _refuse_if_alive(epochs, newest, heartbeat_s)
        now = clock()
        record = EpochRecord(
            epoch=newest + 1,
            host=socket.gethostname(),
            pid=os.getpid(),
            process_start=process_start(os.getpid()),
            machine=machine,
            started_at=now,
            heartbeat=now,
            heartbeat_s=heartbeat_s,
        )
        try:
            room_of(epochs).create(record.epoch, record.model_dump_json().encode())
        except FileExistsError:
            continue
        except OSError as error:
            raise InputError(
                f"cannot be written: {describe(error)}", where=named(epochs), fix="a run needs a writable directory"
            ) from error
        return Epoch(epochs, record, clock)


def _refuse_if_alive(epochs: Path, number: int, heartbeat_s: float) -> None:
    record = read_epoch(epochs, number)
    name = room_of(epochs).name(number)
    if record is None:
        if _silent_s(epochs, number) < DEAD_AFTER_BEATS * heartbeat_s:
            raise InputError("another driver is just starting on this run", where=name, fix="try again in a minute")
        return
    holder = _holder(epochs, record)
    if holder.alive:
        raise InputError(
            f"a driver works on this run: pid {record.pid} on {record.host}, heartbeat {holder.silent_s:.0f} s ago",
            where=named(epochs.parent),
            fix=f"wait for it or stop it (kill {record.pid} on {record.host}); if it is surely gone, "
            f'set "released": true in {name}',
        )
