"""Layers that a provider keeps: prepared tasks, which can be made anew, and exports, which cannot."""

from __future__ import annotations

import asyncio
import collections
import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from rollout_engine.errors import ExecTimeout, SandboxStartError, SetupError, clip
from rollout_engine.sandboxes.base import SandboxSpec
from rollout_engine.sandboxes.namespace.sandbox import NamespaceSandbox


@dataclass(frozen=True, slots=True)
class Recipe:
    """What makes a prepared layer: files put in place, then commands run, in a sandbox of this spec."""

    spec: SandboxSpec
    files: Mapping[str, bytes] = field(default_factory=dict)
    commands: tuple[tuple[str, ...], ...] = ()
    timeout_s: float = 600.0

    @property
    def name(self) -> str:
        """The same for the same content, whoever asks."""
        spec = {**asdict(self.spec), "label": "", "env": dict(self.spec.env)}
        files = {path: hashlib.sha256(data).hexdigest() for path, data in self.files.items()}
        text = json.dumps([spec, files, self.commands], sort_keys=True, default=str)
        return f"prepared-{hashlib.sha256(text.encode()).hexdigest()[:24]}"

    async def run(self, box: NamespaceSandbox) -> None:
        """Raises SetupError where a command does not succeed."""
        for path, data in self.files.items():
            await box.write_file(path, data, mode=0o755 if data.startswith(b"#!") else 0o644)
        for command in self.commands:
            try:
                result = await box.exec(command, timeout_s=self.timeout_s)
            except ExecTimeout as error:
                raise SetupError(f"setup: {error}") from error
            if not result.ok:
                output = (result.stdout + result.stderr)[-1000:].decode(errors="replace")
                raise SetupError(clip(f"setup command {command} ended with {result.exit_code}: {output}"))


class LayerBook:
    """Which layers the launcher has. The least recently used go first when there are too many."""

    def __init__(
        self, most: int, open_box: Callable[[SandboxSpec], Awaitable[NamespaceSandbox]], drop: Callable[[str], None]
    ) -> None:
        self._most, self._open, self._drop = most, open_box, drop
        self._held: collections.OrderedDict[str, None] = collections.OrderedDict()
        self._recipes: collections.OrderedDict[str, Recipe] = collections.OrderedDict()
        self._making: dict[str, asyncio.Task[None]] = {}

    def lost(self) -> None:
        """The launcher is gone, and with it every layer."""
        self._held.clear()

    def add(self, name: str) -> None:
        self._held[name] = None
        while len(self._held) > self._most:
            self.drop(next(iter(self._held)))

    def drop(self, name: str) -> None:
        if self._held.pop(name, self) is not self:
            self._drop(name)

    async def prepare(self, recipe: Recipe) -> str:
        """Makes the layer of a recipe unless it is there; many callers share one making."""
        name = recipe.name
        self._recipes[name] = recipe
        while len(self._recipes) > 4 * self._most:
            self._recipes.popitem(last=False)
        await self.ensure([name])
        return name

    async def ensure(self, names: Sequence[str]) -> None:
        """Sees to it that the launcher has these layers. Raises SandboxStartError for one that is lost."""
        for name in names:
            if name in self._held:
                self._held.move_to_end(name)
                continue
            if name not in self._recipes:
                raise SandboxStartError(f"layer {name} is gone: it was released, or its launcher ended")
            if name not in self._making:
                task = self._making[name] = asyncio.create_task(self._make(name))
                task.add_done_callback(lambda _, name=name: self._making.pop(name))  # type: ignore[misc]
            await asyncio.shield(self._making[name])

    async def _make(self, name: str) -> None:
        recipe = self._recipes[name]
        box = await self._open(recipe.spec)
        try:
            await recipe.run(box)
            await box.export(["*"], name=name)
        finally:
            await box.close()
