"""What every backend does to prepare a sandbox once for many: name a recipe, carry it out, and share the result."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Coroutine
from dataclasses import asdict, dataclass

from rollout_engine.errors import ExecTimeout, SandboxStartError, SetupError, SetupTimeout, clip, crossing
from rollout_engine.sandboxes.base import Recipe, Sandbox, SandboxSpec
from rollout_engine.waiting import awaiting


def recipe_name(spec: SandboxSpec, recipe: Recipe) -> str:
    """Hex digest (96 bits): the same for the same content, whoever asks."""
    described = {**asdict(spec), "label": "", "env": dict(spec.env)}
    files = {path: hashlib.sha256(data).hexdigest() for path, data in recipe.files.items()}
    text = json.dumps([described, files, recipe.commands], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


async def carry_out(recipe: Recipe, sandbox: Sandbox) -> None:
    """Puts the files in place and runs the commands. Raises SetupError where one fails, SetupTimeout if it is late."""
    for path, data in recipe.files.items():
        with awaiting(f"file {path} to be put in place"), crossing(SetupError, f"file {path}"):
            await sandbox.write_file(path, data, mode=0o755 if data.startswith(b"#!") else 0o644)
    for command in recipe.commands:
        try:
            with awaiting(f"setup command {command!r}"):
                result = await sandbox.exec(["sh", "-c", command], timeout_s=recipe.timeout_s)
        except ExecTimeout as error:
            raise SetupTimeout(clip(f"setup command {command!r}: {error}")) from error
        if not result.ok:
            output = (result.stdout + result.stderr)[-1000:].decode(errors="replace")
            raise SetupError(clip(f"setup command {command!r} exited with {result.exit_code}: {output}"))


@dataclass(slots=True)
class _Making:
    task: asyncio.Task[str]
    waiting: int = 0


class Together:
    """Makes a thing once for all who ask for it at the same time. It ends with the last who waits for it."""

    def __init__(self) -> None:
        self._going: dict[str, _Making] = {}

    async def make(self, name: str, make: Callable[[], Coroutine[None, None, str]]) -> str:
        making = self._going.get(name)
        if making is None:
            making = self._going[name] = _Making(asyncio.create_task(_without_exit(make)))
        making.waiting += 1
        try:
            return await asyncio.shield(making.task)
        finally:
            making.waiting -= 1
            if self._going.get(name) is making and (making.task.done() or not making.waiting):
                del self._going[name]
            if not making.waiting:
                await _end(making.task)


async def _without_exit(make: Callable[[], Coroutine[None, None, str]]) -> str:
    """A SystemExit that left a task would end the event loop, and with it everything else."""
    try:
        return await make()
    except (SystemExit, KeyboardInterrupt) as error:
        raise SandboxStartError(f"{type(error).__name__}: {error}") from error


async def _end(task: asyncio.Task[str]) -> None:
    """Nobody wants the result any more: what was made for it is taken down before its last caller goes on."""
    if not task.done():
        task.cancel()
        await asyncio.wait({task})
    if not task.cancelled():
        task.exception()
