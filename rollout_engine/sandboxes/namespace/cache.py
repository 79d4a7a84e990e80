"""Unpacked roots on this node's disk: by name, shared by all hosts of a user, the longest unused removed first.

    CACHE/NAME/root        the tree            CACHE/unpacking.OWNER.*   one that is not whole yet
    CACHE/NAME/about.json  what is known of it CACHE/removing.OWNER.*    one that is on its way out
    CACHE/NAME/lock        held shared by whoever uses it, exclusively by whoever removes it
    CACHE/making.NN        held by who makes one of the names that fall on NN

Locks are the kernel's (flock): one who dies holds none. A tree appears under its name when it is whole and on disk.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rollout_engine.disk import is_full, on_disk
from rollout_engine.errors import SandboxStartError
from rollout_engine.sandboxes.files import remove
from rollout_engine.sandboxes.namespace.helper import limits

MAX_CACHE_BYTES = 50 * 2**30
"""Of all unpacked roots of a user on a node. What is in use stays, so that it may be more for as long."""
MAKE_WAIT_S = 1800.0
"""So long one host waits for another that makes the same root."""
_LOCKS, _PAUSE_S = 64, 0.1
_UNPACKING, _REMOVING, _MAKING = "unpacking.", "removing.", "making."


class Hold:
    """A root in use: it stays until `release`."""

    def __init__(self, place: Path, lock: int) -> None:
        self.directory, self._lock = str(place / "root"), lock
        self.about: dict[str, Any] = json.loads((place / "about.json").read_text())

    def release(self) -> None:
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)


class _Entry(NamedTuple):
    used: float
    size: int
    place: Path


class RootCache:
    """The roots below one directory. Everything but `hold` blocks: for a thread."""

    def __init__(self, directory: Path, limit_bytes: int = MAX_CACHE_BYTES) -> None:
        self.directory, self._limit = directory, limit_bytes
        self.closing = threading.Event()
        """Set when nobody waits any more: threads that make roots, or wait for others who do, then give up."""

    def hold(self, name: str) -> Hold | None:
        """The root of this name, which is then the last to go; None where there is none, or it is being removed."""
        place = self.directory / name
        lock = -1
        try:
            lock = os.open(place / "lock", os.O_RDONLY | os.O_CLOEXEC)
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if os.stat(place / "lock").st_ino == os.fstat(lock).st_ino:
                os.utime(lock)
                return Hold(place, lock)
        except (FileNotFoundError, BlockingIOError):
            pass
        if lock >= 0:
            os.close(lock)
        return None

    def make(self, name: str, fill: Callable[[Path], dict[str, Any]]) -> Hold:
        """The root of this name, made by `fill` where it is missing: once, however many hosts ask.

        `fill` gets an empty directory and gives what is to be known of it, `bytes` (its size) among that.
        Raises SandboxStartError, NodeDiskFull.
        """
        with on_disk(self.directory):
            self._prepare()
            with self._sole_maker(name):
                return self.hold(name) or self._make(name, fill)

    def _make(self, name: str, fill: Callable[[Path], dict[str, Any]]) -> Hold:
        place = self.directory / name
        temporary = Path(tempfile.mkdtemp(prefix=f"{_UNPACKING}{limits.owner_name()}.", dir=self.directory))
        lock = -1
        try:
            (temporary / "root").mkdir()
            (temporary / "root").chmod(0o755)
            _write(temporary / "about.json", json.dumps(fill(temporary / "root")))
            lock = os.open(temporary / "lock", os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock, fcntl.LOCK_SH)  # before anybody can see it
            temporary.chmod(0o711)
            temporary.rename(place)
            made = Hold(place, lock)
        except BaseException as error:
            if lock >= 0:
                os.close(lock)
            remove(temporary)
            if isinstance(error, OSError) and not is_full(error):
                raise SandboxStartError(f"{place} could not be made: {error}") from error
            raise
        self.trim()
        return made

    def trim(self) -> None:
        """Removes what has been unused longest while all are larger than the limit; never what is in use."""
        entries = sorted(self._entries())
        total = sum(entry.size for entry in entries)
        for entry in entries:
            if total <= self._limit:
                return
            if self._remove(entry.place):
                total -= entry.size

    def _entries(self) -> Iterator[_Entry]:
        for lock in self.directory.glob("*/lock"):
            with contextlib.suppress(OSError, ValueError, KeyError):
                if not lock.parent.name.startswith((_UNPACKING, _REMOVING)):
                    about = json.loads((lock.parent / "about.json").read_text())
                    yield _Entry(lock.stat().st_mtime, int(about["bytes"]), lock.parent)

    def _remove(self, place: Path) -> bool:
        """Whether it could be had: not while anybody uses it."""
        try:
            lock = os.open(place / "lock", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return True
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            going = self.directory / f"{_REMOVING}{limits.owner_name()}.{secrets.token_hex(4)}"
            place.rename(going)
            remove(going)
        except (BlockingIOError, FileNotFoundError):
            return False
        finally:
            os.close(lock)
        return True

    def _prepare(self) -> None:
        """Only we may have written there: what lies in it becomes the root of sandboxes."""
        self.directory.mkdir(parents=True, exist_ok=True)
        info = self.directory.stat()
        if info.st_uid != os.geteuid() or info.st_mode & 0o022:
            raise SandboxStartError(f"{self.directory} must belong to this user, and be writable for nobody else")
        for prefix in (_UNPACKING, _REMOVING):
            for path in self.directory.glob(f"{prefix}*"):
                if not limits.owner_alive(path.name.removeprefix(prefix).rpartition(".")[0]):
                    remove(path)

    @contextlib.contextmanager
    def _sole_maker(self, name: str) -> Iterator[None]:
        path = self.directory / f"{_MAKING}{zlib.crc32(name.encode()) % _LOCKS:02}"
        lock = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._wait_for(lock, name)
            yield
        finally:
            os.close(lock)

    def _wait_for(self, lock: int, name: str) -> None:
        end = time.monotonic() + MAKE_WAIT_S
        while True:
            try:
                return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > end:
                    text = f"another host has been unpacking into {self.directory / name} for {MAKE_WAIT_S:g} s"
                    raise SandboxStartError(text) from None
            if self.closing.wait(_PAUSE_S):
                raise SandboxStartError("the provider was closed while a root was being made")


def _write(path: Path, text: str) -> None:
    """It is on disk when this returns, as the tree beside it is."""
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
