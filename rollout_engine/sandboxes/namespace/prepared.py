"""Layers that a provider keeps: prepared tasks, which can be made anew, and exports, which cannot."""

from __future__ import annotations

import collections
from collections.abc import Awaitable, Callable, Sequence

from rollout_engine.errors import SandboxStartError
from rollout_engine.sandboxes.base import EVERYTHING, Recipe, SandboxSpec
from rollout_engine.sandboxes.namespace.sandbox import NamespaceSandbox
from rollout_engine.sandboxes.preparing import Together, carry_out, recipe_name


class LayerBook:
    """Which layers the launcher has. The least recently used go first when there are too many."""

    def __init__(
        self, most: int, open_box: Callable[[SandboxSpec], Awaitable[NamespaceSandbox]], drop: Callable[[str], None]
    ) -> None:
        self._most, self._open, self._drop = most, open_box, drop
        self._held: collections.OrderedDict[str, None] = collections.OrderedDict()
        self._recipes: collections.OrderedDict[str, tuple[SandboxSpec, Recipe]] = collections.OrderedDict()
        self._making = Together()

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

    async def prepare(self, spec: SandboxSpec, recipe: Recipe) -> str:
        """Makes the layer of a recipe unless it is there; many callers share one making."""
        name = f"prepared-{recipe_name(spec, recipe)}"
        self._recipes[name] = (spec, recipe)
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
            await self._making.make(name, lambda name=name: self._make(name))  # type: ignore[misc]

    async def _make(self, name: str) -> str:
        spec, recipe = self._recipes[name]
        box = await self._open(spec)
        try:
            await carry_out(recipe, box)
            return await box.export([EVERYTHING], name=name)
        finally:
            await box.close()
