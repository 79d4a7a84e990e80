"""The layers that a provider knows: images of prepared tasks, which can be made anew, and exports, which cannot."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import replace

from rollout_engine.errors import SandboxStartError
from rollout_engine.sandboxes.base import Recipe, SandboxSpec
from rollout_engine.sandboxes.docker.archive import Layer
from rollout_engine.sandboxes.docker.images import Image, Images, is_prepared
from rollout_engine.sandboxes.docker.sandbox import DockerSandbox
from rollout_engine.sandboxes.preparing import Together, carry_out, recipe_name

_RECIPES_PER_IMAGE = 4


class Layers:
    """`open_one` is the provider's."""

    def __init__(self, images: Images, open_one: Callable[[SandboxSpec], Awaitable[DockerSandbox]], limit: int) -> None:
        self._images, self._open, self._limit = images, open_one, limit
        self._recipes: collections.OrderedDict[str, tuple[SandboxSpec, Recipe]] = collections.OrderedDict()
        self._exports: dict[str, Layer] = {}
        self._making = Together()
        self._numbers = itertools.count(1)

    async def prepare(self, spec: SandboxSpec, recipe: Recipe) -> SandboxSpec:
        """The recipe is carried out at once, and again only where its image had to go since."""
        tag = self._images.prepared_tag(recipe_name(spec, recipe))
        self._recipes[tag] = (spec, recipe)
        self._recipes.move_to_end(tag)
        while len(self._recipes) > _RECIPES_PER_IMAGE * self._limit:
            self._recipes.popitem(last=False)
        await self._ensure(tag)
        return replace(spec, layers=(*spec.layers, tag))

    async def resolve(self, spec: SandboxSpec) -> tuple[Image, list[Layer]]:
        """The image to start from, and what is put over it, lowest first. A prepared image holds all below it."""
        over: list[str] = []
        tag: str | None = None
        for name in spec.layers:
            if is_prepared(name):
                tag, over = name, []
            else:
                over.append(name)
        exports = [self._export(name) for name in over]
        if tag is None:
            return await self._images.resolve(spec), exports
        await self._ensure(tag)
        return await self._images.named(tag), exports

    def keep(self, layer: Layer) -> str:
        name = f"export-{next(self._numbers)}"
        self._exports[name] = layer
        return name

    def release(self, name: str) -> None:
        layer = self._exports.pop(name, None)
        if layer is not None:
            layer.close()

    def close(self) -> None:
        for name in list(self._exports):
            self.release(name)

    def _export(self, name: str) -> Layer:
        if name not in self._exports:
            raise _gone(name)
        return self._exports[name]

    async def _ensure(self, tag: str) -> None:
        if self._images.use(tag):
            return
        if tag not in self._recipes:
            raise _gone(tag)
        spec, recipe = self._recipes[tag]
        await self._making.make(tag, lambda: self._make(tag, replace(spec, require_limits=False), recipe))

    async def _make(self, tag: str, spec: SandboxSpec, recipe: Recipe) -> str:
        """On no limited disk: that is a volume, and no part of an image."""
        image, _ = await self.resolve(spec)
        sandbox = await self._open(spec)
        try:
            await carry_out(recipe, sandbox)
            await self._images.commit(sandbox.container, tag, image.user)
        finally:
            await sandbox.close()
        return tag


def _gone(name: str) -> SandboxStartError:
    return SandboxStartError(f"docker: layer {name} is gone: it was released, or is another provider's")
