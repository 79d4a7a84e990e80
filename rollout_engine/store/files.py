"""Writes that are whole or not at all after a crash, and errors that name the file."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from rollout_engine.disk import node
from rollout_engine.errors import RunError, describe
from rollout_engine.store.mirrors import mirror_of, named
from rollout_engine.store.objects import ObjectError

TEMPORARY = ".*.tmp"
"""Glob of what a killed writer may leave behind."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """A failure to write becomes a RunError that names the file."""
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        raise RunError(
            f"cannot write {named(path)}: {describe(error)}\n  what was committed is kept; {_remedy(path, error)}, "
            "then `rollout resume`"
        ) from error


MAX_RECORD_BYTES = 64 << 20
"""run.json and its like are never larger than this; what is, was not written by the engine."""


def open_regular(path: Path) -> BufferedReader:
    """Opens a file for reading. Raises OSError, also where it is none (a pipe would never be opened)."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "is no regular file", str(path))
    return open(handle, "rb")


def read_record(path: Path) -> bytes:
    """The content of a small file. Raises OSError where it is no file, or larger than MAX_RECORD_BYTES."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > MAX_RECORD_BYTES:
            raise OSError(errno.EFBIG, f"is larger than {MAX_RECORD_BYTES >> 20} MiB", str(path))
        return file.read(size)


FROM_COPY = "restore it from a copy"
RUN_AGAIN = "restore it from a copy; or remove it and compacted.json, and `rollout resume` runs its rollouts again"
MAKE_ANEW = "remove compacted.json, and `rollout resume` makes the tables anew from the log"


@contextmanager
def reading(path: Path, fix: str = FROM_COPY) -> Iterator[None]:
    """A file that is missing or not what the engine wrote becomes a RunError that names it, and what to do."""
    try:
        yield
    except (OSError, pa.ArrowException, ValueError, KeyError, TypeError, RecursionError, MemoryError) as error:
        raise RunError(f"cannot read {named(path)}: {describe(error)}\n  {fix}") from error


def _remedy(path: Path, error: BaseException) -> str:
    if isinstance(error, ObjectError):
        return "see to the store"
    if (mirror := mirror_of(path)) is not None:
        return f"free space in its working copy ({mirror.root} on {node()}), or set TMPDIR to a disk that has some"
    return f"free space or repair the disk (on {node()})"


def sync_directory(path: Path) -> None:
    """Makes the names in a directory durable."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_file(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_all(handle: int, data: bytes | bytearray | memoryview) -> None:
    """Writes all of it, or raises OSError after a part of it."""
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view) :]


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def _staged(path: Path, data: bytes, sync: bool, mode: int = 0o644) -> Path:
    """A temporary file beside `path` that holds the data."""
    temporary = _temporary(path)
    try:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
        try:
            write_all(handle, data)
            if sync:
                os.fsync(handle)
        finally:
            os.close(handle)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return temporary


def write_atomic(path: Path, data: bytes, *, sync: bool = True, mode: int = 0o644) -> None:
    """Replaces a file: readers see the old bytes or the new. Raises OSError and leaves nothing behind."""
    temporary = _staged(path, data, sync, mode)
    try:
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    if sync:
        sync_directory(path.parent)


def _link(source: Path, path: Path) -> None:
    try:
        os.link(source, path)
    except OSError as error:
        # Some mounted stores have no hard links; there a race of two makers is not noticed here.
        if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS) or path.exists():
            raise
        os.replace(source, path)


def write_exclusive(path: Path, data: bytes) -> None:
    """Makes a whole new file. Raises FileExistsError where there is one, else OSError; leaves nothing behind."""
    temporary = _staged(path, data, sync=True)
    try:
        _link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_directory(path.parent)


def write_table(path: str | os.PathLike[str], table: pa.Table) -> None:
    """Replaces a Parquet file (zstd); a reader sees the old table or the new. Raises RunError."""
    path = Path(path)
    temporary = _temporary(path)
    with writing(path):
        try:
            pq.write_table(table, str(temporary), compression="zstd")
            sync_file(temporary)
            os.replace(temporary, path)
            sync_directory(path.parent)
        finally:
            temporary.unlink(missing_ok=True)
