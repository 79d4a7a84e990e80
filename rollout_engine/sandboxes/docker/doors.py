"""One provider's way of listening in its containers, and what it takes: see reach.py."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollout_engine.errors import SandboxUnavailable
from rollout_engine.sandboxes.base import Listener
from rollout_engine.sandboxes.docker import mounted, network, supply
from rollout_engine.sandboxes.docker.engine import Engine
from rollout_engine.sandboxes.docker.mounted import Folders
from rollout_engine.sandboxes.docker.reach import FIX, Reach, Way, facts_of, reach
from rollout_engine.sandboxes.docker.running import Executor

log = logging.getLogger(__name__)


class Doors:
    """`decide` before all else; a container is made with its `folder`, if there is one, and `remove`d with it."""

    def __init__(self, engine: Engine, wanted: Way | None) -> None:
        self._engine, self._wanted = engine, wanted
        self._reach = Reach(None, "it was not decided")
        self._folders = Folders()

    async def decide(self, info: Mapping[str, Any], supervise: bool) -> None:
        supervised = supervise and await supply.can_supply(info)
        facts = await asyncio.to_thread(facts_of, self._engine.address, supervised)
        self._reach = reach(facts, self._wanted)
        if self._reach.way == "socket":
            try:
                await asyncio.to_thread(self._folders.open)
            except OSError as error:
                self._reach = Reach(None, f"there is no place for sockets: {error}")

    def folder(self, name: str) -> Path | None:
        """What the container of this name is to be given."""
        return self._folders.make(name)

    def unseen(self, folder: Path) -> None:
        """The daemon refused a folder, and nothing else: it has other files than this process. No more are made."""
        why = (
            f"the daemon does not see {folder.parent.parent} of this process: set TMPDIR to a folder that both have at "
            "the same path"
        )
        log.warning("docker: agent programs have no way to their proxy: %s", why)
        self._reach = Reach(None, why)
        self._folders.close()

    async def listen(self, executor: Executor, container: str, folder: Path | None, port: int) -> Listener:
        """Raises SandboxUnavailable where there is no way."""
        if self._reach.way == "setns":
            return await network.listen(self._engine, container, port)
        if folder is None or self._reach.way is None:
            raise SandboxUnavailable(
                f"docker: no program in a container can reach this host without a network: {self._reach.why}; {FIX}"
            )
        return await mounted.listen(executor, folder, port)

    def remove(self, name: str) -> None:
        self._folders.remove(name)

    def close(self) -> None:
        self._folders.close()
