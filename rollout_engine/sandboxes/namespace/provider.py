"""Makes boxes on one node: the engine's fast path, which needs nothing but a Linux kernel."""

from __future__ import annotations

import asyncio
import collections
import os
import socket
from typing import Any

from rollout_engine.errors import SandboxError, SandboxStartError, SandboxUnavailable
from rollout_engine.sandboxes.base import SandboxSpec
from rollout_engine.sandboxes.namespace import seccomp
from rollout_engine.sandboxes.namespace.process import LauncherProcess
from rollout_engine.sandboxes.namespace.sandbox import NamespaceSandbox

OPEN_S = 60.0
MAX_RESTARTS = 5
"""A launcher that dies is started again this often in a provider's life."""
MAX_LAYERS = 256


class NamespaceProvider:
    """Boxes of one launcher. Belongs to the event loop that first opens a box."""

    def __init__(self, *, run_as: int | None = None, mode: str | None = None, control_groups: bool = True) -> None:
        """As root, `run_as` lets the launcher be an ordinary user; `mode` pins what is otherwise tried out.

        `control_groups` False leaves them alone, as if there were none.
        """
        self._run_as, self._mode, self._control_groups = run_as, mode, control_groups
        self._launcher: LauncherProcess | None = None
        self._starting: asyncio.Task[LauncherProcess] | None = None
        self._boxes: dict[str, NamespaceSandbox] = {}
        self._count = self._starts = 0
        self._layers: collections.OrderedDict[str, None] = collections.OrderedDict()
        self._closed = False

    @property
    def name(self) -> str:
        return "namespace"

    async def open(self, spec: SandboxSpec) -> NamespaceSandbox:
        launcher = await self._ready()
        self._refuse(spec, launcher.facts)
        plan = self._plan(spec, launcher.facts)
        self._count += 1
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sandbox = NamespaceSandbox(self, f"{self._count}", spec, ours)
        self._boxes[sandbox.box] = sandbox
        try:
            with theirs:
                asked = launcher.ask({"op": "create", "box": sandbox.box, "plan": plan}, fds=(theirs.fileno(),))
                reply = (await asked).header
            if "error" in reply:
                raise SandboxStartError(reply["error"])
            async with asyncio.timeout(OPEN_S):
                said = await sandbox.ready
            if "failed" in said:
                raise SandboxStartError(f"the box did not start: {said['failed']}")
        except BaseException as error:
            await sandbox.close()
            if isinstance(error, TimeoutError):
                raise SandboxStartError(f"the box did not start within {OPEN_S} s") from error
            raise
        sandbox.limits_enforced = said["limits"]
        return sandbox

    async def close(self) -> None:
        self._closed = True
        await asyncio.gather(*(box.close() for box in list(self._boxes.values())))
        launcher, self._launcher = self._launcher, None
        if launcher is not None:
            await launcher.stop()

    # The launcher.

    async def _ready(self) -> LauncherProcess:
        if self._closed:
            raise SandboxUnavailable("the provider is closed")
        if self._launcher is None or self._launcher.channel.closed:
            if self._starting is None or self._starting.done():
                self._starting = asyncio.create_task(self._start())
            await asyncio.shield(self._starting)
        assert self._launcher is not None
        return self._launcher

    async def _start(self) -> LauncherProcess:
        if self._launcher is not None:
            await self._launcher.stop()
        self._starts += 1
        if self._starts > MAX_RESTARTS + 1:
            raise SandboxUnavailable(f"the launcher died {MAX_RESTARTS} times: {self._launcher and self._launcher.fatal}")
        mode = self._mode or "ranges"
        launcher = LauncherProcess(self._on_event, self._on_launcher_end)
        hello = {"mode": mode, "run_as": self._run_as, "groups": self._control_groups}
        try:
            await launcher.hello(hello, seccomp.program() or b"")
        except BaseException:
            await launcher.stop()
            raise
        self._launcher = launcher
        return launcher

    def _on_event(self, header: dict[str, Any]) -> None:
        box = self._boxes.get(str(header.get("ended")))
        if box is not None:
            box.channel.close()
            if not box.ended.done():
                box.ended.set_result(header)

    def _on_launcher_end(self) -> None:
        """Every box ends with its launcher."""
        for box in list(self._boxes.values()):
            box.channel.close()
            if not box.ended.done():
                box.ended.set_result({})

    def end(self, sandbox: NamespaceSandbox) -> None:
        """Kills a box; its `ended` follows."""
        if self._launcher is None or self._launcher.channel.closed:
            if not sandbox.ended.done():
                sandbox.ended.set_result({})
            return
        self._launcher.channel.send({"op": "destroy", "box": sandbox.box, "id": 0})

    def forget(self, sandbox: NamespaceSandbox) -> None:
        self._boxes.pop(sandbox.box, None)

    # Plans and layers.

    def _refuse(self, spec: SandboxSpec, facts: dict[str, Any]) -> None:
        if spec.network not in ("none", "host"):
            raise SandboxStartError(f"network {spec.network!r}: the namespace sandbox knows none and host")
        missing = {"memory", "pids", "cpu"} - set(facts["held"])
        if spec.require_limits and missing:
            raise SandboxStartError(f"the task requires its limits, and {', '.join(sorted(missing))} cannot be held here")

    def _plan(self, spec: SandboxSpec, facts: dict[str, Any]) -> dict[str, Any]:
        disk = spec.disk_bytes
        if "memory" in facts["held"]:
            disk = min(disk, spec.memory_bytes // 2)  # a full disk must leave memory for the box to live
        return {
            "base": "host",
            "layers": list(spec.layers),
            "limits": [spec.memory_bytes, spec.cpus, spec.processes, disk, spec.inodes],
            "network": spec.network,
            "env": dict(spec.env),
            "user": spec.user,
            "workdir": os.path.normpath(spec.workdir),
        }

    async def export(self, box: str, paths: list[str]) -> str:
        """For `NamespaceSandbox.export`: registers what a frozen box holds at `paths`."""
        launcher = await self._ready()
        self._count += 1
        layer = f"export-{launcher.pid}-{self._count}"
        reply = (await launcher.ask({"op": "export", "box": box, "paths": paths, "layer": layer})).header
        if "error" in reply:
            raise SandboxError(f"cannot export {paths}: {reply['error']}")
        self._layers[layer] = None
        while len(self._layers) > MAX_LAYERS:
            await self.release(next(iter(self._layers)))
        return layer

    async def release(self, layer: str) -> None:
        """Lets go of a layer; sandboxes that use it keep it for their life."""
        if layer in self._layers:
            del self._layers[layer]
            if self._launcher is not None and not self._launcher.channel.closed:
                self._launcher.channel.send({"op": "drop", "layer": layer, "id": 0})
