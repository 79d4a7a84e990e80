"""Programs in a box to talk to, where the box is killed under them or they send what is no byte.

One test: .venv/bin/pytest tests/sandboxes/namespace/test_namespace_stream.py -k killed
"""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from rollout_engine.errors import SandboxDied
from rollout_engine.sandboxes.base import SandboxSpec
from rollout_engine.sandboxes.namespace import NamespaceProvider, NamespaceSandbox

SENDER = """
import socket, sys
sock = socket.socket(fileno=1)
for _ in range(50):
    socket.send_fds(sock, [b"x"], [0, 2])
sock.sendall(b"end")
sys.stdin.read()
"""


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def no_more_descriptors(than: int) -> None:
    async with asyncio.timeout(60):
        while descriptors() > than:
            await asyncio.sleep(0.01)


async def test_a_launcher_that_is_killed_ends_the_talk(provider: NamespaceProvider) -> None:
    box = await provider.open(SandboxSpec())
    stream = await box.connect(["cat"])
    reading = asyncio.create_task(stream.read())
    await asyncio.sleep(0)
    assert provider.launcher_pid is not None
    os.kill(provider.launcher_pid, signal.SIGKILL)
    for call in (reading, stream.poll(), stream.write(b"x")):
        with pytest.raises(SandboxDied):
            await call
    await stream.close()
    await box.close()


async def test_descriptors_that_a_program_sends_do_not_reach_the_host(box: NamespaceSandbox) -> None:
    stream = await box.connect(["python3", "-c", SENDER])
    before, got = descriptors(), b""
    while not got.endswith(b"end"):
        got += await stream.read()
    await no_more_descriptors(before)
    await stream.close()


async def test_talks_leave_no_descriptor(box: NamespaceSandbox) -> None:
    before = descriptors()
    for argv in (["cat"], ["true"], ["no-such-program"]) * 5:
        stream = await box.connect(argv)
        await stream.close()
    await no_more_descriptors(before)


async def test_freezing_a_box_ends_the_talk(box: NamespaceSandbox) -> None:
    stream = await box.connect(["cat"])
    await box.quiesce()
    assert await stream.read() == b""
    assert (await stream.poll()).exit_code == -signal.SIGKILL
    await stream.close()
