"""Removes what launchers left that were killed: their control groups, once the last process in them is gone.

Processes, mounts and files need no removal: they end with the box's first process, which ends with its launcher.
"""

from __future__ import annotations

import asyncio

from rollout_engine.sandboxes.namespace.helper import limits

_TRIES, _PAUSE_S = 40, 0.1


def leftovers() -> list[str]:
    """The directories of control groups whose launcher is dead."""
    return limits.dead_groups(limits.find_controllers())


async def reap() -> None:
    """Kills and removes what dead launchers left, in a few seconds at most; silent where that takes longer."""
    controllers = limits.find_controllers()
    for _ in range(_TRIES):
        limits.remove_dead(controllers)
        if not limits.dead_groups(controllers):
            return
        await asyncio.sleep(_PAUSE_S)
