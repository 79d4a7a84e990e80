"""Makes boxes on one node: the engine's fast path, which needs nothing but a Linux kernel."""

from __future__ import annotations

import asyncio
import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

from rollout_engine.errors import SandboxError, SandboxStartError
from rollout_engine.sandboxes.base import Recipe, SandboxSpec, check_mounts
from rollout_engine.sandboxes.namespace import seccomp
from rollout_engine.sandboxes.namespace.cache import MAX_CACHE_BYTES
from rollout_engine.sandboxes.namespace.keeper import Keeper
from rollout_engine.sandboxes.namespace.prepared import LayerBook
from rollout_engine.sandboxes.namespace.process import LauncherProcess
from rollout_engine.sandboxes.namespace.sandbox import NamespaceSandbox
from rollout_engine.sandboxes.namespace.sources import Owner, Root, Sources

OPEN_S = 60.0
_TRIAL = ["sh", "-c", "rm -rf /srv && mkdir /srv && touch /srv/x"]
"""What an overlay on an old kernel cannot do: remove a directory of a lower layer, and make it again."""


class NamespaceProvider:
    """Boxes of one launcher. Belongs to the event loop that first opens a box."""

    def __init__(
        self, *, run_as: int | None = None, mode: str | None = None, control_groups: bool = True,
        cache: Path | None = None, cache_bytes: int = MAX_CACHE_BYTES, max_layers: int = 256,
        pretend_old_kernel: bool = False,
    ) -> None:  # fmt: skip
        """As root, `run_as` lets the launcher be an ordinary user; `mode` pins what is otherwise tried out.

        `control_groups` False leaves them alone, as if there were none. Unpacked images are kept in `cache`
        (None: /var/tmp), the longest unused removed above `cache_bytes`; prepared layers and exports in memory, at
        most `max_layers`. `pretend_old_kernel` takes
        the way of kernels before 6.15, for tests.
        """
        hello = {"groups": control_groups, "pretend_old": pretend_old_kernel}
        self._keeper = Keeper(
            "the namespace sandbox", on_event=self._on_event, on_end=self._on_launcher_end, trial=self._try,
            run_as=run_as, mode=mode, hello=hello,
        )  # fmt: skip
        self._boxes: dict[str, NamespaceSandbox] = {}
        self._count, self._run_as = 0, run_as
        self._sources = Sources(cache, cache_bytes, self._drop)
        self._roots: dict[str, Root] = {}
        """Of the boxes that have one of their own."""
        self._layers = LayerBook(max_layers, self.open, self._drop)

    @property
    def name(self) -> str:
        return "namespace"

    @property
    def launcher_pid(self) -> int | None:
        return self._keeper.pid

    async def facts(self) -> dict[str, Any]:
        """What the launcher found here: its mode, the control groups it holds, whether there is a call filter."""
        return {**(await self._keeper.ready()).facts, "seccomp": seccomp.program() is not None}

    async def open(self, spec: SandboxSpec) -> NamespaceSandbox:
        launcher = await self._keeper.ready()
        _refuse(spec, launcher.facts)
        root = await self._sources.find(spec, self._owner(launcher.facts["owner"]))
        if root is None:
            return await self._open_on(launcher, spec, None)
        try:
            spec = replace(spec, env={**root.env, **spec.env}, user=spec.user or root.user)
            sandbox = await self._open_on(launcher, spec, root.directory)
        except BaseException:
            root.release()
            raise
        self._roots[sandbox.box] = root
        return sandbox

    def _owner(self, owner: int) -> Owner:
        """Who owns unpacked roots: who id 0 of a box is on the host; the boxes' one user where that is negative."""
        if owner >= 0:
            return Owner(owner, alone=False)
        return Owner(os.geteuid() if self._run_as is None else self._run_as, alone=True)

    async def _open_on(self, launcher: LauncherProcess, spec: SandboxSpec, base: str | None) -> NamespaceSandbox:
        if spec.layers:
            await self._layers.ensure(spec.layers)
        plan = _plan(spec, launcher.facts)
        if base is not None:
            plan["base"] = base
        return await self._open(launcher, spec, plan)

    async def _open(self, launcher: LauncherProcess, spec: SandboxSpec, plan: dict[str, Any]) -> NamespaceSandbox:
        self._count += 1
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            sandbox = NamespaceSandbox(self, launcher, f"{self._count}", spec, ours)
            self._boxes[sandbox.box] = sandbox
            try:
                launcher.channel.send({"op": "create", "box": sandbox.box, "plan": plan}, b"", (theirs.fileno(),))
                theirs.close()
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
        await asyncio.gather(*(box.close() for box in list(self._boxes.values())))
        await self._keeper.close()
        self._sources.close()

    # The launcher.

    async def _try(self, launcher: LauncherProcess) -> None:
        spec = SandboxSpec()
        trial = await self._open(launcher, spec, _plan(spec, launcher.facts))
        result = await trial.exec(_TRIAL, timeout_s=OPEN_S)
        await trial.close()
        if not result.ok:
            raise SandboxStartError(f"a trial command failed: {result.stderr.decode(errors='replace')}")

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
        root = self._roots.pop(sandbox.box, None)
        if root is not None:
            root.release()

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
        launcher = self._keeper.launcher
        if launcher is not None and not launcher.channel.closed:
            launcher.channel.send({"op": "drop", "layer": layer, "id": 0})


def _refuse(spec: SandboxSpec, facts: dict[str, Any]) -> None:
    if spec.network not in ("none", "host"):
        raise SandboxStartError(f"network {spec.network!r}: the namespace sandbox knows none and host")
    check_mounts(spec)
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
        "mounts": [list(mount) for mount in spec.mounts],
        "limits": [spec.memory_bytes, spec.cpus, spec.processes, disk, spec.inodes],
        "network": spec.network,
        "user": spec.user,
        "workdir": os.path.normpath(spec.workdir),
    }
