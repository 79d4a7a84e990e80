"""Nothing stays behind: after cancellation at random moments, after SIGKILL of the owner, after a death of everything.

python -m pytest tests/sandboxes/docker/test_docker_leftovers.py
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import random
import sys
import time

import pytest

from rollout_engine.sandboxes.base import SandboxSpec
from rollout_engine.sandboxes.docker import DockerProvider
from tests.docker_here import GONE_S, Daemon

pytestmark = pytest.mark.docker

LIVES, AT_ONCE = 200, 6

OWNER = """
import asyncio, sys
from rollout_engine.sandboxes.base import SandboxSpec
from rollout_engine.sandboxes.docker import DockerProvider
async def main():
    provider = DockerProvider(run=sys.argv[1], image="busybox", supervise=sys.argv[2] == "1")
    boxes = [await provider.open(SandboxSpec(network=network)) for network in ("none", "none", "bridge")]
    for box in boxes:
        await box.start(["sh", "-c", "setsid sleep 1000 & sleep 1000"])
    print("up", flush=True)
    await asyncio.sleep(1000)
asyncio.run(main())
"""


async def test_cancellation_at_random_moments_leaves_nothing(daemon: Daemon) -> None:
    seed = random.randrange(10**6)
    dice = random.Random(seed)
    provider = DockerProvider(run="cancelled", image="busybox")
    room = asyncio.Semaphore(AT_ONCE)

    reached: collections.Counter[str] = collections.Counter()

    async def life(network: str, *, cut: bool = True) -> None:
        reached["begun"] += 1
        sandbox = await provider.open(SandboxSpec(network=network))
        try:
            reached["open"] += 1
            await sandbox.start(["sh", "-c", "sleep 1000"])
            await sandbox.exec(["sh", "-c", "setsid sleep 1000 & sleep 0.1"])
            await sandbox.write_file("x", b"x")
            reached["worked"] += 1
            if cut:
                await sandbox.exec(["sleep", "1000"])
        finally:
            await sandbox.close()

    async def cancelled(network: str, share: float) -> None:
        nonlocal whole_s
        async with room:
            task = asyncio.create_task(life(network))
            await asyncio.sleep(share * whole_s)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            whole_s *= 1.05 if 3 * reached["worked"] < reached["begun"] else 0.95  # as busy as the machine is by now
            while len(provider._behind) >= AT_ONCE:  # a cancelled start ends, and is removed, behind its caller
                await asyncio.sleep(0.01)

    began = time.monotonic()
    await asyncio.gather(*(life("none", cut=False) for _ in range(AT_ONCE)))
    whole_s = 1.2 * (time.monotonic() - began)  # as long as it takes here, now, while so many do
    reached.clear()
    moments = [("bridge" if number % 20 == 0 else "none", dice.random()) for number in range(LIVES)]
    await asyncio.gather(*(cancelled(*each) for each in moments))
    try:
        await daemon.gone("cancelled")
    finally:
        await provider.close()
    assert daemon.left("cancelled") == [], f"seed {seed}"
    assert reached["begun"] == LIVES
    assert 0 < reached["worked"] < reached["open"] < LIVES, reached


@pytest.mark.parametrize("supervise", [True, False])
async def test_a_killed_owner_leaves_nothing_after_the_next_start(supervise: bool, daemon: Daemon) -> None:
    run = f"killed-{int(supervise)}"
    owner = await asyncio.create_subprocess_exec(
        sys.executable, "-c", OWNER, run, str(int(supervise)), stdout=asyncio.subprocess.PIPE
    )
    assert owner.stdout is not None
    assert await asyncio.wait_for(owner.stdout.readline(), GONE_S) == b"up\n"
    assert len(daemon.api.containers(filters={"label": f"rollout-engine.run={run}"})) == 3
    owner.kill()
    await owner.wait()
    if supervise:  # the sandboxes end by themselves: only what the daemon keeps for nobody waits for the reaper
        async with asyncio.timeout(GONE_S):
            while daemon.api.containers(all=True, filters={"label": f"rollout-engine.run={run}"}):
                await asyncio.sleep(0.05)
    provider = DockerProvider(run="next", image="busybox")
    await (await provider.open(SandboxSpec())).close()
    await daemon.gone(run)
    await provider.close()


async def test_another_live_owners_sandboxes_are_left_alone(daemon: Daemon) -> None:
    first, second = DockerProvider(run="first", image="busybox"), DockerProvider(run="second", image="busybox")
    sandbox = await first.open(SandboxSpec())
    await (await second.open(SandboxSpec())).close()
    await second.close()
    assert (await sandbox.exec(["true"])).ok
    await first.close()
    assert daemon.left("first") == []
