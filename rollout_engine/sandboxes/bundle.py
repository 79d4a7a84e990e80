"""A tar that somebody else made, into any sandbox: checked as a whole on the host before anything of it goes there."""

from __future__ import annotations

import asyncio
import bz2
import errno
import gzip
import io
import lzma
import os
import posixpath
import shutil
import tarfile
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

from rollout_engine.errors import BadBundle, TooLarge
from rollout_engine.sandboxes.base import MAX_FILES, MAX_READ_BYTES, Sandbox
from rollout_engine.sandboxes.files import remove

_CHUNK_BYTES = 256 * 1024
_ENTRY_BYTES = 2048
"""What an archive may have for each of its files beside their content: heads, and names that do not fit there."""
_OPENERS: dict[bytes, Callable[[IO[bytes]], IO[bytes]]] = {
    b"\x1f\x8b": lambda file: cast(IO[bytes], gzip.GzipFile(fileobj=file)),
    b"BZh": lambda file: cast(IO[bytes], bz2.BZ2File(file)),
    b"\xfd7zXZ": lambda file: cast(IO[bytes], lzma.LZMAFile(file)),  # noqa: SIM115  # holds nothing of its own
}
_END_BYTES = 1024
_IN_THE_WAY = (errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG)
_BROKEN = (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile)


async def upload_bundle(
    sandbox: Sandbox, bundle: Path, path: str, *, max_bytes: int = MAX_READ_BYTES, max_files: int = MAX_FILES
) -> None:
    """Unpacks a tar, plain or compressed by gzip, bzip2 or xz, into the directory `path` of a sandbox.

    Files, directories and links come, with their modes but no owner and no setuid bits; a directory that is there
    gets the bundle's entries. Read piece by piece in a thread. Raises TooLarge, and BadBundle for a name or a link that
    leads out of the bundle, a name that comes twice, a device or a pipe, an archive that is cut; the sandbox has then
    nothing of it.
    """
    scratch, stop = Path(tempfile.mkdtemp(prefix="rollout-bundle-")), threading.Event()
    loop = asyncio.get_running_loop()
    unpacking = loop.run_in_executor(None, unpack, bundle, scratch / "tree", max_bytes, max_files, stop)
    try:
        await asyncio.shield(unpacking)
        await sandbox.upload(scratch / "tree", path)
    finally:
        stop.set()
        await asyncio.shield(asyncio.ensure_future(_clear(unpacking, scratch)))


def unpack(bundle: Path, tree: Path, max_bytes: int, max_files: int, stop: threading.Event | None = None) -> None:
    """Makes the bundle's tree at `tree`, which is not there yet. Blocks; ends soon after `stop` is set."""
    tree.mkdir()
    room = max_bytes + (max_files + 1) * _ENTRY_BYTES
    with bundle.open("rb") as file:
        head = file.read(8)
        file.seek(0)
        opener = next((opener for magic, opener in _OPENERS.items() if head.startswith(magic)), None)
        source = _Bounded(opener(file) if opener else file, room, stop)
        with _as_bad(bundle.name):
            with tarfile.open(fileobj=cast(IO[bytes], source), mode="r|", bufsize=_CHUNK_BYTES) as tar:
                _Unpacking(tree, max_bytes, max_files).run(tar)
            source.check_end()


@contextmanager
def _as_bad(name: str) -> Iterator[None]:
    """What readers of archives raise, and file systems where two members are in each other's way."""
    try:
        yield
    except _BROKEN as error:
        raise BadBundle(f"{name} is no whole tar archive: {error or type(error).__name__}") from error
    except OSError as error:
        if error.errno is None or error.errno in _IN_THE_WAY:
            raise BadBundle(f"{name} cannot be unpacked: {error}") from error
        raise


async def _clear(unpacking: asyncio.Future[None], scratch: Path) -> None:
    await asyncio.wait([unpacking])
    unpacking.exception()  # seen, also where the caller was cancelled
    await asyncio.to_thread(remove, scratch)


class _Bounded(io.RawIOBase):
    """Ends with TooLarge what is longer than `room`, however small it was before it was decompressed."""

    def __init__(self, file: IO[bytes], room: int, stop: threading.Event | None) -> None:
        self._file, self._room, self._stop = file, room, stop
        self._tail = b""

    def read(self, size: int = -1) -> bytes:
        if self._stop is not None and self._stop.is_set():
            raise BadBundle("nobody waits for it any more")
        data = self._file.read(min(size, _CHUNK_BYTES) if size >= 0 else _CHUNK_BYTES)
        self._room -= len(data)
        if self._room < 0:
            raise TooLarge("the bundle is larger than allowed")
        self._tail = (self._tail + data)[-_END_BYTES:]
        return data

    def check_end(self) -> None:
        """An archive ends with zeros; one that was cut between two members looks whole but for that."""
        while self.read():
            continue
        if self._tail != bytes(_END_BYTES):
            raise BadBundle("the bundle is cut: its end is missing")


class _Unpacking:
    """Takes one member after the other. Every directory that leads to one is real: nothing goes through a link."""

    def __init__(self, tree: Path, max_bytes: int, max_files: int) -> None:
        self._tree, self._max_bytes, self._max_files = tree, max_bytes, max_files
        self._links: set[str] = set()
        self._bytes = 0

    def run(self, tar: tarfile.TarFile) -> None:
        for count, member in enumerate(tar):
            if count >= self._max_files:
                raise TooLarge(f"the bundle has more than {self._max_files} files")
            self._take(tar, member)

    def _take(self, tar: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        name = _inside(member.name)
        place = self._place(name)
        if member.isdir():
            place.mkdir(parents=True, exist_ok=True)
            place.chmod(member.mode & 0o777 | 0o700)
            return
        if name == "." or os.path.lexists(place):
            raise BadBundle(f"{member.name!r:.200} comes twice")
        place.parent.mkdir(parents=True, exist_ok=True)
        if member.isreg():
            self._write(tar, member, place)
        elif member.issym():
            _check_link(name, member.linkname)
            self._links.add(name)
            place.symlink_to(member.linkname)
        elif member.islnk():
            self._copy(member, place)
        else:
            raise BadBundle(f"{member.name!r:.200} is neither file, directory nor link")

    def _place(self, name: str) -> Path:
        parent = posixpath.dirname(name)
        while parent:
            if parent in self._links:
                raise BadBundle(f"{name!r:.200} leads through a link")
            parent = posixpath.dirname(parent)
        if name in self._links:
            raise BadBundle(f"{name!r:.200} comes twice")
        return self._tree / name

    def _write(self, tar: tarfile.TarFile, member: tarfile.TarInfo, place: Path) -> None:
        self._count(member.size)
        content = tar.extractfile(member)
        with place.open("xb") as file:
            if content is not None:
                shutil.copyfileobj(content, file, _CHUNK_BYTES)
        place.chmod(member.mode & 0o777 | 0o600)

    def _copy(self, member: tarfile.TarInfo, place: Path) -> None:
        """Another name of a file that came before: counted as the file that it becomes in the sandbox."""
        earlier = self._place(_inside(member.linkname))
        if not earlier.is_file() or earlier.is_symlink():
            raise BadBundle(
                f"{member.name!r:.200} is a hard link to {member.linkname!r:.200}, which did not come before"
            )
        self._count(earlier.stat().st_size)
        shutil.copy(earlier, place)

    def _count(self, size: int) -> None:
        self._bytes += size
        if self._bytes > self._max_bytes:
            raise TooLarge(f"the bundle has more than {self._max_bytes} bytes")


def _inside(name: str) -> str:
    """The normal form of a relative name that stays in the tree; `.` for the tree itself."""
    if name.startswith("/") or "\0" in name or ".." in name.split("/"):
        raise BadBundle(f"{name!r:.200} leads out of the bundle")
    return posixpath.normpath(name or ".")


def _check_link(name: str, target: str) -> None:
    """Relative, and `..` at its beginning only: what leads to it is real directories, so it is known where that is."""
    parts = target.split("/")
    up = 0
    while up < len(parts) and parts[up] in ("..", "."):
        up += 1
    climbed = parts[:up].count("..")
    if not target or target.startswith("/") or ".." in parts[up:] or climbed > name.count("/"):
        raise BadBundle(f"the link {name!r:.200} leads to {target!r:.200}, out of the bundle")
