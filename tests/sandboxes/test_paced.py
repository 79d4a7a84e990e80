"""A backend is asked for so many sandboxes a minute and no more, whoever asks and how often."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rollout_engine.config import HostSpec
from rollout_engine.errors import SandboxStartError
from rollout_engine.host import Host
from rollout_engine.sandboxes import make_provider
from rollout_engine.sandboxes.base import Recipe, SandboxSpec
from rollout_engine.sandboxes.local import LocalProvider
from rollout_engine.sandboxes.paced import PacedProvider, at_once
from rollout_engine.waiting import Cell, enter_rollout
from tests.helpers import make_config, make_plan
from tests.rig import in_virtual_time, task_of
from tests.test_waiting import hold, told


class Counting(LocalProvider):
    """Knows when it was asked for a sandbox, on the loop's clock."""

    def __init__(self, directory: Path | None = None, fails: int = 0) -> None:
        super().__init__(directory)
        self.asked: list[float] = []
        self._fails = fails

    async def open(self, spec: SandboxSpec) -> Any:
        self.asked.append(asyncio.get_running_loop().time())
        if len(self.asked) <= self._fails:
            raise SandboxStartError("no room")
        return None

    async def prepare(self, spec: SandboxSpec, recipe: Recipe) -> SandboxSpec:
        await self.open(spec)
        return spec


def test_many_at_once_come_one_after_the_other_and_failures_count_too() -> None:
    async def scenario() -> None:
        inner = Counting(fails=3)
        provider = PacedProvider(inner, 30.0)
        await asyncio.gather(*(provider.open(SandboxSpec()) for _ in range(6)), return_exceptions=True)
        began = inner.asked[0]
        assert [round(moment - began, 3) for moment in inner.asked] == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]

    in_virtual_time(scenario())


def test_one_who_stops_waiting_takes_no_turn() -> None:
    async def scenario() -> None:
        inner = Counting()
        provider = PacedProvider(inner, 60.0)
        await provider.open(SandboxSpec())
        waiting = [asyncio.create_task(provider.open(SandboxSpec())) for _ in range(5)]
        await asyncio.sleep(0.5)
        for task in waiting[:4]:
            task.cancel()
        await waiting[4]
        assert inner.asked[1] - inner.asked[0] == pytest.approx(1.0)

    in_virtual_time(scenario())


def test_a_preparation_costs_one_turn_for_all_who_share_it_and_one_more_after_it_failed() -> None:
    async def scenario() -> None:
        inner = Counting(fails=1)
        provider, recipe = PacedProvider(inner, 60.0), Recipe(commands=("true",))
        with pytest.raises(SandboxStartError):
            await provider.prepare(SandboxSpec(), recipe)
        began = asyncio.get_running_loop().time()
        await provider.prepare(SandboxSpec(), recipe)
        assert asyncio.get_running_loop().time() - began == pytest.approx(1.0)
        await asyncio.gather(*(provider.prepare(SandboxSpec(), recipe) for _ in range(20)))
        assert asyncio.get_running_loop().time() - began == pytest.approx(1.0)

    in_virtual_time(scenario())


def test_who_waits_for_a_turn_says_so() -> None:
    async def scenario() -> None:
        provider, cell = PacedProvider(Counting(), 30.0), Cell()
        await provider.open(SandboxSpec())
        enter_rollout(cell)
        waiting = asyncio.create_task(provider.open(SandboxSpec()))
        await asyncio.sleep(1.0)
        assert cell.what == "its turn to create a sandbox (local is held to 30 a minute)"
        await waiting

    in_virtual_time(scenario())


def test_only_backends_that_are_named_are_held_back() -> None:
    assert isinstance(make_provider("local", creations_per_minute={"local": 9.0}), PacedProvider)
    assert isinstance(make_provider("local", creations_per_minute={"docker": 9.0}), LocalProvider)


@pytest.mark.parametrize(
    ("rates", "backend", "expected"),
    [
        ({}, "docker", 64),
        ({"docker": 60.0}, "docker", 64),
        ({"docker": 6.0}, "docker", 7),
        ({"docker": 0.1}, "docker", 1),
        ({"docker": 6.0}, "namespace", 64),
        ({"docker": 6.0, "namespace": 600.0}, "auto", 7),
    ],
)
def test_no_more_start_at_once_than_get_their_turn_in_time(
    rates: dict[str, float], backend: str, expected: int
) -> None:
    assert at_once(64, rates, backend, 300.0) == expected


def test_a_rate_is_positive() -> None:
    with pytest.raises(ValueError, match="greater than 0"):
        HostSpec(creations_per_minute={"docker": 0})


async def test_a_host_keeps_to_the_rate_and_names_it() -> None:
    config = make_config(sandbox="local", host={"creations_per_minute": {"local": 1.0}}, limits={"start_s": 1000.0})
    host = Host(make_plan(config))
    await host.open()
    try:
        task = task_of(environment={"trusted": True}, setup=["true"])
        await hold(host, task, task)
        await told(host, 0, "start", "its turn to create a sandbox (local is held to 1 a minute)")
    finally:
        await host.close()
