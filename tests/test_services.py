"""Services of a task: started in its sandbox before the agent, healthy or the rollout fails.

One test: .venv/bin/pytest tests/test_services.py -k healthy
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from rollout_engine.errors import SetupError
from rollout_engine.sandboxes.base import Sandbox, SandboxSpec
from rollout_engine.sandboxes.local import LocalProvider
from rollout_engine.services import start_services
from rollout_engine.specs import ServiceSpec
from tests.helpers import make_config, scripted
from tests.rig import bench, task_of


@pytest.fixture
async def sandbox() -> AsyncIterator[Sandbox]:
    provider = LocalProvider()
    opened = await provider.open(SandboxSpec())
    yield opened
    await provider.close()


def service(command: str, health: str | None = None, **fields: Any) -> ServiceSpec:
    return ServiceSpec(name="s", command=command, health=health, **fields)


async def test_each_starts_once_the_one_before_is_healthy(sandbox: Sandbox) -> None:
    first = service("sleep 0.1; echo 1 > first; sleep 300", "test -e first")
    second = service("cat first > second; sleep 300", "test -s second")
    jobs = await start_services([first, second], sandbox)
    assert [(await sandbox.poll(job)).exit_code for job in jobs] == [None, None]
    assert await sandbox.read_file("second") == b"1\n"


async def test_one_that_goes_into_the_background_is_healthy_as_well(sandbox: Sandbox) -> None:
    await start_services([service("(sleep 0.1; touch up; sleep 300) & exit 0", "test -e up")], sandbox)


async def test_without_a_check_it_is_only_started(sandbox: Sandbox) -> None:
    await start_services([service("exit 3")], sandbox)


@pytest.mark.parametrize(
    ("command", "health", "limit_s", "said"),
    [
        ("echo no port left >&2; exit 3", "test -e never", 60, "service 's' ended with 3: no port left"),
        ("echo starting; sleep 300", "test -e never", 2, "is not healthy within 2 s (test -e never): starting"),
        ("sleep 300", "sleep 300", 0.3, "is not healthy within 0.3 s (sleep 300)"),
    ],
)
async def test_one_that_does_not_come_up(
    sandbox: Sandbox, command: str, health: str, limit_s: float, said: str
) -> None:
    with pytest.raises(SetupError) as caught:
        await start_services([service(command, health, health_timeout_s=limit_s)], sandbox)
    assert said in str(caught.value)


@pytest.mark.parametrize(("command", "limit_s", "again"), [("sleep 300", 0.3, True), ("exit 3", 60, False)])
async def test_only_one_that_is_late_is_worth_another_try(
    sandbox: Sandbox, command: str, limit_s: float, again: bool
) -> None:
    with pytest.raises(SetupError) as caught:
        await start_services([service(command, "test -e never", health_timeout_s=limit_s)], sandbox)
    assert caught.value.retryable is again


async def test_a_rollout_starts_them_after_its_setup_and_fails_without_them() -> None:
    good = {"name": "s", "command": "cp made up; sleep 300", "health": "test -e up"}
    bad = {"name": "s", "command": "exit 1", "health": "test -e up"}
    async with bench(make_config(scripted(), sandbox="local")) as rig:
        fine = await rig.run(task_of(setup=["touch made"], services=[good]))
        failed = await rig.run(task_of(setup=["touch made"], services=[bad]))
    assert fine.status == "completed"
    assert (failed.status, failed.failure_boundary, failed.failure_type) == ("failed", "setup", "SetupError")
    assert failed.retryable is False
