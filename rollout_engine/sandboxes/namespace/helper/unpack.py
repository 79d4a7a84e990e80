"""Unpacks an archive from standard input into a directory that it makes its root first: no name leads out of it.

A process of its own, started as `python -I -S -c ... main(...)` by the engine. Says how many bytes it takes; ends with
ENOSPC as its exit code where the disk is full.
"""

from __future__ import annotations

import bz2
import contextlib
import errno
import gzip
import lzma
import os
import shutil
import sys as python
import tarfile

from rollout_engine.sandboxes.namespace.helper import syscalls as sys

_MODULES = (bz2, gzip, lzma)
"""tarfile imports these when it needs them, which would be too late."""
_GONE, _OPAQUE = ".wh.", ".wh..wh..opq"
_BLOCK = 4096


class Refused(Exception):
    """The archive is not unpacked; the text says why."""


class _Member(tarfile.TarInfo):
    """An archive that ends without its end mark was cut, however well its last file came through."""

    @classmethod
    def fromtarfile(cls, tarfile: tarfile.TarFile) -> _Member:
        try:
            return super().fromtarfile(tarfile)
        except _EMPTY as error:
            raise Refused("the archive is cut: its end is missing") from error


_EMPTY: type[Exception] = tarfile.EmptyHeaderError  # type: ignore[attr-defined]


def main(target: str, owner: int, alone: int, whiteouts: int, max_bytes: int, max_entries: int) -> None:
    """`owner` is what id 0 of the archive becomes; where it is `alone` everything belongs to it.

    With `whiteouts` it is a layer of an image: marks in it remove what lower ones brought.
    """
    try:
        _lock_in(target)
        os.umask(0)
        with tarfile.open(fileobj=python.stdin.buffer, mode="r|*", tarinfo=_Member) as archive:
            size = _Unpacking(owner, max_bytes, max_entries, alone=bool(alone), whiteouts=bool(whiteouts)).run(archive)
        os.sync()  # what is found there later has been written, also if the machine fails
    except (Refused, OSError, EOFError, ValueError, KeyError, tarfile.TarError, lzma.LZMAError) as error:
        python.stderr.write(f"{error or type(error).__name__}\n")
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        python.exit(errno.ENOSPC if full else 1)
    python.stdout.write(str(size))


class _Unpacking:
    def __init__(self, owner: int, max_bytes: int, max_entries: int, *, alone: bool, whiteouts: bool) -> None:
        self._alone, self._owner, self._max_bytes, self._max_entries, self._whiteouts = (
            alone,
            owner,
            max_bytes,
            max_entries,
            whiteouts,
        )
        self._made: set[str] = set()
        self._trusted = {"filter": "fully_trusted"} if hasattr(tarfile, "data_filter") else {}

    def run(self, archive: tarfile.TarFile) -> int:
        size = 0
        for count, member in enumerate(archive, 1):
            size += member.size + _BLOCK
            if size > self._max_bytes:
                raise Refused(f"it takes more than the {self._max_bytes} bytes that unpacked roots may have")
            if count > self._max_entries:
                raise Refused(f"it has more than {self._max_entries} files")
            self._take(archive, member)
        return size

    def _take(self, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        """Devices and pipes stay out; so do the bits that make a program run as somebody else, here or in a box."""
        member.name = os.path.normpath("/" + member.name).lstrip("/")
        if not member.name or member.ischr() or member.isblk() or member.isfifo():
            return
        if self._whiteouts:
            if os.path.basename(member.name).startswith(_GONE):
                self._remove(member.name)
                return
            self._made.add(member.name)
        _make_way(member)
        if not member.isdir():
            member.mode &= ~0o6000
        member.uname = member.gname = ""
        if self._alone:
            member.uid = member.gid = self._owner
            member.mode |= 0o700 if member.isdir() else 0o400
        else:
            member.uid, member.gid = member.uid + self._owner, member.gid + self._owner
        archive.extract(member, "/", numeric_owner=True, **self._trusted)  # type: ignore[arg-type]

    def _remove(self, mark: str) -> None:
        folder, name = os.path.split(mark)
        if name != _OPAQUE:
            _delete(f"/{folder}/{name.removeprefix(_GONE)}")
            return
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for below in os.listdir(f"/{folder}"):
                if os.path.join(folder, below) not in self._made:
                    _delete(f"/{folder}/{below}")


def _make_way(member: tarfile.TarInfo) -> None:
    """What is in the place of an entry goes, unless both are directories: nothing is written through a link."""
    path = f"/{member.name}"
    if os.path.lexists(path) and not (member.isdir() and os.path.isdir(path) and not os.path.islink(path)):
        _delete(path)


def _delete(path: str) -> None:
    if os.path.basename(path) in ("", ".", ".."):
        raise Refused(f"a mark of removal names {path!r:.100}")
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.unlink(path)


def _lock_in(target: str) -> None:
    if os.geteuid() != 0:
        uid, gid = os.getuid(), os.getgid()
        sys.unshare(sys.CLONE_NEWUSER)
        for path, text in (("setgroups", "deny"), ("gid_map", f"{gid} {gid} 1"), ("uid_map", f"{uid} {uid} 1")):
            with open(f"/proc/self/{path}", "w") as file:
                file.write(text)
    os.chroot(target)
    os.chdir("/")
