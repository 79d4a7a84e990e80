"""What was at some paths of a container, as a tar on this host. Blocking: called in the engine's pool.

Files, folders and links come, links as links; whatever else there is stays behind. The tar has no name on this
host: it goes with this process, however that ends.
"""

from __future__ import annotations

import contextlib
import posixpath
import tarfile
import tempfile
from collections.abc import Collection, Mapping, Sequence
from typing import IO, Any, cast

from docker import APIClient
from docker.errors import APIError

from rollout_engine.errors import TooLarge
from rollout_engine.sandboxes.base import EVERYTHING, SNAPSHOT, SandboxSpec
from rollout_engine.sandboxes.docker import files, mounted, supply
from rollout_engine.sandboxes.docker.body import SCRATCH

_MOUNTED = ("/etc/resolv.conf", "/etc/hosts", "/etc/hostname", "/.dockerenv")
_MOUNTS = ("/dev", "/proc", "/sys", supply.FOLDER, mounted.FOLDER)
_PROGRAMS = ("/bin", "/sbin", "/usr", "/lib", "/lib32", "/lib64", "/libx32")
_START = ("/etc/ld", "/etc/alternatives", "/etc/profile", "/etc/python", "/etc/environment", "/etc/bash")
"""What the loader, shells and Python read at their start, by its beginning."""
_XATTR = "SCHILY.xattr."
_DELETED = 2
_UNBOUNDED = 2**62


class Layer:
    """`gone`: what a container loses before the tar comes over it."""

    def __init__(self) -> None:
        self.gone: list[str] = []
        self.file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # `close` ends it

    def reader(self) -> IO[bytes]:
        """A view of its own, which stays when the layer goes."""
        return open(f"/proc/self/fd/{self.file.fileno()}", "rb")

    def close(self) -> None:
        self.file.close()


def take(api: APIClient, container: str, paths: Sequence[str], spec: SandboxSpec, root: str = "/") -> Layer:
    """`paths` are absolute, or EVERYTHING, or SNAPSHOT. Raises TooLarge above the limits of the spec's disk.

    The tar's names are relative to `root`, which is no entry itself.
    """
    layer = Layer()
    try:
        with tarfile.open(fileobj=layer.file, mode="w", format=tarfile.PAX_FORMAT) as tar:
            taking = _Taking(api, container, layer, tar, spec, root)
            for path in paths:
                if path in (EVERYTHING, SNAPSHOT):
                    taking.changes(snapshot=path == SNAPSHOT)
                else:
                    taking.whole(path)
        layer.file.flush()
    except BaseException:
        layer.close()
        raise
    return layer


def put(api: APIClient, container: str, layer: IO[bytes], root: str = "/") -> None:
    """Whatever is in the way of an entry makes room for it."""
    files.send(api, container, root, layer, replace=True)


def fill(api: APIClient, container: str, image: str, spec: SandboxSpec, labels: Mapping[str, str]) -> None:
    """Gives a limited disk, whose volumes start empty, what the image has in their places."""
    host = api.create_host_config(network_mode="none")
    bare = api.create_container(image, ["-"], labels=dict(labels), host_config=host)["Id"]
    try:
        for folder in (spec.workdir, SCRATCH):
            layer = take(api, bare, [folder], spec, root=folder)
            with contextlib.closing(layer), layer.reader() as file:
                put(api, container, file, root=folder)
    finally:
        api.remove_container(bare, force=True)


class _Taking:
    def __init__(
        self, api: APIClient, container: str, layer: Layer, tar: tarfile.TarFile, spec: SandboxSpec, root: str
    ) -> None:
        self._api, self._container, self._layer, self._tar, self._spec = api, container, layer, tar, spec
        self._root = root
        self._room, self._entries = spec.disk_bytes, spec.inodes
        self._regular: set[str] = set()

    def whole(self, path: str) -> None:
        self._layer.gone.append(path)
        self._fetch(path, None)

    def changes(self, *, snapshot: bool) -> None:
        """By the daemon's own list; what lies on a limited disk is not on it, and comes whole."""
        if self._spec.require_limits:
            for path in (self._spec.workdir, SCRATCH):
                self.whole(path)
        changed: dict[str, set[str]] = {}
        for change in cast("Any", self._api).diff(self._container) or []:
            path, top = change["Path"], change["Path"].split("/")[1]
            if _stays(path, snapshot):
                continue
            changed.setdefault(top, set()).add(path)
            if change["Kind"] == _DELETED and not (snapshot and path == "/etc"):
                self._layer.gone.append(path)
        for paths in changed.values():
            self._changed(paths, only_folders={"/etc"} if snapshot else set())

    def _changed(self, paths: set[str], only_folders: Collection[str]) -> None:
        """All below their nearest common folder at once, and what leads there by itself."""
        inner = {posixpath.dirname(path) for path in paths}
        common = posixpath.commonpath([path for path in paths if path not in inner])
        above = common
        chain: list[str] = []
        while (above := posixpath.dirname(above)) != "/":
            chain.insert(0, above)
        for path in chain:
            if path in paths:
                self._fetch(path, {path}, first=True, only_folders=only_folders)
        self._fetch(common, paths, only_folders=only_folders)

    def _fetch(
        self, path: str, wanted: Collection[str] | None, *, first: bool = False, only_folders: Collection[str] = ()
    ) -> None:
        """Nothing where there is nothing. `first`: only the entry of `path` itself."""
        parent = posixpath.dirname(path)
        try:
            with files.archive(self._api, self._container, path, _UNBOUNDED) as tar:
                for entry in tar:
                    name = posixpath.normpath(posixpath.join(parent, entry.name))
                    if (wanted is None or name in wanted) and (entry.isdir() or name not in only_folders):
                        self._add(tar, entry, name, parent)
                    if first:
                        return
        except FileNotFoundError:
            return
        except APIError as error:
            if error.status_code != 500 or files.can_be(self._api, self._container, path):
                raise

    def _add(self, tar: tarfile.TarFile, entry: tarfile.TarInfo, name: str, parent: str) -> None:
        if name == self._root:
            return
        self._room -= entry.size
        self._entries -= 1
        if self._room < 0:
            raise TooLarge(f"the export is larger than {self._spec.disk_bytes} bytes")
        if self._entries < 0:
            raise TooLarge(f"the export has more than {self._spec.inodes} files")
        entry.pax_headers = {key: value for key, value in entry.pax_headers.items() if key.startswith(_XATTR)}
        entry.name, entry.uname, entry.gname = posixpath.relpath(name, self._root), "", ""
        if entry.isreg():
            self._regular.add(name)
            self._tar.addfile(entry, tar.extractfile(entry))
        elif entry.islnk():
            target = posixpath.normpath(posixpath.join(parent, entry.linkname))
            if target in self._regular:
                entry.linkname = posixpath.relpath(target, self._root)
                self._tar.addfile(entry)
        elif entry.isdir() or entry.issym():
            self._tar.addfile(entry)


def _stays(path: str, snapshot: bool) -> bool:
    """Whether a changed path is no part of what comes along."""
    if path in _MOUNTED or _below(path, _MOUNTS):
        return True
    return snapshot and (_below(path, _PROGRAMS) or path.startswith(_START))


def _below(path: str, folders: Sequence[str]) -> bool:
    return any(path == folder or path.startswith(folder + "/") for folder in folders)
