"""The `auto` sandbox: the first backend that this host has, and no isolation only for tasks marked as trusted."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rollout_engine.errors import SandboxUnavailable
from rollout_engine.sandboxes.base import Sandbox, SandboxProvider, SandboxSpec


class AutoProvider:
    """Tries isolating backends in their order, and keeps to the first that opens a sandbox."""

    def __init__(
        self, isolating: Mapping[str, Callable[[], SandboxProvider]], local: Callable[[], SandboxProvider]
    ) -> None:
        """Factories by name, best first; `local` is for trusted tasks where none of the others works."""
        self._isolating, self._make_local = isolating, local
        self._made: dict[str, SandboxProvider] = {}
        self._chosen: str | None = None

    @property
    def name(self) -> str:
        return self._chosen or ("local" if "local" in self._made else "auto")

    async def open(self, spec: SandboxSpec) -> Sandbox:
        if self._chosen is not None:
            return await self._made[self._chosen].open(spec)
        reasons = []
        for name, make in self._isolating.items():
            try:
                sandbox = await self._provider(name, make).open(spec)
            except SandboxUnavailable as error:
                reasons.append(f"{name}: {error}")
            else:
                self._chosen = name
                return sandbox
        if spec.trusted:
            return await self._provider("local", self._make_local).open(spec)
        raise SandboxUnavailable(
            f"no isolating sandbox works on this host ({'; '.join(reasons) or 'none is installed'}); "
            "set trusted = true in the task's environment, or --sandbox local, to run without isolation"
        )

    async def close(self) -> None:
        for provider in self._made.values():
            await provider.close()

    def _provider(self, name: str, make: Callable[[], SandboxProvider]) -> SandboxProvider:
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]
