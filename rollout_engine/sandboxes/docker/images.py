"""Which image a sandbox starts from: a tag, an imported tar or folder, or a prepared task."""

from __future__ import annotations

import asyncio
import hashlib
import json
import tarfile
import tempfile
import time
import uuid
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from docker import APIClient
from docker.errors import APIError, NotFound

from rollout_engine.errors import SandboxStartError
from rollout_engine.sandboxes.base import SandboxSpec
from rollout_engine.sandboxes.docker.engine import Engine
from rollout_engine.sandboxes.docker.failures import image_missing, translate
from rollout_engine.sandboxes.docker.owner import MADE
from rollout_engine.sandboxes.imagefile import open_image

IMPORTED = "rollout-imported"
PREPARED_REPOSITORY = "rollout-prepared"
_NO_IMAGE = "docker: the sandbox names no image, tar or directory; set the task's `image` or the provider's default"


class Image(NamedTuple):
    """What is known of an image on this node."""

    id: str
    user: str


class Images:
    """Finds and makes images; `known` answers again without a call."""

    def __init__(self, engine: Engine, default: str | None, prepared_limit: int, labels: Mapping[str, str]) -> None:
        self._engine, self._default, self._limit = engine, default, prepared_limit
        self._known: dict[str, Image] = {}
        self._used: dict[str, float] = {}
        self._labels = {**labels, MADE: "1"}
        self._importing = asyncio.Lock()
        self._mine = uuid.uuid4().hex[:8]

    async def resolve(self, spec: SandboxSpec) -> Image:
        """What a spec without layers starts from. Raises DockerImageMissing; SandboxStartError where none is named."""
        if spec.image is not None:
            return await self.named(spec.image)
        if spec.tar is not None or spec.directory is not None:
            return await self._imported(Path(spec.tar or spec.directory or ""))
        if self._default is None:
            raise SandboxStartError(_NO_IMAGE)
        return await self.named(self._default)

    def forget(self, image: Image) -> None:
        """After the daemon said that an image is gone."""
        for tag in [tag for tag, known in self._known.items() if known.id == image.id]:
            del self._known[tag]
            self._used.pop(tag, None)

    def use(self, tag: str) -> bool:
        """Whether a prepared image is there; it is then the last to go."""
        if tag not in self._used:
            return False
        self._used[tag] = time.monotonic()
        return True

    async def commit(self, container: str, tag: str, user: str) -> None:
        """Freezes a container's files as an image, and removes those longest unused."""
        config = {"Labels": self._labels, "User": user}
        repository, name = tag.split(":")
        await self._engine.ask("commit", lambda api: api.commit(container, repository, name, conf=config))
        self._used[tag] = time.monotonic()
        await self.trim()

    async def trim(self, keep: int | None = None) -> None:
        """Removes prepared images, longest unused first; one that is still in use stays until the next time."""
        keep = self._limit if keep is None else keep
        oldest = sorted(self._used, key=lambda tag: self._used[tag])
        for tag in oldest[: max(0, len(oldest) - keep)]:
            del self._used[tag]
            self._known.pop(tag, None)
            await self._engine.ask("remove image", partial(remove_image, tag=tag))

    def prepared_tag(self, name: str) -> str:
        """This provider's own: another's may be removed at any time."""
        return f"{PREPARED_REPOSITORY}:{self._mine}-{name}"

    async def named(self, tag: str) -> Image:
        if tag not in self._known:
            self._known[tag] = await self._inspect(tag)
        return self._known[tag]

    async def _inspect(self, tag: str) -> Image:
        try:
            found = await self._engine.call("inspect image", lambda api: cast("Any", api).inspect_image(tag))
        except NotFound as error:
            raise image_missing(tag) from error
        except APIError as error:
            raise translate(error, f"inspect image {tag}") from error
        return Image(found["Id"], (found.get("Config") or {}).get("User") or "")

    async def _imported(self, source: Path) -> Image:
        """Imported once per content as far as size and time of change tell it."""
        async with self._importing:
            try:
                tag = f"{IMPORTED}:{self._mine}-{await asyncio.to_thread(_fingerprint, source)}"
            except OSError as error:
                raise SandboxStartError(f"docker: {source} cannot be read: {error}") from error
            try:
                return await self.named(tag)
            except SandboxStartError:
                await asyncio.to_thread(_refuse_image, source)
                await self._engine.ask("import", lambda api: _import(api, source, tag, self._labels))
            return await self.named(tag)


def is_prepared(layer: str) -> bool:
    """Whether a layer of a spec is the image of a prepared task; it holds everything below it."""
    return layer.startswith(f"{PREPARED_REPOSITORY}:")


def remove_image(api: APIClient, tag: str) -> None:
    """An image that a container still uses answers 409; it goes with a later trim or reap."""
    try:
        api.remove_image(tag, noprune=False)
    except APIError as error:
        if error.status_code not in (404, 409):
            raise


def _fingerprint(source: Path) -> str:
    paths = [source, *sorted(source.rglob("*"))] if source.is_dir() else [source]
    digest = hashlib.sha256(str(source.resolve()).encode())
    for path in paths:
        found = path.lstat()
        digest.update(f"{path.relative_to(source)}\0{found.st_mode}\0{found.st_size}\0{found.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:32]


def _refuse_image(source: Path) -> None:
    """An image's layers are no root: imported like one they would make a container of blobs."""
    with open_image(str(source)) as image:
        if image is not None:
            fix = f"`docker load -i {source}` it on every node, and name it as the task's `image`"
            raise SandboxStartError(f"docker: {source} is a saved image, not a root; {fix}")


def _import(api: APIClient, source: Path, tag: str, labels: Mapping[str, str]) -> None:
    if source.is_file():
        with source.open("rb") as file:
            _send(api, file, tag, labels)
        return
    with tempfile.TemporaryFile() as spool:
        with tarfile.open(fileobj=spool, mode="w") as tar:
            tar.add(source, arcname=".")
        spool.seek(0)
        _send(api, spool, tag, labels)


def _send(api: APIClient, file: IO[bytes], tag: str, labels: Mapping[str, str]) -> None:
    """The stream's errors come with status 200: what counts is whether the image is there afterwards."""
    repository, name = tag.split(":")
    changes = [f"LABEL {label}={json.dumps(value)}" for label, value in labels.items()]
    cast("Any", api).import_image_from_data(file, repository=repository, tag=name, changes=changes)
