"""Nothing is left of namespace sandboxes. Run: pytest tests/sandboxes/namespace/test_namespace_leaks.py"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollout_engine.errors import SandboxDied, SandboxError, SandboxUnavailable
from rollout_engine.sandboxes.base import SandboxSpec
from rollout_engine.sandboxes.namespace import NamespaceProvider, NamespaceSandbox
from rollout_engine.sandboxes.namespace.helper import limits
from rollout_engine.sandboxes.namespace.keeper import MAX_RESTARTS

VICTIM = Path(__file__).with_name("victim.py")
ORDINARY_USER = 61_234
GONE_S = 60.0
CANCELLATIONS = 200


def processes(mark: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if mark.encode() in path.read_bytes() and int(path.parent.name) != os.getpid():
                found.append(int(path.parent.name))
    return found


def children_of(pid: int) -> list[int]:
    """The boxes of a launcher: its children that are the first process of a pid namespace."""
    children = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [child for child in children if _first_in_namespace(child)]


def _first_in_namespace(pid: int) -> bool:
    with contextlib.suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text()
        return "NSpid" in status and status.split("NSpid:")[1].split("\n")[0].split()[-1] == "1"
    return False


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def groups() -> set[str]:
    """Control groups of launchers, dead or alive, with those of their boxes."""
    found = set()
    for controller in limits.find_controllers():
        for path in Path(controller.root).glob(f"{limits.PREFIX}.*"):
            with contextlib.suppress(OSError):  # another's may go meanwhile
                found |= {str(path), *(str(below) for below in path.iterdir() if below.is_dir())}
    return found


def members(launcher: int) -> list[str]:
    """Processes in its control groups: to its last moment, longer than its command line can be read."""
    found = []
    for group in groups():
        if f".{launcher}." in group:
            with contextlib.suppress(OSError):
                found += Path(group, "cgroup.procs").read_text().split()
    return found


def mounts() -> list[str]:
    """Our mounts in the host's own table, which no box is ever to enter."""
    return [line for line in Path("/proc/self/mounts").read_text().splitlines() if "lowerdir=/tmp/l" in line]


async def until(holds: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + GONE_S
    while not holds():
        assert time.monotonic() < end, f"after {GONE_S} s still not: {what}"
        await asyncio.sleep(0.02)


@pytest.fixture
def mark(request: pytest.FixtureRequest) -> str:
    return f"600.{abs(hash((request.node.nodeid, os.getpid(), time.time_ns()))) % 10**9:09d}"


@pytest.fixture
def victim(provider: NamespaceProvider, kind: str, mark: str) -> Any:
    """A host of its own process with ten boxes; `provider` has shown that they work here."""
    run_as = str(ORDINARY_USER) if kind == "user" and os.geteuid() == 0 else ""
    process = subprocess.Popen(
        [sys.executable, str(VICTIM), mark, run_as], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": _ROOT}
    )
    assert process.stdout is not None
    facts = json.loads(process.stdout.readline())
    yield process, facts["launcher"]
    process.stdout.close()
    process.kill()
    process.wait()


_ROOT = str(Path(__file__).parents[3])


class TestKill:
    async def test_the_host(self, victim: tuple[subprocess.Popen[bytes], int], mark: str) -> None:
        process, launcher = victim
        await until(lambda: len(processes(mark)) >= 20, "the commands run")
        await until(lambda: len(children_of(launcher)) == 9, "nine boxes: the tenth was exported")
        boxes = children_of(launcher)
        process.kill()
        process.wait()
        await until(lambda: not processes(mark), "no command runs")
        await until(lambda: not any(alive(pid) for pid in [launcher, *boxes]), "no box, no launcher")
        await until(lambda: not any(f".{launcher}." in group for group in groups()), "no control group")
        assert mounts() == []

    async def test_the_launcher(self, victim: tuple[subprocess.Popen[bytes], int], mark: str) -> None:
        _, launcher = victim
        boxes = children_of(launcher)
        os.kill(launcher, signal.SIGKILL)
        await until(lambda: not [pid for pid in processes(mark) if pid != victim[0].pid], "no command runs")
        await until(lambda: not any(alive(pid) for pid in boxes), "no box")
        await until(lambda: not any(f".{launcher}." in group for group in groups()), "no control group")

    @pytest.mark.parametrize("used", [True, False])
    async def test_everything_at_once_is_cleaned_up_by_the_next_provider(
        self, victim: tuple[subprocess.Popen[bytes], int], mark: str, kind: str, used: bool
    ) -> None:
        process, launcher = victim
        for pid in (process.pid, launcher):
            os.kill(pid, signal.SIGSTOP)
        for pid in (process.pid, launcher):
            os.kill(pid, signal.SIGKILL)
        process.wait()
        await until(lambda: not processes(mark), "no command runs")
        await until(lambda: not alive(launcher), "the launcher has ended: its commands may end before it")
        await until(lambda: not members(launcher), "its boxes have ended, too")
        provider = NamespaceProvider(run_as=ORDINARY_USER if kind == "user" and os.geteuid() == 0 else None)
        if used:
            await provider.facts()
        await provider.close()
        assert not any(f".{launcher}." in group for group in groups())

    async def test_a_box(self, provider: NamespaceProvider, mark: str) -> None:
        box, other = await provider.open(SandboxSpec()), await provider.open(SandboxSpec())
        assert provider.launcher_pid is not None
        waiting = asyncio.create_task(box.exec(["sleep", mark]))
        await until(lambda: bool(processes(mark)), "the command runs")
        parent = parent_of(processes(mark)[0])
        assert parent in children_of(provider.launcher_pid)
        os.kill(parent, signal.SIGKILL)
        with pytest.raises(SandboxDied):
            await waiting
        for call in (box.exec(["true"]), box.read_file("x"), box.poll("job-1"), box.start(["true"])):
            with pytest.raises(SandboxDied):
                await call
        await until(lambda: not processes(mark), "no command runs")
        assert (await other.exec(["true"])).ok
        await box.close()

    async def test_a_launcher_that_keeps_dying_is_given_up(self, provider: NamespaceProvider) -> None:
        for _ in range(MAX_RESTARTS + 1):
            await provider.open(SandboxSpec())
            assert provider.launcher_pid is not None
            launcher = provider.launcher_pid
            os.kill(launcher, signal.SIGKILL)
            await until(lambda launcher=launcher: not alive(launcher), "the launcher is gone")  # type: ignore[misc]
        with pytest.raises(SandboxUnavailable, match="too often"):
            await provider.open(SandboxSpec())


class TestCancel:
    async def test_at_random_moments(self, kind: str, provider: NamespaceProvider, mark: str, tmp_path: Path) -> None:
        seed = random.randrange(10**6)
        print("seed", seed)
        chance = random.Random(seed)
        before = len(os.listdir("/proc/self/fd"))
        (tmp_path / "tree").mkdir()
        (tmp_path / "tree" / "file").write_bytes(b"x" * 300_000)
        lives = [_life(provider, mark, tmp_path / "tree", tmp_path / f"out{number}") for number in range(CANCELLATIONS)]
        for start in range(0, CANCELLATIONS, 10):
            tasks = [asyncio.create_task(life) for life in lives[start : start + 10]]
            await asyncio.gather(*(_cancel(task, chance.random() * 0.15) for task in tasks))
        survivor = await provider.open(SandboxSpec())
        assert (await survivor.exec(["echo", "fine"])).stdout == b"fine\n"
        await survivor.close()
        assert provider.launcher_pid is not None
        launcher = provider.launcher_pid
        await until(lambda: not processes(mark), "no command runs")
        await until(lambda: children_of(launcher) == [], "no box")
        await until(lambda: len([name for name in groups() if f".{launcher}." in name]) <= 3, "no group of a box")
        await until(lambda: len(os.listdir("/proc/self/fd")) <= before + 2, "no descriptor")
        await provider.close()
        assert not any(f".{launcher}." in group for group in groups())
        assert not alive(launcher)


async def _life(provider: NamespaceProvider, mark: str, source: Path, target: Path) -> None:
    box: NamespaceSandbox | None = None
    try:
        box = await provider.open(SandboxSpec())
        await box.write_file("big", b"x" * 500_000)
        await box.start(["sleep", mark])
        await box.exec(["sh", "-c", f"setsid sleep {mark} & echo x; head -c 200000 big"], stdin=b"y" * 100_000)
        await box.upload(source, "tree")
        await box.download("tree", target)
        await box.read_file("big")
        await box.exec(["sleep", mark])
    finally:
        if box is not None:
            await box.close()


async def _cancel(task: asyncio.Task[None], delay_s: float) -> None:
    await asyncio.sleep(delay_s)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, SandboxError):
        await task


async def test_closing_leaves_nothing(provider: NamespaceProvider) -> None:
    boxes = await asyncio.gather(*(provider.open(SandboxSpec()) for _ in range(20)))
    assert mounts() == []
    launcher = provider.launcher_pid
    assert launcher is not None
    await asyncio.gather(*(box.close() for box in boxes))
    await until(lambda: children_of(launcher) == [], "no box")
    await provider.close()
    assert not any(f".{launcher}." in group for group in groups())
    assert mounts() == []
    await provider.close()
