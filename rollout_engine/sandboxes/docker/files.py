"""Files in and out of a container by the Engine's archive API. Blocking: called in the engine's pool.

The daemon resolves links inside the container's own root. What comes out is untrusted: only regular files and
folders are made on the host, by names checked here, within bounds on bytes and entries.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import posixpath
import shutil
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, NamedTuple, TypeAlias

from docker import APIClient
from docker.errors import APIError, NotFound, create_api_error_from_http_exception
from requests.exceptions import HTTPError

from rollout_engine.errors import TooLarge
from rollout_engine.sandboxes.files import arriving

_HEADER_BYTES = 64 * 2**20
_CHUNK_BYTES = 256 * 1024
_SPOOL_BYTES = 8 * 2**20
_MAX_LINKS = 40
_GO_DIR, _GO_SYMLINK = 1 << 31, 1 << 27
_GO_SPECIAL = 1 << 26 | 1 << 25 | 1 << 24 | 1 << 21 | 1 << 19  # device, pipe, socket, character device, irregular


_Fill: TypeAlias = Callable[[tarfile.TarFile, str], None]
"""Puts the content into an archive, under a name."""


class Ids(NamedTuple):
    """Who owns what is written."""

    uid: int = 0
    gid: int = 0


class _Stat(NamedTuple):
    path: str
    size: int
    mode: int


def read(api: APIClient, container: str, path: str, max_bytes: int) -> bytes:
    """The bytes of the regular file that a path leads to."""
    found = _stat(api, container, path)
    if found.mode & _GO_DIR:
        raise IsADirectoryError(f"{path} is a directory")
    if found.mode & _GO_SPECIAL:
        raise PermissionError(f"{path} is no regular file")
    if found.size > max_bytes:
        raise TooLarge(f"{path} has {found.size} bytes, more than the {max_bytes} allowed")
    with archive(api, container, found.path, max_bytes) as tar:
        member = tar.next()
        content = tar.extractfile(member) if member is not None and member.isreg() else None
        if content is None:
            raise FileNotFoundError(f"{path} changed while it was read")
        return content.read(max_bytes)


def write(api: APIClient, container: str, path: str, data: bytes, mode: int, ids: Ids) -> None:
    """Writes a whole file and makes its parents; a link of that name is replaced."""
    with contextlib.suppress(FileNotFoundError):
        if _stat(api, container, path).mode & _GO_DIR:
            raise IsADirectoryError(f"{path} is a directory")

    def fill(tar: tarfile.TarFile, name: str) -> None:
        entry = _own(tarfile.TarInfo(name), ids)
        entry.size, entry.mode = len(data), mode
        tar.addfile(entry, io.BytesIO(data))

    _put(api, container, path, fill, ids)


def make_folder(api: APIClient, container: str, path: str, ids: Ids) -> None:
    """A folder that belongs to `ids`, also where it exists."""

    def fill(tar: tarfile.TarFile, name: str) -> None:
        entry = _own(tarfile.TarInfo(name), ids)
        entry.type, entry.mode = tarfile.DIRTYPE, 0o755
        tar.addfile(entry)

    _put(api, container, path, fill, ids)


def upload(api: APIClient, container: str, source: Path, path: str, ids: Ids) -> None:
    """Copies a host's file or folder in. Links stay links, so nothing outside `source` is read."""

    def only_plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        if not (entry.isreg() or entry.isdir() or entry.issym() or entry.islnk()):
            raise ValueError(f"{source}: {entry.name} is neither file, folder nor link")
        return _own(entry, ids)

    def fill(tar: tarfile.TarFile, name: str) -> None:
        tar.add(source.resolve(strict=True), arcname=name or ".", filter=only_plain)

    _put(api, container, path, fill, ids)


def download(api: APIClient, container: str, path: str, target: Path, max_bytes: int, max_files: int) -> None:
    """Copies a file or folder out; links and special files are left behind, a link at `path` itself is refused."""
    with archive(api, container, path, max_bytes) as tar, arriving(target) as place:
        room = max_bytes
        for count, entry in enumerate(tar):
            if count > max_files:
                raise TooLarge(f"{path} holds more than {max_files} files and folders")
            if count == 0 and not (entry.isreg() or entry.isdir()):
                raise PermissionError(f"{path} is neither a regular file nor a directory")
            earlier = _earlier(entry, place)
            room -= entry.size if earlier is None else earlier.stat().st_size
            if room < 0:
                raise TooLarge(f"{path} is larger than the {max_bytes} bytes allowed")
            _unpack(tar, entry, place, earlier)


def _earlier(entry: tarfile.TarInfo, target: Path) -> Path | None:
    """The file that came already and that a hard link is another name of."""
    found = _within(target, entry.linkname) if entry.islnk() else None
    return found if found is not None and found.is_file() and not found.is_symlink() else None


def _unpack(tar: tarfile.TarFile, entry: tarfile.TarInfo, target: Path, earlier: Path | None) -> None:
    place = _within(target, entry.name)
    if entry.isdir():
        place.mkdir(parents=True, exist_ok=True)
    elif entry.isreg():
        place.parent.mkdir(parents=True, exist_ok=True)
        content = tar.extractfile(entry)
        if content is not None:
            with place.open("wb") as file:
                shutil.copyfileobj(content, file, _CHUNK_BYTES)
            place.chmod(0o600 | entry.mode & 0o755)
    elif earlier is not None:
        shutil.copy(earlier, place)


def _within(target: Path, name: str) -> Path:
    """Where an entry goes: below `target`, which stands for the archive's first component."""
    parts = posixpath.normpath(name).split("/")
    if name.startswith("/") or ".." in parts:
        raise ValueError(f"the archive names {name!r}, outside of itself")
    return target.joinpath(*parts[1:])


def _stat(api: APIClient, container: str, path: str) -> _Stat:
    """What a path leads to, its links followed (the daemon follows all but the last)."""
    for _ in range(_MAX_LINKS):
        response = api.head(_url(api, container), params={"path": path}, timeout=api.timeout)
        if response.status_code == 404:
            raise _absent(api, container, path)
        if response.status_code == 500:  # a file where a folder should be; a container that is gone answers 404
            raise FileNotFoundError(f"{path} cannot be reached")
        _check(response.raise_for_status)
        found = json.loads(base64.b64decode(response.headers["X-Docker-Container-Path-Stat"]))
        if not found["mode"] & _GO_SYMLINK:
            return _Stat(path, int(found["size"]), int(found["mode"]))
        path = posixpath.join(posixpath.dirname(path), found["linkTarget"])
    raise FileNotFoundError(f"{path}: too many levels of links")


def can_be(api: APIClient, container: str, path: str) -> bool:
    """Whether all that leads to a path is folders."""
    while (path := posixpath.dirname(path)) != "/":
        try:
            if not _stat(api, container, path).mode & _GO_DIR:
                return False
        except FileNotFoundError:
            return False
    return True


@contextlib.contextmanager
def archive(api: APIClient, container: str, path: str, max_bytes: int) -> Iterator[tarfile.TarFile]:
    """What is at a path, its own name first; links below it, and itself, are not followed."""
    try:
        chunks, _ = api.get_archive(container, path, chunk_size=_CHUNK_BYTES)
    except NotFound as error:
        raise _absent(api, container, path) from error
    with contextlib.closing(chunks):
        reader = io.BufferedReader(_Chunks(chunks, max_bytes + _HEADER_BYTES, path), _CHUNK_BYTES)
        with tarfile.open(fileobj=reader, mode="r|", bufsize=_CHUNK_BYTES) as tar:
            yield tar


class _Chunks(io.RawIOBase):
    """The daemon's chunks as a file that refuses to be longer than `limit`."""

    def __init__(self, chunks: Iterable[bytes], limit: int, path: str) -> None:
        self._chunks, self._room, self._path = iter(chunks), limit, path
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]  # only ever called by BufferedReader
        if not self._rest:
            self._rest = memoryview(next(self._chunks, b""))
            self._room -= len(self._rest)
            if self._room < 0:
                raise TooLarge(f"{self._path} has more bytes than allowed")
        count = min(len(buffer), len(self._rest))
        buffer[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count


def _put(api: APIClient, container: str, path: str, fill: _Fill, ids: Ids) -> None:
    """Sends an archive to the deepest folder on the way to `path` that exists, with entries for the rest."""
    folder, name = posixpath.split(posixpath.normpath(posixpath.join("/", path)))
    missing: list[str] = []
    while True:
        try:
            with _packed(missing, name, fill, ids) as spool:
                send(api, container, folder, spool)
            return
        except NotFound:
            if folder == "/":
                raise
            folder, last = posixpath.split(folder)
            missing.insert(0, last)


@contextlib.contextmanager
def _packed(missing: list[str], name: str, fill: _Fill, ids: Ids) -> Iterator[IO[bytes]]:
    with tempfile.SpooledTemporaryFile(max_size=_SPOOL_BYTES) as spool:
        with tarfile.open(fileobj=spool, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for depth in range(len(missing)):
                entry = _own(tarfile.TarInfo("/".join(missing[: depth + 1])), ids)
                entry.type, entry.mode = tarfile.DIRTYPE, 0o755
                tar.addfile(entry)
            fill(tar, "/".join([*missing, name]))
        spool.seek(0)
        yield spool


def send(api: APIClient, container: str, folder: str, spool: IO[bytes], *, replace: bool = False) -> None:
    """`replace`: a folder may take the place of a file, and the other way round."""
    options = {"path": folder, "noOverwriteDirNonDir": "" if replace else "1"}
    response = api.put(_url(api, container), params=options, data=spool, timeout=api.timeout)
    try:
        _check(response.raise_for_status)
    except NotFound:
        raise
    except APIError as error:
        if error.status_code in (400, 500):  # a full disk, or a file and a directory in each other's way
            raise OSError(f"{folder}: {error.explanation}") from error
        raise


def _absent(api: APIClient, container: str, path: str) -> FileNotFoundError:
    """The daemon says 404 for both: raises NotFound where it is the container that is gone."""
    api.inspect_container(container)
    return FileNotFoundError(f"{path} does not exist")


def _check(raise_for_status: Callable[[], None]) -> None:
    try:
        raise_for_status()
    except HTTPError as error:
        create_api_error_from_http_exception(error)


def _url(api: APIClient, container: str) -> str:
    return f"{api.base_url}/v{api.api_version}/containers/{container}/archive"


def _own(entry: tarfile.TarInfo, ids: Ids) -> tarfile.TarInfo:
    entry.uid, entry.gid, entry.uname, entry.gname = ids.uid, ids.gid, "", ""
    entry.mtime = int(time.time())
    return entry
