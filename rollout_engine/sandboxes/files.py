"""Bounded file work on the host's file system. Blocking: for threads."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rollout_engine.errors import TooLarge

_CHUNK = 1 << 20
_NO_SUCH_PATH = frozenset({errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP})


@contextmanager
def plain_errors(path: str) -> Iterator[None]:
    """The three errors that a caller of a sandbox expects, whatever the file system said."""
    if "\0" in path:
        raise FileNotFoundError(errno.ENOENT, "a path with a null byte", path)
    try:
        yield
    except OSError as error:
        if error.errno in _NO_SUCH_PATH:
            raise FileNotFoundError(errno.ENOENT, os.strerror(error.errno or 0), path) from error
        if error.errno == errno.ENXIO:  # a FIFO or socket that nobody reads
            raise PermissionError(errno.EPERM, "not a regular file", path) from error
        raise


def read_file(path: str, max_bytes: int) -> bytes:
    """A regular file's content. Raises TooLarge above `max_bytes`."""
    with plain_errors(path), _open_regular(path) as file:
        size = os.fstat(file).st_size
        data = b"" if size > max_bytes else _read_up_to(file, max_bytes + 1)
    if size > max_bytes or len(data) > max_bytes:
        raise TooLarge(f"{path} has more than {max_bytes} bytes")
    return data


def write_file(path: str, data: bytes, mode: int) -> None:
    """Writes a whole file with exactly this mode, and makes its parents."""
    with plain_errors(path):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_CLOEXEC, mode)
        with _closing(file):
            os.fchmod(file, mode)
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(file, rest[:_CHUNK]) :]


def copy_in(source: Path, path: str) -> None:
    """Copies a file or directory to `path`; a directory that is there already gets the source's entries."""
    with plain_errors(path):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, path, symlinks=True, dirs_exist_ok=True)
        elif os.path.isdir(path):
            raise IsADirectoryError(errno.EISDIR, "is a directory", path)
        else:
            shutil.copy2(source, path)


def copy_out(path: str, target: Path, max_bytes: int, max_files: int) -> None:
    """Copies a regular file, or the files and directories below a directory; links and devices are left out.

    Raises TooLarge above `max_bytes` or `max_files` in all, PermissionError where `path` itself is a link or a device.
    """
    with plain_errors(path):
        kind = os.lstat(path).st_mode
        if not (stat.S_ISDIR(kind) or stat.S_ISREG(kind)):
            raise PermissionError(errno.EPERM, "neither a regular file nor a directory", path)
        with arriving(target) as place:
            if stat.S_ISDIR(kind):
                _copy_tree(path, place, max_bytes, max_files)
            else:
                _copy_file(path, place, max_bytes)


@contextmanager
def arriving(target: Path) -> Iterator[Path]:
    """A place beside `target` for what is to be there. It goes there when the block ends well, else nothing does.

    A directory adds to one that is there, a file takes the place of a file.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".rollout-arriving-", dir=target.parent))
    try:
        yield scratch / "whole"
        _move(scratch / "whole", target)
    finally:
        remove(scratch)


def _move(source: Path, target: Path) -> None:
    if not (source.is_dir() and target.is_dir()):
        source.replace(target)
        return
    for entry in source.iterdir():
        _move(entry, target / entry.name)


def remove(path: Path) -> None:
    """Removes a file or a tree, also one whose directories forbid it; says nothing where it cannot."""
    with contextlib.suppress(OSError):
        if not path.is_dir() or path.is_symlink():
            path.unlink(missing_ok=True)
            return
        if os.geteuid() != 0:
            _make_removable(path)
        shutil.rmtree(path, ignore_errors=True)


def _make_removable(path: Path) -> None:
    os.chmod(path, 0o700)
    for folder, names, _ in os.walk(path):
        for name in names:
            below = os.path.join(folder, name)
            if not os.path.islink(below):
                with contextlib.suppress(OSError):
                    os.chmod(below, 0o700)


def _copy_tree(path: str, target: Path, max_bytes: int, max_files: int) -> None:
    waiting, count = [(path, target)], 0
    while waiting:
        folder, into = waiting.pop()
        into.mkdir(exist_ok=True)
        with os.scandir(folder) as entries:
            for entry in entries:
                count += 1
                if count > max_files:
                    raise TooLarge(f"{path} has more than {max_files} files and directories")
                if entry.is_dir(follow_symlinks=False):
                    waiting.append((entry.path, into / entry.name))
                elif entry.is_file(follow_symlinks=False):
                    max_bytes -= _copy_file(entry.path, into / entry.name, max_bytes)


def _copy_file(path: str, target: Path, max_bytes: int) -> int:
    """Copies at most `max_bytes`, and returns how many; TooLarge where there are more."""
    copied = 0
    with _open_regular(path, os.O_NOFOLLOW) as file:
        mode = stat.S_IMODE(os.fstat(file).st_mode) & 0o777
        with open(target, "wb") as out:
            while chunk := os.read(file, min(_CHUNK, max_bytes - copied + 1)):
                copied += len(chunk)
                if copied > max_bytes:
                    raise TooLarge(f"{path} is larger than the bytes left for this copy ({max_bytes})")
                out.write(chunk)
            os.fchmod(out.fileno(), mode | 0o600)
    return copied


@contextmanager
def _open_regular(path: str, flags: int = 0) -> Iterator[int]:
    # Non-blocking, as the open of a FIFO would wait for its writer.
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | flags)
    with _closing(file):
        kind = os.fstat(file).st_mode
        if stat.S_ISDIR(kind):
            raise IsADirectoryError(errno.EISDIR, "is a directory", path)
        if not stat.S_ISREG(kind):
            raise PermissionError(errno.EPERM, "not a regular file", path)
        yield file


@contextmanager
def _closing(file: int) -> Iterator[None]:
    try:
        yield
    finally:
        os.close(file)


def _read_up_to(file: int, size: int) -> bytes:
    chunks = []
    while size > 0 and (chunk := os.read(file, min(size, _CHUNK))):
        chunks.append(chunk)
        size -= len(chunk)
    return b"".join(chunks)
