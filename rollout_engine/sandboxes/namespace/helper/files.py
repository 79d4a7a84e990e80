"""A box's files, reached from inside: its first process opens them, so that no link leads to the host's."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
import tarfile
from typing import BinaryIO

from . import syscalls as sys

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
            raise OSError(errno.EFBIG, f"{size} bytes", path)
        return fd, size, os.read(fd, MAX_INLINE) if size <= MAX_INLINE else b""
    except OSError:
        os.close(fd)
        raise


def write(path: str, data: bytes, mode: int) -> None:
    """Writes a whole file and makes its parents."""
    os.makedirs(os.path.dirname(path) or "/", exist_ok=True)
    fd = open_regular(path, os.O_WRONLY | os.O_CREAT, mode)
    try:
        os.ftruncate(fd, 0)
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        with contextlib.suppress(PermissionError):
            os.fchmod(fd, mode)
    finally:
        os.close(fd)


def unpack(source: int, path: str) -> None:
    """Puts an archive's content at a path: the entry `.` is the path itself. Runs in a child of its own."""
    os.makedirs(os.path.dirname(path.rstrip("/")) or "/", exist_ok=True)
    with os.fdopen(source, "rb") as stream, tarfile.open(fileobj=stream, mode="r:") as archive:
        for member in archive:
            member.name = os.path.normpath(f"{path}/{member.name}")
            member.uid, member.gid, member.uname, member.gname = os.geteuid(), os.getegid(), "", ""
            if not member.isdir() and os.path.lexists(member.name) and not os.path.isdir(member.name):
                os.unlink(member.name)
            if member.isdir() and os.path.isdir(member.name):
                continue
            archive.extract(member, "/", **_TRUSTED)


_TRUSTED: dict[str, str] = {"filter": "fully_trusted"} if hasattr(tarfile, "data_filter") else {}
"""The archive is the engine's own, and the root that it is unpacked under is the box's."""


def pack(path: str, target: int, limit: int) -> None:
    """Writes a file or directory as an archive: regular files and directories only, links are left out."""
    with os.fdopen(target, "wb") as stream, tarfile.open(fileobj=_Once(stream), mode="w|") as archive:
        info = os.lstat(path)
        if stat.S_ISREG(info.st_mode):
            _add(archive, path, ".", limit)
        elif stat.S_ISDIR(info.st_mode):
            _add_tree(archive, path, limit)
        else:
            raise PermissionError(errno.EACCES, "not a regular file or directory", path)


class _Once(io.RawIOBase):
    """A stream that is written from start to end."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream

    def write(self, data: object) -> int:
        return self._stream.write(data)  # type: ignore[arg-type]


def _add_tree(archive: tarfile.TarFile, top: str, left: int) -> None:
    for directory, names, files in os.walk(top):
        names.sort()
        entry = tarfile.TarInfo(os.path.relpath(directory, top))
        entry.type, entry.mode = tarfile.DIRTYPE, stat.S_IMODE(os.lstat(directory).st_mode)
        archive.addfile(entry)
        left -= 512
        for name in sorted(files):
            path = f"{directory}/{name}"
            if stat.S_ISREG(os.lstat(path).st_mode):
                left = _add(archive, path, os.path.relpath(path, top), left)


def _add(archive: tarfile.TarFile, path: str, name: str, left: int) -> int:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | _OPEN)
    with os.fdopen(fd, "rb") as file:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            return left
        if info.st_size + 512 > left:
            raise OSError(errno.EFBIG, "too many bytes", path)
        entry = tarfile.TarInfo(name)
        entry.size, entry.mode, entry.mtime = info.st_size, stat.S_IMODE(info.st_mode), int(info.st_mtime)
        archive.addfile(entry, file)
    return left - info.st_size - 512
