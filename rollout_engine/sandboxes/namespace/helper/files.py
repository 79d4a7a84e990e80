"""A box's files, reached from inside: its first process opens them, so that no link leads to the host's."""

from __future__ import annotations

import contextlib
import errno
import os
import stat

from rollout_engine.sandboxes.namespace.helper import archive
from rollout_engine.sandboxes.namespace.helper import syscalls as sys

MAX_INLINE = 64 * 1024
_OPEN = os.O_NONBLOCK | os.O_NOCTTY


def open_regular(path: str, flags: int, mode: int = 0) -> int:
    """Opens a regular file by an absolute path. Not /proc's: this process would show its own there."""
    if flags & os.O_CREAT:
        with contextlib.suppress(FileExistsError):
            os.close(os.open(path, flags | os.O_EXCL | os.O_CLOEXEC, mode))
    root = os.open("/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fd = sys.open_inside(root, path, (flags & ~os.O_CREAT) | _OPEN)
    finally:
        os.close(root)
    info = os.fstat(fd)
    if stat.S_ISREG(info.st_mode) and info.st_dev != os.stat("/proc").st_dev:
        return fd
    os.close(fd)
    if stat.S_ISDIR(info.st_mode):
        raise IsADirectoryError(errno.EISDIR, "is a directory", path)
    raise PermissionError(errno.EACCES, "not a regular file", path)


def read(path: str, limit: int) -> tuple[int, int, bytes]:
    """A file's descriptor, size, and content where that is small. Raises OSError EFBIG above `limit`."""
    fd = open_regular(path, os.O_RDONLY)
    try:
        size = os.fstat(fd).st_size
        if size > limit:
            raise OSError(errno.EFBIG, f"{size} bytes are more than {limit}", path)
        return fd, size, os.read(fd, MAX_INLINE) if size <= MAX_INLINE else b""
    except OSError:
        os.close(fd)
        raise


def write(path: str, data: bytes, source: int | None, mode: int) -> None:
    """Writes a whole file, from memory or from a descriptor, and makes its parents."""
    os.makedirs(os.path.dirname(path) or "/", exist_ok=True)
    fd = open_regular(path, os.O_WRONLY | os.O_CREAT, mode)
    try:
        os.ftruncate(fd, 0)
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        if source is not None:
            done, size = 0, os.fstat(source).st_size
            while done < size and (count := os.sendfile(fd, source, done, size - done)):
                done += count
        with contextlib.suppress(PermissionError):
            os.fchmod(fd, mode)
    finally:
        os.close(fd)


def unpack(source: int, path: str) -> None:
    """Puts a streamed tree at a path."""
    os.makedirs(os.path.dirname(path.rstrip("/")) or "/", exist_ok=True)
    with os.fdopen(os.dup(source), "rb") as stream:
        archive.read(stream, path, 2**62, 2**62, links=True)


def pack(path: str, target: int, limit: int, entries: int) -> None:
    """Streams a file or directory out of the box; links are left out."""
    with os.fdopen(os.dup(target), "wb") as stream:
        archive.write(stream, path, limit, entries, links=False)
