"""Makes local sandboxes below one temporary directory; a janitor removes it whatever becomes of this process."""

from __future__ import annotations

import asyncio
import subprocess
import tempfile
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rollout_engine.disk import ELSEWHERE, full, is_full, on_disk
from rollout_engine.errors import SandboxStartError, SandboxUnavailable
from rollout_engine.sandboxes import files
from rollout_engine.sandboxes.base import EVERYTHING, Recipe, SandboxSpec
from rollout_engine.sandboxes.local.layer import Layer
from rollout_engine.sandboxes.local.sandbox import CLOSE_S, DEFAULT_PATH, MARK, LocalSandbox, check_user
from rollout_engine.sandboxes.preparing import Together, carry_out, recipe_name

_JANITOR = r"""
read _
round=0
while [ $round -lt 50 ]; do
  found=$(grep -alzs "^$1=$2\." /proc/[0-9]*/environ)
  [ -n "$found" ] || break
  for file in $found; do pid=${file#/proc/}; kill -9 "${pid%/environ}" 2>/dev/null; done
  round=$((round + 1))
done
rm -rf -- "$3"
"""
"""Waits for the end of its standard input, that is of its provider or the whole host, and cleans up."""


class LocalProvider:
    """Makes local sandboxes below one temporary directory, which goes with them, also after a SIGKILL."""

    def __init__(self, directory: str | Path | None = None) -> None:
        """`directory`: where the temporary directory is made; None: the system's own place."""
        self._parent = directory
        self._id = uuid.uuid4().hex
        self._home: Path | None = None
        self._janitor: subprocess.Popen[bytes] | None = None
        self._sandboxes: set[LocalSandbox] = set()
        self._layers: dict[str, Layer] = {}
        self._prepared: dict[str, str] = {}
        self._making = Together()
        self._count = 0

    @property
    def name(self) -> str:
        return "local"

    async def open(self, spec: SandboxSpec) -> LocalSandbox:
        """A fresh directory. Refuses what this backend cannot give: images, other users, held limits."""
        self._refuse(spec)
        layers = [self._layer(name) for name in spec.layers]
        try:
            root = self._place("sandbox")
            for folder in ("work", "tmp"):
                (root / folder).mkdir(parents=True)
            for layer in layers:
                await asyncio.to_thread(layer.put_into, root / "work")
        except OSError as error:
            if is_full(error):
                raise full(error, self._parent or tempfile.gettempdir(), ELSEWHERE) from error
            raise SandboxStartError(f"cannot make a directory for a local sandbox: {error}") from error
        sandbox = LocalSandbox(spec, root, f"{self._id}.{root.name}", self.keep, self._sandboxes.discard)
        self._sandboxes.add(sandbox)
        return sandbox

    async def prepare(self, spec: SandboxSpec, recipe: Recipe) -> SandboxSpec:
        name = recipe_name(spec, recipe)
        if self._prepared.get(name) not in self._layers:
            self._prepared[name] = await self._making.make(name, lambda: self._carry_out(spec, recipe))
        return replace(spec, layers=(*spec.layers, self._prepared[name]))

    async def _carry_out(self, spec: SandboxSpec, recipe: Recipe) -> str:
        sandbox = await self.open(spec)
        try:
            await carry_out(recipe, sandbox)
            return await sandbox.export([EVERYTHING])
        finally:
            await sandbox.close()

    async def release(self, layer: str) -> None:
        held = self._layers.pop(layer, None)
        if held is not None:
            await asyncio.to_thread(files.remove, held.directory)

    async def keep(self, work: Path, paths: Sequence[str], max_bytes: int) -> str:
        """For `LocalSandbox.export`: copies what is at these paths below `work` into a layer of its own."""
        layer = Layer(self._place("layer"), tuple(paths))
        with on_disk(layer.directory, ELSEWHERE):
            await asyncio.to_thread(layer.take_from, work, max_bytes)
        self._layers[layer.directory.name] = layer
        return layer.directory.name

    def _layer(self, name: str) -> Layer:
        if name not in self._layers:
            raise SandboxStartError(f"layer {name} is gone: it was released")
        return self._layers[name]

    def _place(self, what: str) -> Path:
        self._count += 1
        return self._start() / f"{what}-{self._count}"

    async def close(self) -> None:
        await asyncio.gather(*(sandbox.close() for sandbox in list(self._sandboxes)))
        janitor, self._janitor, self._home = self._janitor, None, None
        if janitor is not None:
            await asyncio.to_thread(_dismiss, janitor)

    def _refuse(self, spec: SandboxSpec) -> None:
        wanted = [what for what in ("image", "directory", "tar") if getattr(spec, what)]
        if wanted:
            raise SandboxUnavailable(f"the local sandbox has no {wanted[0]}: it runs on the host's own files")
        if spec.mounts:
            raise SandboxUnavailable("the local sandbox mounts nothing: its programs are the host's own")
        if spec.require_limits:
            raise SandboxUnavailable("the local sandbox holds no limits, and the task requires them")
        check_user(spec.user)

    def _start(self) -> Path:
        if self._home is None:
            home = Path(tempfile.mkdtemp(prefix="rollout-local-", dir=self._parent))
            self._janitor = subprocess.Popen(
                ["/bin/sh", "-c", _JANITOR, "janitor", MARK, self._id, str(home)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env={"PATH": DEFAULT_PATH},
                start_new_session=True,
            )
            self._home = home
        return self._home


def _dismiss(janitor: subprocess.Popen[bytes]) -> None:
    try:
        janitor.communicate(timeout=CLOSE_S)
    except subprocess.TimeoutExpired:
        janitor.kill()
        janitor.communicate()
