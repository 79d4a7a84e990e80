"""A host's process searches seldom for garbage, because its rollouts leave none that must be searched for.

One test: .venv/bin/pytest tests/test_machine.py -k nothing
"""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp import web

from rollout_engine.specs import Task
from tests.helpers import make_config, scripted
from tests.rig import Bench, bench, chat_server, served, task_of
from tests.test_rollout import in_local, judged, talking


@pytest.fixture(scope="module")
def anyio_backend() -> tuple[str, dict[str, Any]]:
    """As in a host's process: asyncio's own loop keeps cancelled timers, and what they knew, for a while."""
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(autouse=True)
def _uncollected() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


async def remains(rig: Bench, task: Task, **fields: Any) -> object:
    """What is left of a rollout that has ended and that nobody holds; None: nothing."""
    rollout = rig.rollout(task, **fields)
    async with asyncio.timeout(60):
        await asyncio.create_task(rollout.run())
        left = weakref.ref(rollout)
        del rollout
        for _ in range(200):  # timers that were cancelled are closed by the loop's next rounds, connections by theirs
            await asyncio.sleep(0.005)
            if left() is None:
                break
    return left()


ENDINGS = ["finished", "max_turns", "limit", "refused", "ValueError", "hang"]


@pytest.mark.parametrize("ending", ENDINGS)
async def test_nothing_is_left_however_the_agent_ends(ending: str) -> None:
    config = make_config(limits={"agent_s": 0.1}, **talking(ending=ending))
    async with bench(config) as rig:
        assert await remains(rig, task_of()) is None


@pytest.mark.parametrize("do", ["half", "nan", "ValueError", "verifier error", "hang"])
async def test_nothing_is_left_however_the_verifier_ends(do: str) -> None:
    async with bench(make_config(limits={"verify_s": 0.1})) as rig:
        assert await remains(rig, judged(do)) is None


@pytest.mark.parametrize("fault", ["p_429", "p_500", "p_cut", "p_garbage", "p_hang"])
async def test_nothing_is_left_however_a_model_fails(fault: str) -> None:
    model = {**scripted(retry_after_s=0.1, **{fault: 1.0}), "call_retries": 0, "call_timeout_s": 0.1}
    async with bench(make_config(model)) as rig:
        assert await remains(rig, task_of()) is None


@pytest.mark.parametrize("status", [200, 400, 500])
async def test_nothing_is_left_of_what_a_server_answers(status: int) -> None:
    async def broken(request: web.Request) -> web.Response:
        return web.Response(status=status, text="oh no")

    async with chat_server(broken) as url, bench(make_config(served(url))) as rig:
        assert await remains(rig, task_of()) is None


async def test_nothing_is_left_past_the_deadline_nor_in_a_sandbox() -> None:
    async with bench(make_config(**talking(ending="hang"))) as rig:
        assert await remains(rig, task_of(), deadline_s=0.2) is None
    async with bench(make_config(sandbox="local")) as rig:
        assert await remains(rig, in_local()) is None


CYCLES = """
import gc, weakref
from rollout_engine.machine import COLLECT_AFTER, collect_seldom
class Node: pass
collect_seldom()
gone = []
for _ in range(3 * COLLECT_AFTER):
    node = Node()
    node.itself = node
    weakref.finalize(node, gone.append, None)
assert len(gone) > COLLECT_AFTER, len(gone)
"""


def test_a_process_that_seldom_collects_still_does() -> None:
    subprocess.run([sys.executable, "-c", CYCLES], check=True, timeout=60)
