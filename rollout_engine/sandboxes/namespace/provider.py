"""Makes boxes on one node: the engine's fast path, which needs nothing but a Linux kernel."""

from __future__ import annotations

import asyncio
import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

from rollout_engine.errors import SandboxError, SandboxStartError, SandboxUnavailable, describe
from rollout_engine.sandboxes.base import Recipe, SandboxSpec
from rollout_engine.sandboxes.namespace import seccomp
from rollout_engine.sandboxes.namespace.prepared import LayerBook
from rollout_engine.sandboxes.namespace.process import LauncherProcess
from rollout_engine.sandboxes.namespace.sandbox import NamespaceSandbox
from rollout_engine.sandboxes.namespace.sources import Sources

OPEN_S = 60.0
MAX_RESTARTS = 5
"""A launcher that dies is started again this often in a provider's life."""
_TRIAL = ["sh", "-c", "rm -rf /srv && mkdir /srv && touch /srv/x"]
"""What an overlay on an old kernel cannot do: remove a directory of a lower layer, and make it again."""


class NamespaceProvider:
    """Boxes of one launcher. Belongs to the event loop that first opens a box."""

    def __init__(
        self, *, run_as: int | None = None, mode: str | None = None, control_groups: bool = True,
        cache: Path | None = None, max_layers: int = 256, pretend_old_kernel: bool = False,
    ) -> None:  # fmt: skip
        """As root, `run_as` lets the launcher be an ordinary user; `mode` pins what is otherwise tried out.

        `control_groups` False leaves them alone, as if there were none. Unpacked images are kept in `cache`
        (None: /var/tmp), prepared layers and exports in memory, at most `max_layers`. `pretend_old_kernel` takes
        the way of kernels before 6.15, for tests.
        """
        self._run_as, self._control_groups, self._pretend_old = run_as, control_groups, pretend_old_kernel
        ordinary = run_as is not None or os.geteuid() != 0
        self._modes = ("user",) if ordinary else (mode,) if mode else ("ranges", "shared", "plain")
        self._launcher: LauncherProcess | None = None
        self._starting: asyncio.Task[LauncherProcess] | None = None
        self._boxes: dict[str, NamespaceSandbox] = {}
        self._count = self._starts = 0
        self._sources = Sources(cache)
        self._layers = LayerBook(max_layers, self.open, self._drop)
        self._closed = False

    @property
    def name(self) -> str:
        return "namespace"

    @property
    def launcher_pid(self) -> int | None:
        return None if self._launcher is None else self._launcher.pid

    async def facts(self) -> dict[str, Any]:
        """What the launcher found here: its mode, the control groups it holds, whether there is a call filter."""
        return {**(await self._ready()).facts, "seccomp": seccomp.program() is not None}

    async def open(self, spec: SandboxSpec) -> NamespaceSandbox:
        launcher = await self._ready()
        _refuse(spec, launcher.facts)
        root = await self._sources.find(spec, launcher.facts["owner"])
        if spec.layers:
            await self._layers.ensure(spec.layers)
        plan = _plan(spec, launcher.facts)
        if root is not None:
            plan["base"] = root.directory
            spec = replace(spec, env={**root.env, **spec.env})
        return await self._open(launcher, spec, plan)

    async def _open(self, launcher: LauncherProcess, spec: SandboxSpec, plan: dict[str, Any]) -> NamespaceSandbox:
        self._count += 1
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            sandbox = NamespaceSandbox(self, launcher, f"{self._count}", spec, ours)
            self._boxes[sandbox.box] = sandbox
            try:
                asked = launcher.ask({"op": "create", "box": sandbox.box, "plan": plan}, fds=(theirs.fileno(),))
                reply = (await asked).header
                theirs.close()
                if "error" in reply:
                    raise SandboxStartError(f"the launcher could not make a box: {reply['error']}")
                await sandbox.wait_ready(OPEN_S)
            except BaseException:
                await sandbox.close()
                raise
        return sandbox

    async def prepare(self, spec: SandboxSpec, recipe: Recipe) -> SandboxSpec:
        """A recipe is carried out once while its layer is kept, and again where a launcher that died took it along."""
        return replace(spec, layers=(*spec.layers, await self._layers.prepare(spec, recipe)))

    async def release(self, layer: str) -> None:
        """Lets go of a layer; sandboxes that use it keep it for their life."""
        self._layers.drop(layer)

    async def close(self) -> None:
        self._closed = True
        await asyncio.gather(*(box.close() for box in list(self._boxes.values())))
        if self._starting is not None:
            await asyncio.wait({self._starting})
        launcher, self._launcher = self._launcher, None
        if launcher is not None:
            await launcher.stop()

    # The launcher.

    async def _ready(self) -> LauncherProcess:
        while self._launcher is None or self._launcher.channel.closed:
            if self._closed:
                raise SandboxUnavailable("the provider is closed")
            if self._starting is None or self._starting.done():
                self._starting = asyncio.create_task(self._start())
            await asyncio.shield(self._starting)
        if self._closed:
            raise SandboxUnavailable("the provider is closed")
        return self._launcher

    async def _start(self) -> LauncherProcess:
        """Starts a launcher in the first mode in which a box works."""
        if self._launcher is not None:
            await self._launcher.stop()
        self._starts += 1
        if self._starts > MAX_RESTARTS + 1:
            raise SandboxUnavailable(f"the launcher died {self._starts - 1} times, which is too often")
        reasons = []
        for mode in self._modes:
            try:
                self._launcher = await self._start_as(mode)
            except SandboxError as error:
                reasons.append(f"{mode}: {describe(error)}")
            else:
                self._modes = (mode,)
                return self._launcher
        raise SandboxUnavailable(f"namespace sandboxes do not work here ({'; '.join(reasons)}); see `rollout doctor`")

    async def _start_as(self, mode: str) -> LauncherProcess:
        launcher = LauncherProcess(self._on_event, self._on_launcher_end)
        try:
            hello = {
                "mode": mode,
                "run_as": self._run_as,
                "groups": self._control_groups,
                "pretend_old": self._pretend_old,
            }
            await launcher.hello(hello, await asyncio.to_thread(lambda: seccomp.program() or b""))
            spec = SandboxSpec()
            trial = await self._open(launcher, spec, _plan(spec, launcher.facts))
            result = await trial.exec(_TRIAL, timeout_s=OPEN_S)
            await trial.close()
            if not result.ok:
                raise SandboxStartError(f"a trial command failed: {result.stderr.decode(errors='replace')}")
        except BaseException:
            await launcher.stop()
            raise
        return launcher

    def _on_event(self, header: dict[str, Any]) -> None:
        box = self._boxes.get(str(header.get("ended")))
        if box is not None:
            box.on_ended(header)

    def _on_launcher_end(self) -> None:
        """Every box ends with its launcher."""
        self._layers.lost()
        for box in list(self._boxes.values()):
            box.on_ended({})

    def forget(self, sandbox: NamespaceSandbox) -> None:
        """For a sandbox that is closed."""
        self._boxes.pop(sandbox.box, None)

    # Layers.

    async def export(self, launcher: LauncherProcess, box: str, paths: list[str], name: str | None) -> str:
        """For `NamespaceSandbox.export`: registers what a frozen box holds at `paths`."""
        self._count += 1
        layer = name or f"export-{launcher.pid}-{self._count}"
        reply = (await launcher.ask({"op": "export", "box": box, "paths": paths, "layer": layer})).header
        if "error" in reply:
            raise SandboxError(f"cannot export {', '.join(paths)}: {reply['error']}")
        self._layers.add(layer)
        return layer

    def _drop(self, layer: str) -> None:
        if self._launcher is not None and not self._launcher.channel.closed:
            self._launcher.channel.send({"op": "drop", "layer": layer, "id": 0})


def _refuse(spec: SandboxSpec, facts: dict[str, Any]) -> None:
    if spec.network not in ("none", "host"):
        raise SandboxStartError(f"network {spec.network!r}: the namespace sandbox knows none and host")
    missing = sorted({"memory", "pids", "cpu"} - set(facts["held"]))
    if spec.require_limits and missing:
        raise SandboxStartError(f"the task requires its limits, and no control group holds {', '.join(missing)} here")


def _plan(spec: SandboxSpec, facts: dict[str, Any]) -> dict[str, Any]:
    disk = spec.disk_bytes
    if "memory" in facts["held"]:
        disk = min(disk, spec.memory_bytes // 2)  # a full disk must leave memory for the box to live
    return {
        "base": "host",
        "layers": list(spec.layers),
        "limits": [spec.memory_bytes, spec.cpus, spec.processes, disk, spec.inodes],
        "network": spec.network,
        "user": spec.user,
        "workdir": os.path.normpath(spec.workdir),
    }
