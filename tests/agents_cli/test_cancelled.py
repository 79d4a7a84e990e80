"""Rollouts of an agent program that are cancelled at random moments: every row is there, and nothing of them is left.

One test: .venv/bin/pytest tests/agents_cli/test_cancelled.py -k namespace
"""

from __future__ import annotations

import asyncio
import os
import random
import uuid
from collections import Counter
from dataclasses import replace

import pytest

from rollout_engine.host import Host
from rollout_engine.specs import body_digest, task_body
from rollout_engine.types import RolloutRecord
from tests.agents_cli.conftest import ENVIRONMENTS, Serve, behind, needs_backend, shell_task
from tests.agents_cli.tiny import left, processes, shell
from tests.docker_here import left_of
from tests.helpers import make_config, make_plan
from tests.ray.rays import alive, descendants, until
from tests.rig import spec_of
from tests.test_host import Talk

AT_ONCE = 8
ROWS_S = 120.0
FACTORS = (0.25, 1.0, 3.0)
"""By which the machine may have become faster or slower since the first batch."""
NAP = f"601.{os.getpid()}"
WORK = f"setsid sleep {NAP} & printf forty-two > out.txt; sleep 0.1"
"""Beside two model calls: what outlives the program, and what it is judged by."""


def descriptors() -> Counter[str]:
    """Of this process: sockets, pipes and their kind by kind, files by name."""
    found: Counter[str] = Counter()
    for fd in os.listdir("/proc/self/fd"):
        try:
            found[os.readlink(f"/proc/self/fd/{fd}").partition(":[")[0]] += 1
        except OSError:
            continue  # the one that the list itself was read by
    return found


async def rows_of(talk: Talk, count: int) -> list[RolloutRecord]:
    """All rows, once there are so many."""
    async with asyncio.timeout(ROWS_S):
        while len(talk.rows) < count:
            await talk.say(wait_s=0.2, acked=talk.received)
    return sorted(talk.rows, key=lambda row: row.key)


@pytest.mark.parametrize(
    ("backend", "rollouts"), [("namespace", 200), pytest.param("docker", 48, marks=pytest.mark.docker)]
)
async def test_every_row_is_there_and_nothing_is_left(serve: Serve, backend: str, rollouts: int) -> None:
    needs_backend(backend)
    seed = random.randrange(10**6)
    print("seed", seed)
    dice = random.Random(seed)
    run_id = f"cancelled-{uuid.uuid4().hex[:8]}"
    task = shell_task(solution="Done.", environment=ENVIRONMENTS[backend])
    url = await serve([task], m={"latency_ms": 50})
    config = make_config(behind(url), agent="command", agent_options=shell(WORK), sandbox=backend)
    loop = asyncio.get_running_loop()

    async def a_hosts_life(batches: int) -> list[RolloutRecord]:
        """The first batch ends as it likes; of those after it each is cancelled at some moment of such a time."""
        host = Host(replace(make_plan(config), run_id=run_id))
        await host.open()
        try:
            talk, whole_s = Talk(host), 0.0
            talk.bodies = {body_digest(task_body(task)): task_body(task)}
            for batch in range(batches):
                keys = range(batch * AT_ONCE, (batch + 1) * AT_ONCE)
                began = loop.time()
                await talk.say(*(spec_of(task, key=key, attempt=key) for key in keys))
                most_s = whole_s * dice.choice(FACTORS)
                moments = sorted((dice.uniform(0.0, most_s), key) for key in keys) if batch else []
                for moment, key in moments:
                    await asyncio.sleep(began + moment - loop.time())
                    await talk.say(cancel=[key])
                await rows_of(talk, keys.stop)
                whole_s = whole_s or loop.time() - began
            await until(lambda: not left() and not processes(NAP), "no process of an agent is left", ROWS_S)
            return await rows_of(talk, batches * AT_ONCE)
        finally:
            await host.close()

    await a_hosts_life(1)  # what is opened once for all is open now
    await asyncio.sleep(0)
    open_before, tasks_before, below_before = descriptors(), asyncio.all_tasks(), alive(descendants(os.getpid()))
    rows = await a_hosts_life(1 + rollouts // AT_ONCE)

    assert [row.key for row in rows] == list(range(AT_ONCE + rollouts))
    assert all((row.status, row.score) == ("completed", 1.0) for row in rows[:AT_ONCE]), rows[0]
    cut = [row for row in rows[AT_ONCE:] if row.status == "cancelled"]
    assert {row.status for row in rows} == {"completed", "cancelled"}
    assert all(row.score is None for row in cut)
    assert {0, 2} <= {row.num_turns for row in cut}, "some were cut before their first turn, some after their last"
    await until(lambda: asyncio.all_tasks() <= tasks_before, "no task is left", ROWS_S)
    await until(lambda: descriptors() <= open_before, "no socket, pipe or file is left", ROWS_S)
    await until(lambda: set(alive(descendants(os.getpid()))) <= set(below_before), "no process is left", ROWS_S)
    if backend == "docker":
        assert left_of(run_id) == []
