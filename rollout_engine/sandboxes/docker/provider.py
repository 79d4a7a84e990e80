"""Makes docker sandboxes on one node, prepares tasks as images, and removes whatever it made."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from dataclasses import replace
from typing import IO, Any, TypeAlias, cast

from docker import APIClient
from docker.errors import APIError, NotFound

from rollout_engine.errors import SandboxAway, SandboxError, SandboxStartError, SandboxUnavailable, crossing
from rollout_engine.sandboxes.base import Recipe, SandboxSpec, check_mounts
from rollout_engine.sandboxes.docker import archive, owner, supply
from rollout_engine.sandboxes.docker.archive import Layer
from rollout_engine.sandboxes.docker.body import Body, limits_enforced, unenforceable
from rollout_engine.sandboxes.docker.doors import Doors
from rollout_engine.sandboxes.docker.engine import Engine
from rollout_engine.sandboxes.docker.failures import NO_SUBNET_STATUSES, image_missing, networks_exhausted, translate
from rollout_engine.sandboxes.docker.files import Ids, make_folder
from rollout_engine.sandboxes.docker.images import Image, Images
from rollout_engine.sandboxes.docker.layers import Layers
from rollout_engine.sandboxes.docker.plain import PlainExecutor
from rollout_engine.sandboxes.docker.reach import Way
from rollout_engine.sandboxes.docker.reaper import Reaped, reap, remove
from rollout_engine.sandboxes.docker.running import Executor
from rollout_engine.sandboxes.docker.sandbox import DockerSandbox
from rollout_engine.sandboxes.docker.supervised import SupervisedExecutor
from rollout_engine.sandboxes.docker.users import ids_of

log = logging.getLogger(__name__)

REAP_S = 20.0
"""How long a provider that is closed tries to remove what its daemon refuses to."""
_Laid: TypeAlias = list[tuple[list[str], IO[bytes]]]
"""Of each layer, lowest first: the paths that go, and the tar that comes over them."""


class DockerProvider:
    """Sandboxes from the Docker Engine at `engine_host` (None: DOCKER_HOST). Whoever makes it calls `close`.

    `run`, `host` and `epoch` go into the labels; `image` is for specs that name none; `runtime` is one that the
    daemon knows (gVisor's `runsc`, Kata); `prepared_limit` bounds the images of prepared tasks on this node.
    `supervise` False runs commands by the Engine's exec, as is done anyway where the supervisor cannot be compiled.
    `reach` is the way in which containers get listeners (None: the best there is).
    """

    name = "docker"

    def __init__(
        self,
        *,
        run: str = "",
        host: str = "",
        epoch: int = 0,
        engine_host: str | None = None,
        image: str | None = None,
        runtime: str | None = None,
        threads: int = 32,
        prepared_limit: int = 32,
        supervise: bool = True,
        reach: Way | None = None,
    ) -> None:
        self._engine = Engine(engine_host, threads)
        self._labels = owner.labels(owner.Owner.me(), run, host, epoch)
        self._runtime = runtime
        self._images = Images(self._engine, image, prepared_limit, self._labels)
        self._layers = Layers(self._images, self.open, prepared_limit)
        self._supervise, self._supplied, self._supplying = supervise, False, asyncio.Lock()
        self._volume: str | None = None
        self._doors = Doors(self._engine, reach)
        self._info: dict[str, Any] | None = None
        self._readying = asyncio.Lock()
        self._behind: set[asyncio.Task[None]] = set()
        self._open_ones: set[DockerSandbox] = set()
        self._closing: asyncio.Future[None] | None = None

    async def open(self, spec: SandboxSpec) -> DockerSandbox:
        """A container of its own.

        Raises DockerImageMissing, DockerNetworksExhausted, SandboxUnavailable, SandboxAway.
        """
        if self._closing is not None:
            raise SandboxUnavailable("docker: this provider was closed")
        info = await self._ready()
        check_mounts(spec)
        if spec.mounts and not self._engine.is_local:
            raise SandboxUnavailable("docker: directories of this node cannot be mounted by a daemon elsewhere")
        if spec.require_limits and (lacking := unenforceable(info)):
            raise SandboxStartError(f"docker: this daemon cannot hold the required limits: {', '.join(lacking)}")
        image, over = await self._layers.resolve(spec)
        if spec.require_limits and over:  # nothing can be put into a limited disk's read-only root: make an image
            whole = await self._layers.prepare(spec, Recipe())
            image, over = await self._layers.resolve(whole)
        name = f"rollout-{uuid.uuid4().hex[:16]}"
        opening = asyncio.ensure_future(self._open(spec, image, over, name))
        try:
            sandbox = await asyncio.shield(opening)
            self._open_ones.add(sandbox)
            return sandbox
        except BaseException:
            self._later(self._bury(opening, name))
            raise

    async def prepare(self, spec: SandboxSpec, recipe: Recipe) -> SandboxSpec:
        """Freezes the files of a sandbox that carried the recipe out as an image; many who ask share one making.

        It holds files, not processes. The images longest unused go where there are too many, and are made again.
        """
        return await self._layers.prepare(spec, recipe)

    async def release(self, layer: str) -> None:
        self._layers.release(layer)

    async def reap(self) -> Reaped:
        """Removes what dead owners left with this daemon. Done before the first sandbox; welcome at any time."""
        return await reap(self._engine, lambda found: owner.is_orphan(found, self._engine.is_local))

    async def close(self) -> None:
        """Removes everything that this provider made, prepared images too. A daemon that is gone has nothing left."""
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        try:
            await asyncio.gather(
                *(sandbox.close() for sandbox in self._open_ones), *self._behind, return_exceptions=True
            )
            mine = self._labels.items()
            await reap(
                self._engine,
                lambda found: mine <= found.items() or owner.is_orphan(found, self._engine.is_local),
                REAP_S,
            )
        except (SandboxUnavailable, SandboxAway) as error:
            log.warning("docker: nothing could be removed at the end: %s", error)
        finally:
            self._layers.close()
            self._doors.close()
            self._engine.close()

    async def _ready(self) -> dict[str, Any]:
        async with self._readying:
            if self._info is None:
                await self.reap()
                info: dict[str, Any] = await self._engine.ask("info", lambda api: api.info())
                await self._doors.decide(info, self._supervise)
                self._info = info
            return self._info

    async def _open(self, spec: SandboxSpec, image: Image, over: list[Layer], name: str) -> DockerSandbox:
        labels = {**self._labels, **({owner.ROLLOUT: spec.label} if spec.label else {})}
        with contextlib.ExitStack() as held:
            # Opened now: a layer may be released meanwhile.
            laid = [(layer.gone, held.enter_context(layer.reader())) for layer in over]
            return await self._start_with(spec, image, laid, name, labels)

    async def _start_with(
        self,
        spec: SandboxSpec,
        image: Image,
        laid: list[tuple[list[str], IO[bytes]]],
        name: str,
        labels: dict[str, str],
    ) -> DockerSandbox:
        supervisor = await self._supervisor(image)
        network = await self._network(spec, name, labels) or spec.network
        sockets = self._doors.mount(name)
        body = Body(spec, image, name, labels, network, self._runtime, supervisor, sockets)
        container = await self._create(body)
        user = spec.user or image.user or "0"
        ids = await ids_of(self._engine, container, user)
        if ids != Ids() and not spec.require_limits:
            await self._engine.ask("chown", lambda api: make_folder(api, container, spec.workdir, ids))
        executor = await self._executor(body, container, user)
        try:
            with crossing(SandboxStartError, f"docker: {name}: its layers"):
                if spec.require_limits:
                    await self._engine.call("fill", lambda api: archive.fill(api, container, image.id, spec, labels))
                for gone, file in laid:
                    await self._lay(executor, container, gone, file)
        except BaseException:
            await executor.close()
            raise
        return DockerSandbox(
            self._engine,
            executor,
            container=container,
            name=name,
            spec=spec,
            ids=ids,
            limits_enforced=limits_enforced(self._info or {}, spec),
            listen=lambda port: self._doors.listen(executor, container, name, port),
            keep=self._layers.keep,
            remove=lambda: self._remove(name),
            closed=self._open_ones.discard,
        )

    async def _lay(self, executor: Executor, container: str, gone: list[str], file: IO[bytes]) -> None:
        """Nothing but the supervisor runs there yet."""
        if gone:
            await executor.cut(gone)
        await self._engine.call("layer", lambda api: archive.put(api, container, file))

    async def _network(self, spec: SandboxSpec, name: str, labels: dict[str, str]) -> str | None:
        """`bridge` means a network of its own: on the daemon's default one, sandboxes reach each other."""
        if spec.network != "bridge":
            return None
        try:
            await self._engine.call("create network", lambda api: api.create_network(name, labels=labels))
        except APIError as error:
            if error.status_code in NO_SUBNET_STATUSES:
                raise networks_exhausted(error) from error
            raise SandboxStartError(str(translate(error, "create network"))) from error
        return name

    async def _create(self, body: Body) -> str:
        def create(api: APIClient) -> str:
            made = cast("Any", api).create_container_from_config(body.config(api), body.name)
            return str(made["Id"])

        try:
            return await self._engine.call("create", create)
        except NotFound as error:
            self._images.forget(body.image)
            raise image_missing(body.spec.image or body.image.id) from error
        except APIError as error:
            if body.sockets is None:
                raise SandboxStartError(str(translate(error, "create"))) from error
            made = await self._create(replace(body, sockets=None))
            self._doors.unseen(body.sockets)
            return made

    async def _executor(self, body: Body, container: str, user: str) -> Executor:
        if body.supervisor is None:
            await self._start(container)
            return PlainExecutor(self._engine, container, body.name, user)
        return await SupervisedExecutor.open(
            self._engine,
            container,
            body.name,
            user=user,
            env=body.environment(),
            memory=body.spec.memory_bytes,
            start=lambda: self._start(container),
        )

    async def _supervisor(self, image: Image) -> str | None:
        """Supplied once, with the first sandbox."""
        async with self._supplying:
            if not self._supplied and self._supervise:
                info = self._info or {}
                self._volume = await supply.supply(self._engine, info, image.id, self._labels)
            self._supplied = True
            return self._volume

    async def _start(self, container: str) -> None:
        try:
            await self._engine.call("start", lambda api: api.start(container))
        except APIError as error:
            raise SandboxStartError(str(translate(error, "start"))) from error

    async def _remove(self, name: str) -> None:
        """Bounded by the calls' own limits; what is left where the daemon fails is the reaper's."""
        self._doors.remove(name)
        try:
            await self._engine.ask("remove", lambda api: remove(api, name))
        except SandboxError as error:
            log.warning("docker: sandbox=%s is left to the reaper: %s", name, error)

    async def _bury(self, opening: asyncio.Future[DockerSandbox], name: str) -> None:
        await asyncio.wait([opening])
        if not opening.cancelled() and opening.exception() is None:
            await opening.result().close()
        else:
            await self._remove(name)

    def _later(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._behind.add(task)
        task.add_done_callback(self._behind.discard)
