"""Sandboxes of two kinds in one run: docker for tasks that name an image, namespaces for the others."""

from __future__ import annotations

from rollout_engine.sandboxes.base import Recipe, Sandbox, SandboxProvider, SandboxSpec
from rollout_engine.sandboxes.docker import DockerProvider
from rollout_engine.sandboxes.namespace import NamespaceProvider

RUN = "chaos"
"""The label of all containers."""


class Mixed:
    """Belongs to the event loop that first opens a sandbox. Whoever makes it calls `close`.

    Its docker part removes at the end what killed hosts left, also where no task of its own was for docker.
    """

    name = "mixed"

    def __init__(self) -> None:
        self._namespace = NamespaceProvider()
        self._docker = DockerProvider(run=RUN)

    def _for(self, spec: SandboxSpec) -> SandboxProvider:
        return self._namespace if spec.image is None else self._docker

    async def open(self, spec: SandboxSpec) -> Sandbox:
        return await self._for(spec).open(spec)

    async def prepare(self, spec: SandboxSpec, recipe: Recipe) -> SandboxSpec:
        return await self._for(spec).prepare(spec, recipe)

    async def release(self, layer: str) -> None:
        for provider in (self._namespace, self._docker):
            await provider.release(layer)

    async def close(self) -> None:
        for provider in (self._docker, self._namespace):
            await provider.close()
