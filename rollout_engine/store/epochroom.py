"""Where the records of epochs lie: files of a directory, or objects of a store that makes each of them only once."""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from rollout_engine.disk import is_full
from rollout_engine.store.files import open_regular, read_record, write_all, write_atomic
from rollout_engine.store.mirror import Mirror
from rollout_engine.store.mirrors import mirror_of

_CANCEL = ".cancel"
_NAME = re.compile(r"(?:epochs/)?(\d+)\.json")


class EpochRoom(Protocol):
    """The records of one run by their number. Raises OSError."""

    def numbers(self) -> list[int]: ...

    def read(self, number: int) -> bytes: ...

    def create(self, number: int, data: bytes) -> None:
        """Raises FileExistsError where another driver was first."""
        ...

    def replace(self, number: int, data: bytes) -> None: ...

    def exists(self, number: int) -> bool: ...

    def ask_cancel(self, number: int, data: bytes) -> None:
        """Puts a request beside the record, for its driver to find."""
        ...

    def cancel_asked(self, number: int) -> bytes | None:
        """The request; None where there is none. One stat where there is none."""
        ...

    def silent_s(self, number: int) -> float:
        """Seconds since the record was written, by the one clock of where it lies, whoever wrote it and asks."""
        ...

    def name(self, number: int) -> str:
        """For messages."""
        ...


class DirectoryRoom:
    """Files; whose file system, or the server of it, stamps what any machine writes by its own clock."""

    def __init__(self, epochs: Path) -> None:
        self._epochs = epochs

    def _path(self, number: int) -> Path:
        return self._epochs / f"{number}.json"

    def numbers(self) -> list[int]:
        try:
            return _numbers(os.listdir(self._epochs))
        except FileNotFoundError:
            return []

    def read(self, number: int) -> bytes:
        return read_record(self._path(number))

    def create(self, number: int, data: bytes) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        handle = os.open(self._path(number), flags, 0o644)
        try:
            write_all(handle, data)
            os.fsync(handle)
        finally:
            os.close(handle)

    def replace(self, number: int, data: bytes) -> None:
        try:
            write_atomic(self._path(number), data, sync=False)
        except OSError as error:
            if not is_full(error):
                raise
            # A full disk must not keep the next driver out: the bytes that the record has are there.
            with open(self._path(number), "r+b", buffering=0) as file:
                file.write(data.ljust(os.fstat(file.fileno()).st_size))

    def exists(self, number: int) -> bool:
        return self._path(number).exists()

    def ask_cancel(self, number: int, data: bytes) -> None:
        write_atomic(self._path(number).with_suffix(_CANCEL), data)

    def cancel_asked(self, number: int) -> bytes | None:
        path = self._path(number).with_suffix(_CANCEL)
        return read_record(path) if path.exists() else None

    def silent_s(self, number: int) -> float:
        now = self._now()
        with open_regular(self._path(number)) as file:  # a file server is asked at each opening, but not at each stat
            return max(now - os.fstat(file.fileno()).st_mtime, 0.0)

    def _now(self) -> float:
        """What the clock says that stamps the records; our own, where we may only read them."""
        try:
            handle, name = tempfile.mkstemp(".tmp", ".now-", self._epochs)
        except OSError:
            return time.time()
        try:
            os.utime(handle)
            return os.fstat(handle).st_mtime
        finally:
            os.close(handle)
            os.unlink(name)

    def name(self, number: int) -> str:
        return str(self._path(number))


class ObjectRoom:
    """Objects; the store's own clock says how old they are."""

    def __init__(self, mirror: Mirror) -> None:
        self._objects = mirror.objects

    def numbers(self) -> list[int]:
        return _numbers(self._objects.list("epochs/"))

    def read(self, number: int) -> bytes:
        data = self._objects.get(_key(number))
        if data is None:
            raise FileNotFoundError(f"{self.name(number)}: there is no such object")
        return data

    def create(self, number: int, data: bytes) -> None:
        self._objects.create(_key(number), data)

    def replace(self, number: int, data: bytes) -> None:
        self._objects.put(_key(number), data)

    def exists(self, number: int) -> bool:
        return self._objects.exists(_key(number))

    def ask_cancel(self, number: int, data: bytes) -> None:
        self._objects.put(_key(number, _CANCEL), data)

    def cancel_asked(self, number: int) -> bytes | None:
        return self._objects.get(_key(number, _CANCEL))

    def silent_s(self, number: int) -> float:
        return self._objects.age_s(_key(number))

    def name(self, number: int) -> str:
        return f"{self._objects.uri}/{_key(number)}"


def room_of(epochs: Path) -> EpochRoom:
    """The room that a run's `epochs` directory stands for."""
    mirror = mirror_of(epochs)
    return DirectoryRoom(epochs) if mirror is None else ObjectRoom(mirror)


def _key(number: int, suffix: str = ".json") -> str:
    return f"epochs/{number}{suffix}"


def _numbers(names: Iterable[str]) -> list[int]:
    return [int(found[1]) for name in names if (found := _NAME.fullmatch(name)) is not None]
