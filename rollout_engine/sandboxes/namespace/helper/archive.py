"""A tree of files as a stream, between a host and a box; neither side trusts what it reads.

Each entry is a head (kind, mode, length of the name, size), the name and the content. Less than a tar can say,
so that there is less to get wrong: directories, regular files and, into a box only, links as they are.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import struct
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

_HEAD = struct.Struct("<BIHQ")
_END, _DIRECTORY, _FILE, _LINK = range(4)
_CHUNK = 2**20
_MAX_NAME = 4096


class TooMuch(Exception):
    """The tree is larger than the caller allows."""


class _Entry(NamedTuple):
    kind: int
    mode: int
    name: str
    size: int


def write(stream: BinaryIO, path: str, limit: int, entries: int, *, links: bool) -> None:
    """Streams a file or directory; what is neither, or a link where they are not wanted, is left out."""
    left = limit
    for count, name in enumerate(_walk(path)):
        if count > entries:
            raise TooMuch(f"{path} has more than {entries} files and directories")
        left = _write_entry(stream, os.path.join(path, name) if name else path, name, left, links)
    _put(stream, _Entry(_END, 0, "", 0))
    stream.flush()


def _walk(top: str) -> Iterator[str]:
    """Names below `top`, parents first; the empty one is `top` itself."""
    waiting = [""]
    while waiting:
        name = waiting.pop()
        yield name
        path = os.path.join(top, name) if name else top
        if stat.S_ISDIR(os.lstat(path).st_mode):
            waiting.extend(os.path.join(name, below) for below in sorted(os.listdir(path), reverse=True))


def _write_entry(stream: BinaryIO, path: str, name: str, left: int, links: bool) -> int:
    info = os.lstat(path)
    mode = stat.S_IMODE(info.st_mode)
    if stat.S_ISDIR(info.st_mode):
        _put(stream, _Entry(_DIRECTORY, mode, name, 0))
    elif stat.S_ISREG(info.st_mode):
        left -= _write_file(stream, path, name, left)
    elif stat.S_ISLNK(info.st_mode) and links:
        target = os.fsencode(os.readlink(path))
        _put(stream, _Entry(_LINK, mode, name, len(target)))
        stream.write(target)
    elif not name:
        raise PermissionError(errno.EACCES, "neither a regular file nor a directory", path)
    return left


def _write_file(stream: BinaryIO, path: str, name: str, left: int) -> int:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb", buffering=0) as file:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise PermissionError(errno.EACCES, "not a regular file", path)
        if info.st_size > left:
            raise TooMuch(f"{path}: {info.st_size} bytes are more than the {left} that are left")
        _put(stream, _Entry(_FILE, stat.S_IMODE(info.st_mode), name, info.st_size))
        rest = info.st_size
        while rest:
            chunk = file.read(min(_CHUNK, rest)) or bytes(min(_CHUNK, rest))  # zeros, where it was cut meanwhile
            stream.write(chunk)
            rest -= len(chunk)
    return info.st_size


def _put(stream: BinaryIO, entry: _Entry) -> None:
    name = os.fsencode(entry.name)
    stream.write(_HEAD.pack(entry.kind, entry.mode, len(name), entry.size) + name)


def read(stream: BinaryIO, path: str, limit: int, entries: int, *, links: bool) -> None:
    """Makes the streamed tree at `path`. Raises TooMuch, and OSError for a stream that is no such tree."""
    left, count = limit, -1  # the top itself is none of its entries
    while (entry := _next(stream)).kind != _END:
        count += 1
        left -= entry.size
        if count > entries or left < 0:
            raise TooMuch(f"more than {limit} bytes or {entries} files and directories")
        target = _place(path, entry.name)
        if entry.kind == _DIRECTORY:
            with contextlib.suppress(FileExistsError):
                os.mkdir(target)
        elif entry.kind == _FILE:
            _read_file(stream, target, entry)
        elif entry.kind == _LINK and links and entry.size <= _MAX_NAME:
            _replace_by_link(target, _exactly(stream, entry.size))
        else:
            raise OSError(errno.EBADMSG, "no such kind of entry", entry.name)


def _next(stream: BinaryIO) -> _Entry:
    kind, mode, length, size = _HEAD.unpack(_exactly(stream, _HEAD.size))
    if length > _MAX_NAME:
        raise OSError(errno.ENAMETOOLONG, "a name is too long")
    return _Entry(kind, mode & 0o7777, os.fsdecode(_exactly(stream, length)), size)


def _place(path: str, name: str) -> str:
    """Where an entry goes: below `path`, whatever the stream says."""
    parts = name.split("/")
    if not name:
        return path
    if "\0" in name or any(part in ("", ".", "..") for part in parts):
        raise OSError(errno.EBADMSG, "a name leads out of the tree", name)
    return os.path.join(path, *parts)


def _read_file(stream: BinaryIO, target: str, entry: _Entry) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    if os.path.islink(target):
        os.unlink(target)
    with os.fdopen(os.open(target, flags, 0o600), "wb", buffering=0) as file:
        rest = entry.size
        while rest:
            chunk = _exactly(stream, min(rest, _CHUNK))
            view = memoryview(chunk)
            while view:
                view = view[file.write(view) :]
            rest -= len(chunk)
        os.fchmod(file.fileno(), entry.mode & 0o777 | 0o600)


def _replace_by_link(target: str, content: bytes) -> None:
    if os.path.lexists(target):
        os.unlink(target)
    os.symlink(content, os.fsencode(target))


def _exactly(stream: BinaryIO, size: int) -> bytes:
    data = stream.read(size)
    if len(data) != size:
        raise OSError(errno.EPIPE, "the stream ended early")
    return data
