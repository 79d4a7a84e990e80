"""A run in which nothing goes forward ends with an error that says what everything waits for, and loses nothing."""

from __future__ import annotations

import asyncio
import stat
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from rollout_engine.agents.base import AgentLimits, AgentModel, OnTurn
from rollout_engine.clusters import MakePlan
from rollout_engine.config import RunConfig
from rollout_engine.driver import Driver
from rollout_engine.engine import RolloutEngine
from rollout_engine.errors import RunError, StuckError
from rollout_engine.runstore import RunStore, read_run
from rollout_engine.sandboxes.base import Sandbox, SandboxSpec
from rollout_engine.sandboxes.local import LocalProvider
from rollout_engine.specs import Task
from rollout_engine.store import RunStatus
from rollout_engine.types import StopReason, Turn
from rollout_engine.waiting import Waiting
from rollout_engine.watch import GRACE_S, Pulse, Watch
from tests.helpers import MemoryStore, make_config, make_tasks, scripted
from tests.rig import Gate, answer, chat_server, gated, gated_verifier, served, task_of
from tests.test_driver import Handle, Hosts, assert_each_key_once, driving

FOREVER = 1e6
ENDLESS = dict.fromkeys(("queue_s", "start_s", "agent_s", "verify_s"), FOREVER)
"""Limits of phases that end nothing while a test lasts."""


# -- pure decisions ---------------------------------------------------------------------------------------------------


def watch(**fields: Any) -> Watch:
    return Watch(make_config(no_progress_s=10.0, **fields))


def test_a_run_that_moves_is_not_stuck_and_one_that_does_not_is() -> None:
    it, busy = watch(), Pulse(pending=1, held=1)
    it.heard("a", 5, 0.0)
    assert it.stuck(busy, 9.0) is None
    it.heard("a", 6, 9.0)
    assert it.stuck(busy, 18.0) is None
    it.heard("a", 6, 18.0)
    assert it.stuck(busy, 19.1) == "nothing has gone forward for 10 s (no_progress_s)"


@pytest.mark.parametrize(
    ("pulse", "is_stuck"),
    [
        (Pulse(0, 0), False),
        (Pulse(3, 0), True),
        (Pulse(0, 3), True),
        (Pulse(3, 0, wakes_at=200.0), False),
        (Pulse(3, 0, wakes_at=50.0), True),
        (Pulse(3, 1, wakes_at=200.0), True),
        (Pulse(3, 0, unread_rows=9), False),
        (Pulse(0, 0, uncommitted_since=99.0), False),
        (Pulse(0, 0, uncommitted_since=79.0), True),
    ],
)
def test_what_counts_as_waiting(pulse: Pulse, is_stuck: bool) -> None:
    """At 100 s, nothing was heard of since the beginning."""
    it = watch(store={"commit_s": 20.0})
    assert (it.stuck(pulse, 100.0) is not None) == is_stuck


def test_a_reader_that_never_reads_is_waited_for_so_long_and_one_that_reads_now_and_then_for_ever() -> None:
    it = watch(store={"max_unread_s": 50.0})
    assert all(it.stuck(Pulse(9, 0, unread_rows=1000 - now // 40), float(now)) is None for now in range(0, 1000, 10))
    reasons = [it.stuck(Pulse(9, 0, unread_rows=7), float(now)) for now in range(1000, 1070, 10)]
    assert reasons[:-1] == [None] * 6
    assert reasons[-1] == "nobody has read a row for 50 s (store.max_unread_s)"


def test_the_default_bound_follows_the_longest_deadline_of_any_task() -> None:
    config = make_config()
    it = Watch(config)
    assert it.limit_s == config.limits.deadline_s + GRACE_S
    long = task_of(limits={"agent_s": 9000.0})
    it.planned(config.limits.deadline_of(long.limits), 0.0)
    assert it.limit_s == config.limits.deadline_s - config.limits.agent_s + 9000.0 + GRACE_S


@given(st.lists(st.tuples(st.floats(0, 15), st.booleans()), max_size=40))
def test_it_is_stuck_exactly_when_the_longest_silence_is_over_the_limit(steps: list[tuple[float, bool]]) -> None:
    it, now, last, moves = watch(), 0.0, 0.0, 0
    for gap, moved in steps:
        now += gap
        stuck = it.stuck(Pulse(1, 1), now)
        assert (stuck is not None) == (now - last > 10.0)
        if moved:
            moves += 1
            last = now
            it.heard("a", moves, now)


# -- real things that hang --------------------------------------------------------------------------------------------


async def test_a_model_that_accepts_and_never_answers_ends_the_run_and_a_resume_has_every_row(tmp_path: Path) -> None:
    path, silent = tmp_path / "run", True

    async def handler(request: web.Request) -> web.StreamResponse:
        if silent:
            await asyncio.Event().wait()
        return answer("0")

    async with chat_server(handler) as url:
        model = served(url, call_timeout_s=FOREVER)
        options: dict[str, Any] = {"sandbox": "none", "ray": "off", "limits": ENDLESS, "host": {"slots": 3}}
        with pytest.raises(StuckError) as caught:
            async with RolloutEngine([model], run_dir=path, no_progress_s=3.0, **options) as engine:
                await engine.finish(make_tasks(6))
        text = str(caught.value)
        assert "nothing has gone forward for 3 s (no_progress_s)" in text
        assert "m/0/t0: agent, waits for call 1 to model m for" in text
        assert "queue, waits for a slot on host-0-e1" in text
        dump = path / "stuck-1.txt"
        assert f"the whole state is in {dump}" in text
        assert stat.S_IMODE(dump.stat().st_mode) == 0o600
        assert_tells(dump.read_text(), "driver", "breakers", "leases", "hosts", "the driver's tasks")
        silent = False
        async with RolloutEngine([model], run_dir=path, resume=True, **options) as engine:
            await engine.finish(make_tasks(6))
    assert read_run(path).rollouts["status"].to_pylist() == ["completed"] * 6


def assert_tells(text: str, *sections: str) -> None:
    for section in sections:
        assert f"\n\n{section}\n" in text, text
    assert "m/0/t0: agent, waits for call 1 to model m" in text
    assert "serving.py" in text, "stacks name files"
    assert "models/http.py" in text, "down to what is awaited"


async def test_no_secret_and_no_prompt_is_in_a_dump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", "sk-very-secret-value")

    async def handler(request: web.Request) -> web.StreamResponse:
        await asyncio.Event().wait()
        return answer()

    async with chat_server(handler) as url:
        model = served(url, call_timeout_s=FOREVER, api_key_env="SOME_KEY")
        options: dict[str, Any] = {"sandbox": "none", "ray": "off", "limits": ENDLESS, "no_progress_s": 2.0}
        with pytest.raises(StuckError) as caught:
            async with RolloutEngine([model], run_dir=tmp_path / "run", **options) as engine:
                await engine.finish([task_of(prompt="the hidden prompt")])
    for text in (str(caught.value), (tmp_path / "run" / "stuck-1.txt").read_text()):
        assert "sk-very" not in text
        assert "hidden prompt" not in text


class NeverOpens(LocalProvider):
    async def open(self, spec: SandboxSpec) -> Any:
        await asyncio.Event().wait()


async def stuck_in(config: RunConfig, *tasks: Task) -> str:
    async with driving(config) as drive:
        with pytest.raises(StuckError) as caught:
            await drive.done(drive.submit(tasks))
        assert drive.store.dumps
        began = time.monotonic()
    assert time.monotonic() - began < 60.0, "and it closes"
    return str(caught.value)


async def test_a_sandbox_that_is_never_made_is_named() -> None:
    config = make_config(sandbox="tests.test_watch:NeverOpens", no_progress_s=2.0, limits=ENDLESS)
    text = await stuck_in(config, task_of(environment={"trusted": True}))
    assert "m/0/t: start, waits for a sandbox to be created" in text


async def test_a_verifier_that_never_answers_is_named() -> None:
    config = make_config(no_progress_s=2.0, limits=ENDLESS, trusted_code=["tests.*"])
    text = await stuck_in(config, task_of(verifier=gated_verifier(Gate())))
    assert "m/0/t: verify, waits for its verifier" in text


async def test_a_consumer_that_never_reads_ends_the_run_after_its_own_limit() -> None:
    store = {"max_unread_rows": 2, "max_unread_s": 3.0}
    config = make_config(scripted(latency_ms=50), no_progress_s=1.5, store=store, host={"slots": 2, "prefetch": 0.0})
    async with driving(config) as drive:
        submission = drive.submit(make_tasks(12), read=True)
        async with asyncio.timeout(60):
            await drive.driver.over.wait()
        assert isinstance(submission.error, StuckError)
        assert "nobody has read a row for 3 s (store.max_unread_s)" in str(submission.error)
        assert submission.stream is not None
        assert len(drive.rows) == submission.stream.unread_rows < 12, "what was committed can still be read"


class Deaf(Handle):
    """A host that does not say what it waits for."""

    async def waiting_for(self, limit: int = 20) -> list[Waiting]:
        await asyncio.Event().wait()
        return []


async def test_a_host_that_does_not_answer_is_told_of_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout_engine.dump.ANSWER_S", 0.1)
    monkeypatch.setattr("tests.test_driver.Handle", Deaf)
    text = await stuck_in(
        make_config(no_progress_s=2.0, limits=ENDLESS, trusted_code=["tests.*"]),
        task_of(verifier=gated_verifier(Gate())),
    )
    assert "host-0: does not answer" in text


class Stopped(Handle):
    """A host that answers once, takes what it is given then, and never says so; the other one is well."""

    async def exchange(self, request: Any) -> Any:
        answers = self.exchanges == 0 or self.host_id != "host-0"
        reply = await super().exchange(request)
        if not answers:
            await asyncio.Event().wait()
        return reply


async def test_a_host_that_stops_exchanging_is_lost_after_its_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout_engine.serving.EXCHANGE_GRACE_S", 1.0)
    monkeypatch.setattr("rollout_engine.serving.RETRY_PAUSE_S", 0.01)
    monkeypatch.setattr("tests.test_driver.Handle", Stopped)
    gate = Gate()
    async with driving(make_config(host={"lease_s": 3.0, "slots": 4}, **gated(gate)), hosts=Hosts(2)) as drive:
        submission = drive.submit(make_tasks(30))
        await gate.reached(8)  # it has some: the other one could end them all before it asks again
        gate.open()
        rows = await drive.done(submission)
        notes = drive.driver.progress.notes
        assert any("host-0 is lost: silent for" in note for note in notes), notes
    assert_each_key_once(rows, 30)
    assert {row.host_id for row in rows} == {"host-1"}


class Disk(MemoryStore):
    """A store whose writes stop at a gate of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.let = threading.Event()

    def write(self, batches: list[pa.RecordBatch]) -> None:
        self.let.wait(120)
        super().write(batches)


@pytest.mark.parametrize("tasks", [1, 40])
async def test_a_disk_that_takes_no_rows_ends_the_run_and_holds_up_no_close(tasks: int) -> None:
    """Also where every rollout has ended, and only their rows are on their way."""
    store = Disk()
    config = make_config(store={"commit_s": 0.5}, host={"slots": 2})
    before = asyncio.all_tasks()
    hosts = Hosts(1)
    driver = Driver(config, store, hosts, {}, lambda host, node: _plan(config, host, node), epoch=1)
    await driver.open()
    try:
        from rollout_engine.submission import Submission
        from tests.test_driver import ListFeed

        submission = Submission(0, ListFeed(make_tasks(tasks)))
        driver.submit(submission)
        async with asyncio.timeout(60):
            await submission.done.wait()
        assert isinstance(submission.error, StuckError)
        assert "the disk has taken no rows for 0.5 s (store.commit_s)" in str(submission.error)
        assert "bytes of rows wait for the disk" in str(submission.error)
    finally:
        async with asyncio.timeout(60):
            await driver.close()
        store.let.set()
    assert driver.disk_hangs
    assert asyncio.all_tasks() == before


def _plan(config: RunConfig, host_id: str, node_id: str) -> Any:
    from rollout_engine.hostplan import HostPlan

    return HostPlan("run", 1, host_id, node_id, config)


class Talker:
    """Takes its time over many turns."""

    async def run(
        self, task: Task, model: AgentModel, sandbox: Sandbox | None, limits: AgentLimits, on_turn: OnTurn
    ) -> StopReason:
        messages = task.messages()
        for index in range(12):
            await asyncio.sleep(0.3)
            completion = await model.complete(messages)
            on_turn(Turn(index, [*messages, completion.message], completion))
        return StopReason.FINISHED


async def test_turns_are_progress_though_no_row_comes() -> None:
    config = make_config(agent="tests.test_watch:Talker", no_progress_s=3.0)
    began = time.monotonic()
    async with driving(config) as drive:
        rows = await drive.run(make_tasks(1))
    assert time.monotonic() - began > 3.3
    assert [row.num_turns for row in rows] == [12]


async def test_a_cluster_that_does_not_come_up_is_given_up() -> None:
    class Nowhere(Hosts):
        async def open(self, make_plan: MakePlan, keys: Mapping[str, str]) -> None:
            await asyncio.Event().wait()

    config = make_config(cluster_s=0.3)
    driver = Driver(config, MemoryStore(), Nowhere(1), {}, lambda host, node: _plan(config, host, node), epoch=1)
    with pytest.raises(RunError, match=r"no host was up within 0\.3 s \(cluster_s\)"):
        async with asyncio.timeout(60):
            await driver.open()


async def test_final_tables_that_are_never_written_end_the_close_and_lose_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, let, close = tmp_path / "run", threading.Event(), RunStore.close
    ended = threading.Event()

    def slow(self: RunStore, status: RunStatus) -> None:
        let.wait(120)
        close(self, status)
        ended.set()

    monkeypatch.setattr(RunStore, "close", slow)
    options: dict[str, Any] = {"sandbox": "none", "ray": "off", "store": {"final_tables_s": 0.3}}
    with pytest.raises(RunError, match=r"not written within 0\.3 s \(store\.final_tables_s\)"):
        async with RolloutEngine([scripted()], run_dir=path, **options) as engine:
            await engine.finish(make_tasks(3))
    assert read_run(path).rollouts.num_rows == 3
    let.set()
    assert await asyncio.to_thread(ended.wait, 60)


async def test_an_engine_says_at_any_time_what_its_rollouts_wait_for() -> None:
    gate = Gate()
    config = make_config(trusted_code=["tests.*"])
    async with RolloutEngine(config=config) as engine:
        running = asyncio.create_task(engine.finish([task_of(verifier=gated_verifier(gate))]))
        await gate.reached(1)
        (rows,) = (await engine.waiting()).values()
        assert [(row.phase, row.waits_for) for row in rows] == [("verify", "its verifier")]
        gate.open()
        await running
