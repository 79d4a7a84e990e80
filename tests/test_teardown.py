"""A rollout's row is there in time whatever its sandbox's removal does, and the box goes in the end."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rollout_engine import teardown
from rollout_engine.exchange import HostLimits, Lease, Request
from rollout_engine.host import Host
from rollout_engine.hostplan import HostPlan
from rollout_engine.sandboxes.base import Sandbox, SandboxSpec
from rollout_engine.sandboxes.local import LocalProvider
from rollout_engine.schema import batch_to_records
from rollout_engine.specs import task_body
from rollout_engine.teardown import Leftovers, Owned, finish, remove_all
from rollout_engine.types import RolloutRecord
from tests.helpers import make_config, make_plan
from tests.rig import Gate, bench, gated_verifier, spec_of, task_of

IN_SANDBOX: dict[str, Any] = {"environment": {"trusted": True}}
SCRIPT = {"type": "script", "command": "true"}


class ClosesLate(LocalProvider):
    """A real provider; the first `hangs` calls of `close`, over all of its sandboxes, never return."""

    def __init__(self, directory: Path, hangs: int) -> None:
        super().__init__(directory)
        self._directory, self.hangs, self.hung = directory, hangs, 0

    async def open(self, spec: SandboxSpec) -> Any:
        return _Late(self, await super().open(spec))

    def boxes(self) -> list[str]:
        """Directories of sandboxes that are there."""
        return [path.name for home in self._directory.iterdir() for path in home.glob("sandbox-*")]

    async def gone(self) -> None:
        async with asyncio.timeout(60):
            while self.boxes():
                await asyncio.sleep(0.01)


class _Late:
    def __init__(self, provider: ClosesLate, sandbox: Sandbox) -> None:
        self._provider, self._sandbox = provider, sandbox

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sandbox, name)

    async def close(self) -> None:
        if self._provider.hung < self._provider.hangs:
            self._provider.hung += 1
            await asyncio.Event().wait()
        await self._sandbox.close()


async def test_a_close_that_hangs_holds_up_no_row_and_the_reaper_removes_the_box(tmp_path: Path) -> None:
    config = make_config(sandbox="local", limits={"close_s": 0.2})
    provider = ClosesLate(tmp_path, hangs=1)
    async with bench(config, provider=provider) as rig:
        record = await rig.run(task_of(**IN_SANDBOX))
        assert (record.status, record.score, provider.hung) == ("completed", 1.0, 1)
        assert record.close_s < 20
        assert provider.boxes() != []
        await provider.gone()


@pytest.mark.slow
async def test_all_that_a_rollout_made_is_removed_at_once_so_that_two_that_hang_take_no_longer(tmp_path: Path) -> None:
    """The agent's sandbox and the verifier's; and what the verifier found is kept."""
    config = make_config(sandbox="local", limits={"close_s": 3.0})
    provider = ClosesLate(tmp_path, hangs=3)
    async with bench(config, provider=provider) as rig:
        record = await rig.run(task_of(**IN_SANDBOX, verifier=SCRIPT))
        assert (record.status, record.score, record.failure_type) == ("completed", 1.0, None)
        assert provider.hung >= 2
        assert record.close_s < 6.0
        await provider.gone()


@pytest.mark.parametrize("verify_hangs", [False, True])
@pytest.mark.slow
async def test_the_time_to_clean_up_is_inside_the_whole_rollouts_deadline(verify_hangs: bool, tmp_path: Path) -> None:
    gate = Gate()
    if not verify_hangs:
        gate.open()
    limits = {"queue_s": 0.1, "start_s": 3.0, "agent_s": 3.0, "verify_s": 2.0, "close_s": 1.0}
    config = make_config(sandbox="local", limits=limits, trusted_code=["tests.rig:*"])
    provider = ClosesLate(tmp_path, hangs=9)
    async with bench(config, provider=provider) as rig:
        began = time.monotonic()
        await rig.run(task_of(**IN_SANDBOX, verifier=gated_verifier(gate)))
        assert time.monotonic() - began < sum(limits.values())
        assert provider.hung >= 1


async def test_a_host_sends_the_row_while_the_box_is_still_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider = ClosesLate(tmp_path, hangs=3)
    monkeypatch.setattr("rollout_engine.host.make_provider", lambda name, **options: provider)
    monkeypatch.setattr(teardown, "FIRST_PAUSE_S", 0.01)
    host = Host(make_plan(make_config(sandbox="local", limits={"close_s": 1.0})))
    await host.open()
    try:
        (row,) = await rows_of(host, task_of(**IN_SANDBOX))
        assert (row.status, row.score) == ("completed", 1.0)
        assert provider.boxes() != []
        await provider.gone()
    finally:
        await host.close()


async def rows_of(host: Host, task: Any) -> list[RolloutRecord]:
    spec = spec_of(task)
    limits = HostLimits({"m": Lease(-1, -1.0)}, wait_s=10.0)
    rows: list[RolloutRecord] = []
    async with asyncio.timeout(120):
        for number in range(1, 100):
            request = Request(1, number, 1, (spec,), {spec.digest: task_body(task)}, limits=limits)
            reply = await host.exchange(request)
            rows += [record for _, batch in reply.batches for record in batch_to_records(batch)]
            if rows:
                break
    return rows


async def test_a_host_whose_provider_does_not_close_is_closed_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Endless(LocalProvider):
        async def close(self) -> None:
            await super().close()
            await asyncio.Event().wait()

    monkeypatch.setattr("rollout_engine.host.make_provider", lambda name, **options: Endless(tmp_path))
    monkeypatch.setattr("rollout_engine.host.PART_CLOSE_S", 0.1)
    plan: HostPlan = make_plan(make_config(sandbox="local"))
    host = Host(plan)
    await host.open()
    async with asyncio.timeout(60):
        await host.close()


class Exporting(LocalProvider):
    """Stops before or after a layer is made, until it may go on."""

    def __init__(self, directory: Path, *, after: bool) -> None:
        super().__init__(directory)
        self.gate, self._after = Gate(), after

    async def keep(self, work: Path, paths: Sequence[str], max_bytes: int) -> str:
        if not self._after:
            await self.gate.enter()
        layer = await super().keep(work, paths, max_bytes)
        if self._after:
            await self.gate.enter()
        return layer


@pytest.mark.parametrize("after", [False, True], ids=["while it is made", "once it is there"])
async def test_a_workspace_whose_rollout_is_cancelled_meanwhile_is_released(after: bool, tmp_path: Path) -> None:
    provider = Exporting(tmp_path, after=after)
    async with bench(make_config(sandbox="local", limits={"close_s": 20.0}), provider=provider) as rig:
        rollout = asyncio.create_task(rig.rollout(task_of(**IN_SANDBOX, verifier=SCRIPT)).run())
        await provider.gate.reached(1)
        rollout.cancel()
        await asyncio.sleep(0)
        provider.gate.open()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait_for(rollout, 60)
        assert provider._layers == {}


# -- the pieces -------------------------------------------------------------------------------------------------------


async def test_what_fails_to_go_is_tried_again_until_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teardown, "FIRST_PAUSE_S", 0.001)
    tries, gone = 0, asyncio.Event()

    async def remove() -> None:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise OSError("busy")
        gone.set()

    leftovers = Leftovers(1.0)
    await remove_all([Owned("it", remove)], 1.0, leftovers)
    assert len(leftovers) == 1
    async with asyncio.timeout(60):
        await gone.wait()
        while len(leftovers):
            await asyncio.sleep(0)


async def test_what_never_goes_is_given_up_after_some_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teardown, "FIRST_PAUSE_S", 0.0)
    tries = 0

    async def remove() -> None:
        nonlocal tries
        tries += 1
        raise OSError("busy")

    leftovers = Leftovers(1.0)
    leftovers.take(Owned("it", remove))
    async with asyncio.timeout(60):
        while len(leftovers):
            await asyncio.sleep(0)
    assert tries == teardown.TRIES


async def test_leftovers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teardown, "MAX_LEFT", 3)

    async def never() -> None:
        await asyncio.Event().wait()

    leftovers = Leftovers(60.0)
    for _ in range(5):
        leftovers.take(Owned("it", never))
    assert len(leftovers) == 3
    async with asyncio.timeout(60):
        await leftovers.close()
    assert len(leftovers) == 0


async def test_a_removal_goes_on_while_its_rollout_is_cancelled_and_the_cancellation_is_kept() -> None:
    begun, let, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def remove() -> None:
        begun.set()
        await let.wait()
        ended.set()

    removing = asyncio.create_task(remove_all([Owned("it", remove)], 5.0, Leftovers(1.0)))
    await begun.wait()
    removing.cancel()
    await asyncio.sleep(0)
    let.set()
    with pytest.raises(asyncio.CancelledError):
        await removing
    assert ended.is_set()


async def test_finish_says_whether_it_was_done() -> None:
    async def fails() -> None:
        raise OSError("no")

    assert await finish(asyncio.sleep(0), 1.0)
    assert not await finish(fails(), 1.0)
    assert not await finish(asyncio.sleep(60), 0.01)
