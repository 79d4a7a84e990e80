"""How a container ended that is gone: from the events that the daemon still remembers."""

from __future__ import annotations

import time
from typing import Any, cast

from docker import APIClient

from rollout_engine.errors import SandboxError
from rollout_engine.sandboxes.docker.engine import Engine
from rollout_engine.sandboxes.docker.failures import died, out_of_memory

_NEAR_NS = 5 * 10**9
"""An end within this time of an out-of-memory event is that event's; the daemon's own clock counts."""
_KILLED = "137"


async def why_ended(engine: Engine, container: str, name: str) -> SandboxError:
    """Why a container's stream has ended: the container did, or the daemon."""
    try:
        found = await engine.ask("inspect", lambda api: api.containers(all=True, filters={"id": container}))
        if await engine.ask("events", lambda api: _ended_for_memory(api, container)):
            return out_of_memory(name)
    except SandboxError as error:
        return error
    return died(name, found[0]["Status"] if found else "its container is gone")


def _ended_for_memory(api: APIClient, container: str) -> bool:
    """Whether the kernel killed its first process for memory: nothing inside can, and nobody outside asked to."""
    now = int(time.time())
    filters = {"container": [container], "event": ["oom", "die", "kill"]}
    seen = cast("Any", api).events(since=0, until=now + 1, filters=filters, decode=True)
    last = {str(event["Action"]): event for event in seen}
    if "oom" not in last or "die" not in last or "kill" in last:
        return False
    if last["die"]["Actor"]["Attributes"].get("exitCode") != _KILLED:
        return False
    return abs(int(last["die"]["timeNano"]) - int(last["oom"]["timeNano"])) < _NEAR_NS
