"""Where boxes' roots come from: an image or a tar, unpacked once per node and kept by its digest."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast

from rollout_engine.errors import SandboxStartError, SandboxUnavailable
from rollout_engine.sandboxes.base import SandboxSpec
from rollout_engine.sandboxes.namespace import isolated
from rollout_engine.sandboxes.namespace.helper import limits

_CHUNK = 2**20
_TEMPORARY = "unpacking."
UNPACKER = "rollout_engine.sandboxes.namespace.helper.unpack"


class Root(NamedTuple):
    """A directory on this node, and what the image says of its environment."""

    directory: str
    env: dict[str, str]


class Sources:
    """Unpacked images and archives of this node. `owner` is who id 0 of an archive becomes; -1: the caller."""

    def __init__(self, cache: Path | None = None) -> None:
        self.cache = cache or Path(f"/var/tmp/rollout-engine-{os.geteuid()}/layers")
        self._known: dict[tuple[object, ...], asyncio.Task[Root]] = {}

    async def find(self, spec: SandboxSpec, owner: int) -> Root | None:
        """The root of a spec; None: the host's own layer. Raises SandboxStartError, SandboxUnavailable."""
        named = [name for name in ("image", "directory", "tar") if getattr(spec, name)]
        if len(named) > 1:
            raise SandboxStartError(f"a sandbox has one root, and its spec names {' and '.join(named)}")
        if spec.directory:
            return _directory(spec.directory)
        if spec.tar:
            return await self._once(("tar", spec.tar, *_stamp(spec.tar)), lambda: self._from_tar(spec.tar or "", owner))
        if spec.image:
            return await self._once(("image", spec.image), lambda: self._from_image(spec.image or "", owner))
        return None

    async def _once(self, key: tuple[object, ...], make: Callable[[], Root]) -> Root:
        task = self._known.get(key)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = self._known[key] = asyncio.create_task(asyncio.to_thread(make))
        return await asyncio.shield(task)

    def _from_tar(self, path: str, owner: int) -> Root:
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            file.seek(0)
            return self._unpack(f"{digest[:32]}.{owner}", iter(lambda: file.read(_CHUNK), b""), owner, {})

    def _from_image(self, image: str, owner: int) -> Root:
        """Asks the Docker Engine for the image's files, as one flat archive."""
        import docker
        from docker.errors import DockerException, ImageNotFound

        try:
            with contextlib.closing(docker.from_env(timeout=600)) as client:
                try:
                    found = client.images.get(image)
                except ImageNotFound:
                    found = client.images.pull(image)
                env = dict(item.split("=", 1) for item in found.attrs["Config"].get("Env") or [])
                digest = str(found.id).removeprefix("sha256:")[:32]
                container = client.containers.create(found, command=["true"])
                try:
                    chunks = cast("Iterable[bytes]", container.export(chunk_size=_CHUNK))
                    return self._unpack(f"{digest}.{owner}", chunks, owner, env)
                finally:
                    container.remove(force=True)
        except ImageNotFound as error:
            raise SandboxStartError(f"there is no image {image}: {error.explanation}") from error
        except DockerException as error:
            raise SandboxUnavailable(f"image {image} needs a Docker Engine to be unpacked: {error}") from error

    def _unpack(self, name: str, chunks: Iterable[bytes], owner: int, env: dict[str, str]) -> Root:
        """Unpacks next to its place and moves it there when it is whole."""
        self._make_cache()
        place = self.cache / name
        if not place.is_dir():
            temporary = Path(tempfile.mkdtemp(prefix=f"{_TEMPORARY}{limits.owner_name()}.", dir=self.cache))
            try:
                (temporary / "root").mkdir()
                (temporary / "root").chmod(0o755)
                (temporary / "env.json").write_text(json.dumps(env))
                _run_unpacker(temporary / "root", chunks, owner)
                temporary.chmod(0o711)
                with contextlib.suppress(FileExistsError, OSError):
                    temporary.rename(place)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
        if not place.is_dir():
            raise SandboxStartError(f"{place} could not be made")
        return Root(str(place / "root"), json.loads((place / "env.json").read_text()))

    def _make_cache(self) -> None:
        """Only we may have written there: what lies in it becomes the root of sandboxes."""
        self.cache.mkdir(parents=True, exist_ok=True)
        info = self.cache.stat()
        if info.st_uid != os.geteuid() or info.st_mode & 0o022:
            raise SandboxStartError(f"{self.cache} must belong to this user, and be writable for nobody else")
        for left in self._leftovers():
            shutil.rmtree(left, ignore_errors=True)

    def _leftovers(self) -> Iterator[Path]:
        for path in self.cache.glob(f"{_TEMPORARY}*"):
            owner = path.name.removeprefix(_TEMPORARY).rpartition(".")[0]
            if not limits.owner_alive(owner):
                yield path


def _directory(path: str) -> Root:
    if not os.path.isdir(path):
        raise SandboxStartError(f"directory {path} is not there on this node")
    return Root(os.path.abspath(path), {})


def _stamp(path: str) -> tuple[int, int]:
    try:
        info = os.stat(path)
    except OSError as error:
        raise SandboxStartError(f"tar {path} is not there on this node: {error.strerror}") from error
    return info.st_mtime_ns, info.st_size


def _run_unpacker(target: Path, chunks: Iterable[bytes], owner: int) -> None:
    with subprocess.Popen(
        isolated.command(UNPACKER, str(target), owner),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={},
    ) as process:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            _feed(process.stdin, chunks)
        process.stdin = None
        said = process.communicate()[1]
    if process.returncode:
        raise SandboxStartError(f"cannot unpack: {said.decode(errors='replace')[-500:]}")


def _feed(pipe: Any, chunks: Iterable[bytes]) -> None:
    with pipe:
        for chunk in chunks:
            pipe.write(chunk)
