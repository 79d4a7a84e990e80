"""An agent's own memory, process and disk limits as its row tells them, with its prefix verified, on every backend.

python -m pytest tests/sandboxes/test_limits_in_rows.py
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from docker import APIClient
from docker.utils import kwargs_from_env

from rollout_engine.agents.base import AgentLimits, AgentModel, OnTurn
from rollout_engine.errors import SandboxDied, SandboxOutOfMemory
from rollout_engine.sandboxes.base import Sandbox, SandboxProvider, SandboxSpec
from rollout_engine.sandboxes.docker import DockerSandbox
from rollout_engine.sandboxes.namespace import NamespaceSandbox
from rollout_engine.specs import Task
from rollout_engine.types import RolloutRecord, StopReason, Turn
from tests.helpers import make_config, scripted
from tests.rig import MATCH, bench
from tests.sandboxes.backends import Kept, working

MIB = 2**20
ROLLOUT_S = 300.0
HOG = "tail /dev/zero"
MANY_SMALL = """
import os, time
while not os.path.exists("go"):
    time.sleep(0.01)
for _ in range(30):
    if not os.fork():
        x = bytearray(6 << 20)
        break
time.sleep(60)
"""
"""Each far below the limit, so that it is not the largest that the kernel looks for."""
BOMB = """
import os, time
while True:
    try:
        if os.fork() == 0: os.setsid()
    except OSError:
        open("full", "w").close()
        time.sleep(0.005)
"""
FILL = "setsid python3 bomb.py > /dev/null 2>&1 &\nuntil [ -e full ]; do :; done\n"
"""Waits until there is no process left, and takes none for that."""
ANSWER = {"type": "script", "command": '[ "$(cat answer.txt)" = 42 ]'}


@pytest.fixture(params=["root", pytest.param("docker", marks=pytest.mark.docker)])
async def provider(request: pytest.FixtureRequest) -> AsyncIterator[SandboxProvider]:
    """Those whose memory a control group holds."""
    made = await working(request.param)
    yield made
    await made.close()


async def rollout(provider: SandboxProvider, task: Task, **config: Any) -> RolloutRecord:
    lines = (task.script or "").splitlines() or [""]
    made = make_config(scripted(turns=min(len(lines), 10)), sandbox=provider.name, **{"agent": "tool_loop", **config})
    async with bench(made, provider=Kept(provider)) as rig:  # type: ignore[arg-type]
        run = rig.rollout(task)
        async with asyncio.timeout(ROLLOUT_S):
            await run.run()
        return run.record


def task_of(script: str, **environment: Any) -> Task:
    return Task(
        task_id="t", prompt="Write 42 into answer.txt.", environment={"memory_mb": 64, **environment},
        verifier=ANSWER, solution={"script": script},
    )  # type: ignore[arg-type]  # fmt: skip


def doom(sandbox: Sandbox) -> None:
    """Makes the sandbox's first process the one that the kernel takes first."""
    if isinstance(sandbox, DockerSandbox):
        api = APIClient(**kwargs_from_env())
        pid = api.inspect_container(sandbox.container)["State"]["Pid"]
        api.close()
    else:
        assert isinstance(sandbox, NamespaceSandbox)
        pid = first_process(sandbox)
    Path(f"/proc/{pid}/oom_score_adj").write_text("1000")


def first_process(sandbox: NamespaceSandbox) -> int:
    launcher = sandbox._launcher.pid
    [box] = [int(pid) for pid in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split() if _first(pid)]
    return box


def _first(pid: str) -> bool:
    with contextlib.suppress(OSError):  # it may end meanwhile
        return Path(f"/proc/{pid}/status").read_text().split("NSpid:")[1].split("\n")[0].split()[-1] == "1"
    return False


class Doomed:
    """Answers once, and then runs into the end of its whole sandbox."""

    async def run(
        self, task: Task, model: AgentModel, sandbox: Sandbox | None, limits: AgentLimits, on_turn: OnTurn
    ) -> StopReason:
        assert sandbox is not None
        completion = await model.complete(task.messages())
        on_turn(Turn(0, [*task.messages(), completion.message], completion))
        job = await sandbox.start(["python3", "-c", MANY_SMALL])
        await sandbox.write_file("under way", b"")  # the first process has started the job before it does this
        doom(sandbox)
        await sandbox.write_file("go", b"")
        while (await sandbox.poll(job)).exit_code is None:
            await asyncio.sleep(0.02)
        return StopReason.FINISHED


class Filler:
    """Fills its sandbox's disk, and then needs some more."""

    async def run(
        self, task: Task, model: AgentModel, sandbox: Sandbox | None, limits: AgentLimits, on_turn: OnTurn
    ) -> StopReason:
        assert sandbox is not None
        await sandbox.exec(["sh", "-c", "echo 42 > answer.txt; head -c 100000000 /dev/zero > fill"])
        await sandbox.write_file("more", b"x" * MIB)
        return StopReason.FINISHED


async def test_an_agent_that_goes_on_after_a_kill_is_completed_and_its_row_counts_it(provider: SandboxProvider) -> None:
    record = await rollout(provider, task_of(f"{HOG}\n{HOG}\necho 42 > answer.txt"))
    assert (record.status, record.stop_reason, record.score) == ("completed", "finished", 1.0)
    assert record.oom_kills == 2
    told = [str(message["content"]) for turn in record.turns for message in turn.messages if message["role"] == "tool"]
    assert sum("out of memory" in text for text in told) == 2


async def test_no_kill_is_a_zero(provider: SandboxProvider) -> None:
    record = await rollout(provider, task_of("sh -c 'kill -9 $$'\necho 42 > answer.txt"))
    assert (record.status, record.score, record.oom_kills) == ("completed", 1.0, 0)


async def test_a_kill_below_a_command_that_succeeds_is_told_and_counted(provider: SandboxProvider) -> None:
    sandbox = await provider.open(SandboxSpec(memory_bytes=64 * MIB))
    result = await sandbox.exec(["sh", "-c", f"{HOG}; echo went on"])
    assert (result.exit_code, result.oom, result.stdout) == (0, True, b"went on\n")
    job = await sandbox.start(["sh", "-c", HOG])
    async with asyncio.timeout(ROLLOUT_S):
        while (await sandbox.poll(job)).exit_code is None:
            await asyncio.sleep(0.02)
    assert sandbox.oom_kills == 2
    await sandbox.close()


async def test_a_sandbox_that_goes_out_of_memory_as_a_whole_truncates_its_agent(provider: SandboxProvider) -> None:
    """The turns are judged; the files went with the sandbox, so a verifier of files comes to no finding."""
    fields: dict[str, Any] = {"agent": "tests.sandboxes.test_limits_in_rows:Doomed"}
    environment = {"memory_mb": 96}
    words = Task(task_id="t", prompt="Six times seven?", environment=environment, verifier=MATCH, solution="42")  # type: ignore[arg-type]
    record = await rollout(provider, words, **fields)
    assert (record.status, record.stop_reason, record.score) == ("truncated", "out_of_memory", 1.0)
    assert (record.failure_boundary, record.num_turns) == (None, 1)
    files = words.model_copy(update={"verifier": ANSWER})
    record = await rollout(provider, files, **fields)
    assert (record.status, record.stop_reason, record.score) == ("truncated", "out_of_memory", None)
    assert (record.failure_boundary, record.failure_type) == ("verifier", "VerifierError")
    assert "files are lost" in str(record.failure_message)


async def test_a_kill_from_outside_is_no_lack_of_memory(provider: SandboxProvider) -> None:
    """Also after commands were killed for memory: the fault is ours, and the attempt is tried again."""
    sandbox = await provider.open(SandboxSpec(memory_bytes=64 * MIB))
    assert (await sandbox.exec(["sh", "-c", HOG])).oom
    waiting = asyncio.create_task(sandbox.exec(["sleep", "100"]))
    await asyncio.sleep(0.2)
    if isinstance(sandbox, DockerSandbox):
        api = APIClient(**kwargs_from_env())
        api.kill(sandbox.container)
        api.close()
    else:
        os.kill(first_process(sandbox), 9)  # type: ignore[arg-type]
    with pytest.raises(SandboxDied) as caught:
        await waiting
    assert not isinstance(caught.value, SandboxOutOfMemory)
    await sandbox.close()


async def test_a_verifier_out_of_memory_is_no_finding_and_no_fault_of_ours(provider: SandboxProvider) -> None:
    task = task_of("echo 42 > answer.txt", memory_mb=64)
    hog = task.model_copy(update={"verifier": {"type": "script", "command": f"exec {HOG}"}})
    record = await rollout(provider, hog)
    assert (record.status, record.score, record.failure_boundary) == ("completed", None, "verifier")
    assert "out of memory" in str(record.failure_message)


async def test_no_process_left_truncates_and_the_prefix_is_verified(provider: SandboxProvider) -> None:
    # A command may still get the process that the one before has freed; the next one, or the one after, does not.
    script = "echo 42 > answer.txt\nsh fill.sh\n" + "true\n" * 8
    files = {"bomb.py": BOMB, "fill.sh": FILL}
    task = task_of(script, processes=64, memory_mb=512).model_copy(update={"files": files})
    record = await rollout(provider, task)
    assert (record.status, record.stop_reason, record.score) == ("truncated", "process_limit", 1.0), record


async def test_a_full_disk_truncates_and_the_prefix_is_verified(provider: SandboxProvider) -> None:
    image = "busybox" if provider.name == "docker" else None
    task = task_of("", memory_mb=128, disk_mb=16, require_limits=True, image=image)
    record = await rollout(provider, task, agent="tests.sandboxes.test_limits_in_rows:Filler")
    assert (record.status, record.stop_reason, record.score) == ("truncated", "disk_limit", 1.0), record


async def test_what_files_in_memory_hold_never_ends_the_sandbox(provider: SandboxProvider) -> None:
    image = "busybox" if provider.name == "docker" else None
    spec = SandboxSpec(image=image, memory_bytes=32 * MIB, disk_bytes=512 * MIB, require_limits=True)
    sandbox = await provider.open(spec)
    for place in ("/dev/shm/f", "/tmp/f", "/workspace/f"):
        assert not (await sandbox.exec(["sh", "-c", f"head -c 200000000 /dev/zero > {place}"], timeout_s=60)).ok
    with pytest.raises(OSError):  # noqa: PT011 - which one depends on the way that a large file takes
        await sandbox.write_file("g", b"x" * 64 * MIB)
    assert (await sandbox.exec(["echo", "alive"])).stdout == b"alive\n"
    await sandbox.close()
