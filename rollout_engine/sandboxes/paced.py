"""A provider that makes only so many sandboxes a minute, because what is behind it takes no more."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping

from rollout_engine.bucket import Bucket
from rollout_engine.sandboxes.base import Recipe, Sandbox, SandboxProvider, SandboxSpec
from rollout_engine.waiting import awaiting

KNOWN_RECIPES = 1024
"""Recipes that are remembered as carried out; one that was forgotten costs a turn again."""
WAITING_SHARE = 4
"""Of a phase's limit, one part in so many may go by in waiting for a turn."""


class PacedProvider:
    """Passes everything on; each creation waits for its turn before, in order of arrival."""

    def __init__(self, provider: SandboxProvider, per_minute: float) -> None:
        self._provider = provider
        self._bucket = Bucket(per_minute / 60.0, burst=max(1.0, per_minute / 60.0))
        self._line = asyncio.Lock()
        self._what = f"its turn to create a sandbox ({provider.name} is held to {per_minute:g} a minute)"
        self._prepared: OrderedDict[int, Recipe] = OrderedDict()
        """By identity; the recipe itself is kept, so that its identity is nobody else's."""

    @property
    def name(self) -> str:
        return self._provider.name

    async def open(self, spec: SandboxSpec) -> Sandbox:
        await self._turn()
        return await self._provider.open(spec)

    async def prepare(self, spec: SandboxSpec, recipe: Recipe) -> SandboxSpec:
        """One sandbox is made for all who ask; whoever asks first waits for its turn."""
        if id(recipe) in self._prepared:
            return await self._provider.prepare(spec, recipe)
        self._remember(recipe)
        try:
            await self._turn()
            return await self._provider.prepare(spec, recipe)
        except BaseException:
            self._prepared.pop(id(recipe), None)
            raise

    async def release(self, layer: str) -> None:
        await self._provider.release(layer)

    async def close(self) -> None:
        await self._provider.close()

    async def _turn(self) -> None:
        clock = asyncio.get_running_loop().time
        with awaiting(self._what):
            async with self._line:
                while (wait := self._bucket.wait_s(1.0, clock())) > 0:
                    await asyncio.sleep(wait)
                self._bucket.take(1.0, clock())

    def _remember(self, recipe: Recipe) -> None:
        self._prepared[id(recipe)] = recipe
        while len(self._prepared) > KNOWN_RECIPES:
            self._prepared.popitem(last=False)


def at_once(wanted: int, rates: Mapping[str, float], backend: str, phase_s: float) -> int:
    """How many of `wanted` may be in a phase at once, so that none spends most of its limit waiting for its turn."""
    chosen = [rate for name, rate in rates.items() if backend in (name, "auto")]
    if not chosen:
        return wanted
    return max(1, min(wanted, int(min(chosen) / 60.0 * phase_s / WAITING_SHARE)))
