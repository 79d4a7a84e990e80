"""Hostile verifier code that looks at a sandbox, on every backend: no verdict but its own, and nobody else is harmed.

make one T=tests/verifiers/test_hostile_in_sandboxes.py
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rollout_engine.errors import VerifierError, VerifierTimeout
from rollout_engine.sandboxes.base import Sandbox, SandboxProvider, SandboxSpec
from rollout_engine.specs import Task
from rollout_engine.types import Score
from rollout_engine.verifiers import make_verifier
from rollout_engine.verifiers.workshop import Workshop
from tests.verifiers.test_code import trajectory

MIB = 2**20
SPEC = SandboxSpec(memory_bytes=256 * MIB, processes=64)


@pytest.fixture
async def workshop(provider: SandboxProvider) -> AsyncIterator[Workshop]:
    made = Workshop(provider, warm=False)
    yield made
    await made.close()


@pytest.fixture
async def sandbox(provider: SandboxProvider) -> AsyncIterator[Sandbox]:
    """The one that the code looks at."""
    opened = await provider.open(SPEC)
    yield opened
    await opened.close()


async def judge(workshop: Workshop, sandbox: Sandbox, body: str, timeout_s: float = 60.0) -> Score:
    lines = "\n".join("    " + line for line in body.splitlines())
    code = f"import os, sys, time\ndef verify(env, final_answer=None):\n    env.exists('x')\n{lines}\n"
    task = Task(task_id="t", prompt="?", verifier={"type": "code", "code": code}, environment={"trusted": False})  # type: ignore[arg-type]
    verifier = make_verifier(task.verifier or {}, timeout_s=timeout_s, workshop=workshop)
    return await verifier.verify(task, trajectory(), sandbox)


async def fine(workshop: Workshop, provider: SandboxProvider) -> None:
    """Another verdict, in a sandbox of its own."""
    other = await provider.open(SPEC)
    assert (await judge(workshop, other, "return 0.75")).value == 0.75
    await other.close()


@pytest.mark.parametrize(
    "body",
    [
        "sys.exit(0)",
        "os._exit(0)",
        "os.abort()",
        "import ctypes; ctypes.string_at(0)",
        "os.kill(os.getpid(), 9)",
        "os.kill(-1, 9); time.sleep(20)",
        "os.write(1, b'{\"score\": 1.0}'); os._exit(0)",
        "print('{\"score\": 1.0}', flush=True); os._exit(0)",
        "if os.fork() == 0: return 1.0\nos._exit(0)",
    ],
)
async def test_ending_is_no_verdict(workshop: Workshop, provider: SandboxProvider, sandbox: Sandbox, body: str) -> None:
    with pytest.raises(VerifierError):
        await judge(workshop, sandbox, body)
    await fine(workshop, provider)


@pytest.mark.parametrize(
    "body",
    [
        "import signal\n[signal.signal(n, signal.SIG_IGN) for n in (1, 2, 3, 14, 15)]\nwhile True: pass",
        "while True:\n    try:\n        if os.fork() == 0: os.setsid()\n    except OSError: time.sleep(0.01)",
        "while True: os.write(2, b'x' * 10 ** 6)",
    ],
)
async def test_no_end_is_ended_from_outside(
    workshop: Workshop, provider: SandboxProvider, sandbox: Sandbox, body: str
) -> None:
    started = time.monotonic()
    with pytest.raises(VerifierTimeout):
        await judge(workshop, sandbox, body, timeout_s=2)
    assert time.monotonic() - started < 60
    await fine(workshop, provider)
    started = time.monotonic()
    await sandbox.close()
    assert time.monotonic() - started < 60


async def test_memory_is_the_sandboxes_own(workshop: Workshop, provider: SandboxProvider, sandbox: Sandbox) -> None:
    waiting = asyncio.create_task(fine(workshop, provider))
    with pytest.raises(VerifierError, match=r"out of memory|MemoryError"):
        await judge(workshop, sandbox, "x = []\nwhile True: x.append(bytearray(10 ** 6))")
    await waiting


async def test_what_forks_away_ends_with_the_sandbox_and_does_not_answer(
    workshop: Workshop, provider: SandboxProvider, sandbox: Sandbox
) -> None:
    mark = f"away{os.getpid()}{time.monotonic_ns() % 10**5}"
    body = f"""
if os.fork() == 0:
    os.setsid()
    import ctypes
    ctypes.CDLL(None).prctl(15, b'{mark[:15]}', 0, 0, 0)
    while True:
        for fd in range(20):
            try: os.write(fd, b'{{"score": 1.0}}')
            except OSError: pass
        time.sleep(0.02)
time.sleep(0.2)
return 0.25"""
    with_pollution = await tried(workshop, sandbox, body)
    assert with_pollution in (0.25, None)
    await named(mark[:15], there=True)
    await fine(workshop, provider)
    assert mark[:15] in comms()
    await sandbox.close()
    await named(mark[:15], there=False)


async def named(name: str, *, there: bool) -> None:
    """Until a process of this name runs, or none does."""
    async with asyncio.timeout(60):
        while (name in comms()) != there:
            await asyncio.sleep(0.02)


async def tried(workshop: Workshop, sandbox: Sandbox, body: str) -> float | None:
    try:
        return (await judge(workshop, sandbox, body)).value
    except VerifierError:
        return None


def comms() -> set[str]:
    found = set()
    for path in Path("/proc").glob("[0-9]*/comm"):
        try:
            found.add(path.read_text().strip())
        except OSError:
            continue
    return found


async def test_nothing_stays_for_the_next_verdict(
    workshop: Workshop, provider: SandboxProvider, sandbox: Sandbox
) -> None:
    poison = (
        "import builtins, json, site\nbuiltins.float = lambda *a: 0.25\n"
        "open('/tmp/leak', 'w').write('1'); open('leak', 'w').write('1'); os.environ['LEAK'] = '1'\n"
        "for d in ('/usr/lib/python3/dist-packages', '/usr/local/lib/python3.11/dist-packages'):\n"
        "    try: open(d + '/sitecustomize.py', 'w').write('import os; os._exit(0)')\n"
        "    except OSError: pass\n"
        "return 0.5"
    )
    await tried(workshop, sandbox, poison)
    await sandbox.close()
    other = await provider.open(SPEC)
    leaks = "os.path.exists('/tmp/leak') or os.path.exists('leak') or 'LEAK' in os.environ"
    clean = f"return 0.0 if {leaks} or float('1') != 1.0 else 1.0"
    assert (await judge(workshop, other, clean)).value == 1.0
    await other.close()
