"""Listening by a forwarder that carries its connections over its own stdin and stdout: for a daemon wherever it is."""

from __future__ import annotations

import contextlib
import uuid
from pathlib import Path

from rollout_engine.sandboxes.base import Listener
from rollout_engine.sandboxes.docker import forwarder
from rollout_engine.sandboxes.docker.links import Links
from rollout_engine.sandboxes.docker.running import Executor
from rollout_engine.sandboxes.docker.unixsockets import bound


async def listen(executor: Executor, folder: Path, port: int) -> Listener:
    """The socket is in a folder of this host alone. Raises as `mounted.listen`."""
    path = folder / uuid.uuid4().hex[:8]
    async with contextlib.AsyncExitStack() as undo:
        undo.callback(path.unlink, missing_ok=True)
        sock = undo.enter_context(bound(path))
        found = await forwarder.start(executor, ["carry", str(port)])
        undo.push_async_callback(found.end)
        over = forwarder.watched(Links(found.talk, path).carry(found.said))
        undo.push_async_callback(forwarder.dismiss, over)
        return Listener(sock, found.port, undo.pop_all().aclose, over)
