"""Where boxes' roots come from: an image or a tar, unpacked once per node and kept by its digest, or a directory."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import os
import subprocess
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, cast

from rollout_engine.errors import SandboxStartError, SandboxUnavailable
from rollout_engine.sandboxes.base import SandboxSpec
from rollout_engine.sandboxes.imagefile import ImageFile, is_layout, open_image
from rollout_engine.sandboxes.namespace import isolated
from rollout_engine.sandboxes.namespace.cache import MAX_CACHE_BYTES, Hold, RootCache

MAX_ROOT_ENTRIES = 2_000_000
"""Files of one root."""
EXPORT_S = 600
"""So long the Docker Engine may say nothing while it exports an image."""
UNPACKER = "rollout_engine.sandboxes.namespace.helper.unpack"
_CHUNK = 2**20
_TRIES = 3
_Key: TypeAlias = tuple[object, ...]


class Owner(NamedTuple):
    """Whose the files of a root become: id 0's of the archive, or, where `alone`, everybody's."""

    id: int
    alone: bool

    @property
    def name(self) -> str:
        return f"{self.id}{'.alone' if self.alone else ''}"


class Root(NamedTuple):
    """A directory on this node, and what its image says of environment and user. Whoever got it releases it."""

    directory: str
    env: dict[str, str]
    user: str | None
    release: Callable[[], None]


class Sources:
    """Unpacked images and archives of this node. Belongs to one event loop."""

    def __init__(
        self,
        cache: Path | None = None,
        limit_bytes: int = MAX_CACHE_BYTES,
        idle: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`idle` hears of a directory that nobody uses any more: it may be removed from then on."""
        self.cache = RootCache(cache or Path(f"/var/tmp/rollout-engine-{os.geteuid()}/roots"), limit_bytes)
        self._limit, self._idle = limit_bytes, idle
        self._making: dict[_Key, asyncio.Task[str]] = {}
        self._held: dict[str, tuple[Hold, int]] = {}

    async def find(self, spec: SandboxSpec, owner: Owner) -> Root | None:
        """The root of a spec; None: the host's own layer.

        Raises SandboxStartError, SandboxUnavailable.
        """
        named = [name for name in ("image", "directory", "tar") if getattr(spec, name)]
        if len(named) > 1:
            raise SandboxStartError(f"a sandbox has one root, and its spec names {' and '.join(named)}")
        if spec.directory and not is_layout(spec.directory):
            return _directory(spec.directory)
        if spec.image:
            return await self._root(("image", spec.image), partial(self._from_daemon, spec.image, owner))
        path = spec.directory or spec.tar
        if path:
            return await self._root((path, *_stamp(path)), partial(self._from_file, path, owner))
        return None

    async def _root(self, key: _Key, make: Callable[[], Hold]) -> Root:
        """Many who ask share one making. Another host may remove what nobody holds yet: then it is made again."""
        for _ in range(_TRIES):
            task = self._making.get(key)
            if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
                task = self._making[key] = asyncio.create_task(self._make(make))
            name = await asyncio.shield(task)
            if (root := self._hold(name)) is not None:
                return root
            if self._making.get(key) is task:
                del self._making[key]
        raise SandboxStartError(f"the unpacked root {self.cache.directory / name} is removed as soon as it is made")

    async def _make(self, make: Callable[[], Hold]) -> str:
        hold = await asyncio.to_thread(make)
        name = Path(hold.directory).parent.name
        self._keep(name, hold)
        asyncio.get_running_loop().call_later(1.0, self._release, name)  # until those who wait have taken theirs
        return name

    def _hold(self, name: str) -> Root | None:
        if name not in self._held:
            hold = self.cache.hold(name)
            if hold is None:
                return None
            self._keep(name, hold)
        else:
            hold, count = self._held[name]
            self._held[name] = hold, count + 1
        about = hold.about
        return Root(hold.directory, about["env"], about["user"] or None, _once(partial(self._release, name)))

    def _keep(self, name: str, hold: Hold) -> None:
        if name in self._held:
            hold.release()
            hold = self._held[name][0]
        self._held[name] = hold, self._held.get(name, (hold, 0))[1] + 1

    def _release(self, name: str) -> None:
        if name not in self._held:
            return  # closed meanwhile
        hold, count = self._held[name]
        self._held[name] = hold, count - 1
        if count == 1:
            del self._held[name]
            self._idle(hold.directory)
            hold.release()

    def close(self) -> None:
        """Lets go of every root, and of those that are being made."""
        self.cache.closing.set()
        for hold, _ in self._held.values():
            hold.release()
        self._held.clear()

    # In threads.

    def _from_file(self, path: str, owner: Owner) -> Hold:
        try:
            with open_image(path) as image:
                if image is not None:
                    return self.cache.make(f"{image.digest[:32]}.{owner.name}", partial(self._apply, image, owner))
            return self._from_tar(path, owner)
        except OSError as error:
            raise SandboxStartError(f"{path} cannot be read: {error}") from error

    def _apply(self, image: ImageFile, owner: Owner, target: Path) -> dict[str, Any]:
        size = sum(self._unpack(image.read(layer), owner, target, whiteouts=True) for layer in image.layers)
        return {"env": image.env, "user": image.user, "bytes": size}

    def _from_tar(self, path: str, owner: Owner) -> Hold:
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            file.seek(0)
            return self.cache.make(f"{digest[:32]}.{owner.name}", partial(self._flat, file, owner))

    def _flat(self, file: Any, owner: Owner, target: Path) -> dict[str, Any]:
        size = self._unpack(iter(lambda: file.read(_CHUNK), b""), owner, target)
        return {"env": {}, "user": "", "bytes": size}

    def _from_daemon(self, image: str, owner: Owner) -> Hold:
        """Asks the Docker Engine for the image's files, as one flat archive. It never pulls."""
        import docker
        from docker.errors import DockerException, ImageNotFound
        from requests.exceptions import RequestException

        from rollout_engine.sandboxes.docker.engine import Engine, probe
        from rollout_engine.sandboxes.docker.failures import image_missing

        try:
            probe(Engine().address)
            with contextlib.closing(docker.from_env(timeout=EXPORT_S)) as client:
                found = client.images.get(image)
                name = f"{str(found.id).removeprefix('sha256:')[:32]}.{owner.name}"
                return self.cache.make(name, partial(self._export, client, found, owner))
        except ImageNotFound as error:
            raise image_missing(image) from error
        except (DockerException, OSError) as error:
            if isinstance(error, RequestException):
                raise SandboxStartError(f"image {image}: the Docker Engine ended its export: {error}") from error
            raise SandboxUnavailable(f"image {image} needs a Docker Engine to be unpacked: {error}") from error

    def _export(self, client: Any, image: Any, owner: Owner, target: Path) -> dict[str, Any]:
        config = image.attrs["Config"] or {}
        env = dict(item.split("=", 1) for item in config.get("Env") or [] if "=" in item)
        container = client.containers.create(image, command=["true"], network_mode="none", labels=_labels())
        try:
            chunks = cast("Iterable[bytes]", container.export(chunk_size=_CHUNK))
            return {"env": env, "user": config.get("User") or "", "bytes": self._unpack(chunks, owner, target)}
        finally:
            container.remove(force=True)

    def _unpack(self, chunks: Iterable[bytes], owner: Owner, target: Path, *, whiteouts: bool = False) -> int:
        """Bytes that it takes."""
        arguments = (str(target), owner.id, int(owner.alone), int(whiteouts), self._limit, MAX_ROOT_ENTRIES)
        with subprocess.Popen(
            isolated.command(UNPACKER, *arguments),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={},
        ) as process:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                self._feed(process.stdin, chunks)
            process.stdin = None
            said, wrong = process.communicate()
        if process.returncode == errno.ENOSPC:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))
        if process.returncode:
            raise SandboxStartError(f"cannot unpack: {wrong.decode(errors='replace').strip()[-500:]}")
        return int(said)

    def _feed(self, pipe: Any, chunks: Iterable[bytes]) -> None:
        with pipe:
            for chunk in chunks:
                if self.cache.closing.is_set():
                    raise SandboxStartError("the provider was closed while a root was being made")
                pipe.write(chunk)


def _labels() -> dict[str, str]:
    """So that the reaper finds the container of one who was killed."""
    from rollout_engine.sandboxes.docker import owner

    return owner.labels(owner.Owner.me(), "", "", 0)


def _directory(path: str) -> Root:
    if not os.path.isdir(path):
        raise SandboxStartError(f"directory {path} is not there on this node")
    return Root(os.path.abspath(path), {}, None, lambda: None)


def _stamp(path: str) -> tuple[int, int]:
    try:
        info = os.stat(path)
    except OSError as error:
        raise SandboxStartError(f"{path} is not there on this node: {error.strerror}") from error
    return info.st_mtime_ns, info.st_size


def _once(work: Callable[[], None]) -> Callable[[], None]:
    left = [work]
    return lambda: left.pop()() if left else None
