"""Listening by a Unix socket of this host that is mounted in the container: a forwarder there leads the port to it."""

from __future__ import annotations

import contextlib
import uuid
from pathlib import Path

from rollout_engine.sandboxes.base import Listener
from rollout_engine.sandboxes.docker import forwarder
from rollout_engine.sandboxes.docker.running import Executor
from rollout_engine.sandboxes.docker.unixsockets import bound

FOLDER = "/.rollout-sockets"


async def listen(executor: Executor, folder: Path, port: int) -> Listener:
    """Raises OSError where the port is taken, SandboxError where no forwarder can be started."""
    path = folder / uuid.uuid4().hex[:8]
    async with contextlib.AsyncExitStack() as undo:
        undo.callback(path.unlink, missing_ok=True)
        sock = undo.enter_context(bound(path))
        found = await forwarder.start(executor, ["forward", str(port), f"{FOLDER}/{path.name}"])
        undo.push_async_callback(found.end)
        over = forwarder.watched(forwarder.ended(found.talk))
        undo.push_async_callback(forwarder.dismiss, over)
        return Listener(sock, found.port, undo.pop_all().aclose, over)
