"""What every backend does to prepare a sandbox once for many: name a recipe, carry it out, and share the result."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable
from dataclasses import asdict

from rollout_engine.errors import ExecTimeout, SetupError, clip
from rollout_engine.sandboxes.base import Recipe, Sandbox, SandboxSpec


def recipe_name(spec: SandboxSpec, recipe: Recipe) -> str:
    """Hex digest (96 bits): the same for the same content, whoever asks."""
    described = {**asdict(spec), "label": "", "env": dict(spec.env)}
    files = {path: hashlib.sha256(data).hexdigest() for path, data in recipe.files.items()}
    text = json.dumps([described, files, recipe.commands], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


async def carry_out(recipe: Recipe, sandbox: Sandbox) -> None:
    """Puts the files in place and runs the commands. Raises SetupError where one does not succeed."""
    for path, data in recipe.files.items():
        await sandbox.write_file(path, data, mode=0o755 if data.startswith(b"#!") else 0o644)
    for command in recipe.commands:
        try:
            result = await sandbox.exec(["sh", "-c", command], timeout_s=recipe.timeout_s)
        except ExecTimeout as error:
            raise SetupError(f"setup command {command!r}: {error}") from error
        if not result.ok:
            output = (result.stdout + result.stderr)[-1000:].decode(errors="replace")
            raise SetupError(clip(f"setup command {command!r} ended with {result.exit_code}: {output}"))


class OnceEach:
    """Makes the thing of each name once, however many ask for it at once; a failure is not kept."""

    def __init__(self) -> None:
        self._made: dict[str, asyncio.Task[str]] = {}

    async def get(self, name: str, make: Callable[[], Awaitable[str]]) -> str:
        task = self._made.get(name)
        if task is None:
            task = self._made[name] = asyncio.ensure_future(self._make(name, make))
        return await asyncio.shield(task)

    async def _make(self, name: str, make: Callable[[], Awaitable[str]]) -> str:
        try:
            return await make()
        except BaseException:
            del self._made[name]
            raise
