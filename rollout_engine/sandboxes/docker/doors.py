"""One provider's way of listening in its containers, and what it takes: see reach.py."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rollout_engine.errors import SandboxUnavailable
from rollout_engine.sandboxes.base import Listener
from rollout_engine.sandboxes.docker import carried, mounted, network, supply
from rollout_engine.sandboxes.docker.engine import Engine
from rollout_engine.sandboxes.docker.reach import FIX, Facts, Reach, Way, facts_of, reach
from rollout_engine.sandboxes.docker.running import Executor
from rollout_engine.sandboxes.docker.unixsockets import Folders

log = logging.getLogger(__name__)


class Doors:
    """`decide` before all else; a container is made with its `mount`, if there is one, and `remove`d with it."""

    def __init__(self, engine: Engine, wanted: Way | None) -> None:
        self._engine, self._wanted = engine, wanted
        self._facts = Facts(local=False, seen=False, privileged=False, supervised=False)
        self._reach = Reach(None, "it was not decided")
        self._folders, self._opening = Folders(), asyncio.Lock()

    async def decide(self, info: Mapping[str, Any], supervise: bool) -> None:
        supervised = supervise and await supply.can_supply(info)
        self._facts = await asyncio.to_thread(facts_of, self._engine.address, supervised)
        self._reach = reach(self._facts, self._wanted)
        if self._reach.way != "setns":
            await self._open()

    def mount(self, name: str) -> Path | None:
        """The folder that the container of this name is to be given."""
        return self._folders.make(name) if self._reach.way == "socket" else None

    def unseen(self, folder: Path) -> None:
        """The daemon refused a folder, and nothing else: it has other files than this process. No more are mounted."""
        self._turn(
            f"the daemon does not see {folder.parent.parent} of this process: set TMPDIR to a folder that both have at "
            "the same path"
        )

    async def listen(self, executor: Executor, container: str, name: str, port: int) -> Listener:
        """Raises SandboxUnavailable where there is no way."""
        if self._reach.way == "setns":
            try:
                return await network.listen(self._engine, container, port)
            except SandboxUnavailable as error:
                self._turn(str(error))
        await self._open()  # also one that comes while another has just turned
        folder = self._folders.make(name)
        if folder is None or self._reach.way is None:
            raise SandboxUnavailable(
                f"docker: no program in a container can reach this host without a network: {self._reach.why}; {FIX}"
            )
        if self._reach.way == "socket":
            return await mounted.listen(executor, folder, port)
        return await carried.listen(executor, folder, port)

    def remove(self, name: str) -> None:
        self._folders.remove(name)

    def close(self) -> None:
        self._folders.close()

    def _turn(self, why: str) -> None:
        """The daemon's socket is here, and the daemon is not: so another way is taken."""
        self._facts = replace(self._facts, local=False)
        self._reach = replace(reach(self._facts, self._wanted), why=why)
        if self._reach.way is None:
            log.warning("docker: agent programs have no way to their proxy: %s", why)
        else:
            log.info("docker: agent programs reach their proxy by a forwarder's stream: %s", why)

    async def _open(self) -> None:
        if self._reach.way is None:
            return
        try:
            async with self._opening:
                if not self._folders.are_open:
                    await asyncio.to_thread(self._folders.open)
        except OSError as error:
            self._reach = Reach(None, f"there is no place for sockets: {error}")
