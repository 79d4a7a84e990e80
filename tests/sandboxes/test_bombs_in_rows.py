"""Agents that try to exhaust the machine, as whole rollouts on every backend: each ends in its row, its neighbour
scores, and the host's event loop goes on.

python -m pytest tests/sandboxes/test_bombs_in_rows.py
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from rollout_engine.sandboxes.base import SandboxProvider
from rollout_engine.specs import Task
from rollout_engine.types import RolloutRecord
from tests.helpers import make_config, scripted
from tests.rig import bench
from tests.sandboxes.backends import ISOLATING, Kept, working
from tests.sandboxes.busy import Heartbeat

ROLLOUT_S = 300.0
LIMITS: dict[str, Any] = {"memory_mb": 192, "processes": 64, "disk_mb": 24, "inodes": 2000}
FORKS = """
import os, time
while True:
    try:
        if os.fork() == 0: os.setsid()
    except OSError: time.sleep(0.01)
"""
HOG = "x = []\nwhile True: x.append(bytearray(10 ** 6))\n"
FILES = "n = 0\nwhile n < 10 ** 6:\n    open('f%d' % n, 'w').close()\n    n += 1\n"
BOMBS = {
    "processes": "python3 forks.py; true",
    "memory": "python3 hog.py; true",
    "memory of many": "for i in 1 2 3 4 5 6; do python3 hog.py & done; wait",
    "disk": "head -c 1000000000 /dev/zero > fill; head -c 1000000000 /dev/zero > /tmp/fill; true",
    "files": "python3 files.py; true",
    "memory as files": "head -c 1000000000 /dev/zero > /dev/shm/fill; true",
    "output": "yes & yes >&2",
    "ignored signals": "trap '' TERM INT HUP; while :; do sleep 1; done",
}
NEEDS_A_LIMITED_DISK = {"disk", "files"}
"""On docker: without one these fill the daemon's own disk, which docs/security.md says."""


@pytest.fixture(params=ISOLATING)
async def provider(request: pytest.FixtureRequest) -> AsyncIterator[SandboxProvider]:
    made = await working(request.param)
    yield made
    await made.close()


def task_of(bomb: str, environment: dict[str, Any]) -> Task:
    return Task(
        task_id=bomb or "neighbour", prompt="Write 42 into answer.txt.", environment=environment,
        files={"forks.py": FORKS, "hog.py": HOG, "files.py": FILES},
        verifier={"type": "script", "command": '[ "$(cat answer.txt)" = 42 ]'},
        solution={"script": f"echo 42 > answer.txt\n{bomb or 'true'}\necho done"},
    )  # type: ignore[arg-type]  # fmt: skip


@pytest.mark.parametrize("name", list(BOMBS))
async def test_it_harms_nobody_else(provider: SandboxProvider, name: str) -> None:
    environment = dict(LIMITS)
    if provider.name == "docker" and name in NEEDS_A_LIMITED_DISK:
        environment |= {"require_limits": True}

    async def row(bomb: str, command_timeout_s: float) -> RolloutRecord:
        options = {"command_timeout_s": command_timeout_s}
        config = make_config(scripted(turns=3), sandbox=provider.name, agent="tool_loop", agent_options=options)
        async with bench(config, provider=Kept(provider)) as rig:  # type: ignore[arg-type]
            run = rig.rollout(task_of(bomb, environment))
            async with asyncio.timeout(ROLLOUT_S):
                await run.run()
            return run.record

    async with Heartbeat() as heart:
        attack, neighbour = await asyncio.gather(row(BOMBS[name], 3.0), row("", 60.0))
    assert (neighbour.status, neighbour.score, neighbour.failure_message) == ("completed", 1.0, None)
    # What it had written before is verified; only the fork bomb may leave nothing to go on with.
    assert (attack.score, attack.failure_message) == (1.0, None)
    wanted = {("completed", "finished")} | ({("truncated", "process_limit")} if name == "processes" else set())
    assert (attack.status, attack.stop_reason) in wanted
    assert attack.close_s < 30
    assert heart.longest < 2
