"""The public engine from the caller's loop: sources, consumers that are slow or leave, ends of every kind, resuming.

One test: .venv/bin/pytest tests/test_engine.py -k breaks
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from aiohttp import web

import rollout_engine
from rollout_engine import chunks, host, loopthread
from rollout_engine.config import ModelSpec
from rollout_engine.engine import RolloutEngine
from rollout_engine.errors import InputError, RunError
from rollout_engine.models.server import ModelServer
from rollout_engine.results import Group
from rollout_engine.specs import Task
from rollout_engine.store import open_run, read_rollouts
from tests.helpers import make_tasks, scripted
from tests.rig import Gate, answer, chat_server, gated, served, task_of

OFF: dict[str, Any] = {"ray": "off", "sandbox": "none"}
SLOW = scripted(latency_ms=30)
"""Where it matters that rows are on the disk before all rollouts have run."""


def make_engine(path: Path | None = None, *models: dict[str, Any], **fields: Any) -> RolloutEngine:
    resume = {name: fields.pop(name) for name in ("resume", "retry_failed") if name in fields}
    return RolloutEngine(list(models) or [scripted()], run_dir=path, **resume, **{**OFF, **fields})


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    """No thread of the engine outlives its block, whatever happened in it."""
    yield
    ends = time.monotonic() + 60
    while (left := engine_threads()) and time.monotonic() < ends:
        time.sleep(0.01)
    assert left == []


def engine_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name in ("rollout-driver", "committer", "tasks")]


def status_of(path: Path) -> str:
    return open_run(path).info.status


def assert_whole(groups: list[Group], tasks: int, k: int, models: int = 1) -> None:
    """Each group once, with all its attempts in order."""
    assert len(groups) == len({(group.round, group.task_id, group.model) for group in groups}) == tasks * models
    for group in groups:
        assert [record.attempt for record in group.rollouts] == list(range(k))
        assert {(record.task_id, record.model, record.round) for record in group.rollouts} == {
            (group.task_id, group.model, group.round)
        }


async def gathered(stream: AsyncIterator[Group]) -> tuple[list[Group], BaseException | None]:
    """All groups, and what was raised after them."""
    groups = []
    try:
        async for group in stream:
            groups.append(group)  # noqa: PERF401
    except Exception as error:
        return groups, error
    return groups, None


# -- reading ----------------------------------------------------------------------------------------------------------


async def test_groups_come_whole_and_in_the_order_of_their_attempts(tmp_path: Path) -> None:
    path = tmp_path / "run"
    async with make_engine(path, scripted("a"), scripted("b", skill=0.0), k=3) as engine:
        groups = [group async for group in engine.groups(make_tasks(8))]
    assert_whole(groups, 8, 3, models=2)
    assert {(group.model, tuple(group.scores)) for group in groups} == {("a", (1.0,) * 3), ("b", (0.0,) * 3)}
    assert status_of(path) == "finished"


async def test_what_a_reader_has_seen_is_on_disk(tmp_path: Path) -> None:
    path = tmp_path / "run"
    seen = 0
    async with make_engine(path, k=2) as engine:
        async for record in engine.rollouts(make_tasks(10)):
            seen += 1
            committed = {key for batch in open_run(path).scan(["key"]) for key in batch.column("key").to_pylist()}
            assert record.key in committed
    assert seen == 20


async def test_rounds_count_up_by_themselves_and_may_be_given() -> None:
    async with make_engine(k=2) as engine:
        for expected in (0, 1):
            groups = [group async for group in engine.groups(make_tasks(2))]
            assert {group.round for group in groups} == {expected}
        groups = [group async for group in engine.groups(make_tasks(2), round=7)]
        assert {group.round for group in groups} == {7}


async def test_two_readers_at_once_each_get_their_own(tmp_path: Path) -> None:
    async def read(engine: RolloutEngine, count: int) -> list[Group]:
        return [group async for group in engine.groups(make_tasks(count))]

    async with make_engine(tmp_path / "run", k=2) as engine:
        few, many = await asyncio.gather(read(engine, 3), read(engine, 11))
    assert_whole(few, 3, 2)
    assert_whole(many, 11, 2)
    assert read_rollouts(tmp_path / "run").num_rows == 28


async def test_progress_counts_what_was_committed() -> None:
    broken = {**scripted("b", p_500=1.0), "call_retries": 0}
    async with make_engine(None, scripted("a"), broken, k=2, retry=GIVE_UP) as engine:
        await engine.finish(make_tasks(5), total=5)
        progress = engine.progress
        assert (progress.total, progress.done, progress.valid) == (20, 20, 10)
        assert progress.failed == Counter({"model:ModelServerError": 10})
        assert progress.to_dict()["failed"] == {"model:ModelServerError": 10}


GIVE_UP = {"max_retries": 0, "breaker_failures": 0}


# -- without a loop ---------------------------------------------------------------------------------------------------


def test_run_returns_the_tables(tmp_path: Path) -> None:
    run = rollout_engine.run(
        make_tasks(6), [scripted("a"), scripted("b", skill=0.0)], run_dir=tmp_path / "run", k=4, **OFF
    )
    assert (run.rollouts.num_rows, run.groups.num_rows, run.rewards.num_rows) == (48, 12, 6)
    assert set(run.rewards.column("separation").to_pylist()) == {1.0}
    assert run.turns.num_rows == 48
    assert read_rollouts(tmp_path / "run").num_rows == 48
    assert status_of(tmp_path / "run") == "finished"


def test_run_without_a_directory_leaves_none_behind() -> None:
    run = rollout_engine.run(make_tasks(2), [scripted()], **OFF)
    assert run.rollouts.num_rows == 2
    assert not run.run_dir.exists()


async def test_run_says_what_to_use_in_a_running_loop() -> None:
    with pytest.raises(RunError, match="async with RolloutEngine"):
        rollout_engine.run(make_tasks(2), [scripted()], **OFF)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"models": []}, "at least one model"),
        ({"models": [{"name": "m", "kind": "scripted", "options": {"skil": 1}}]}, "no such option"),
        ({"agent": "no_such"}, "unknown agent"),
        ({"k": 0}, "greater than 0"),
        ({"colour": "red"}, "Extra inputs"),
        ({"models": [{"name": "m", "kind": "openai", "model": "x"}]}, "URL is missing"),
        ({"sandbox": "no.such:Provider"}, "cannot import"),
    ],
)
def test_bad_input_is_told_before_anything_is_made(fields: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=said):
        rollout_engine.run(make_tasks(1), **{"models": [scripted()], **OFF, **fields}, run_dir=tmp_path / "a" / "run")
    assert list(tmp_path.iterdir()) == []


async def test_a_second_driver_on_a_live_run_is_refused(tmp_path: Path) -> None:
    async with make_engine(tmp_path / "run") as engine:
        with pytest.raises(InputError, match="a driver works on this run"):
            async with make_engine(tmp_path / "run", resume=True):
                pass
        with pytest.raises(InputError, match="is a run already"):
            async with make_engine(tmp_path / "run"):
                pass
        await engine.finish(make_tasks(2))


# -- sources ----------------------------------------------------------------------------------------------------------


async def asynchronous(count: int) -> AsyncIterator[Task]:
    for task in make_tasks(count):
        await asyncio.sleep(0)
        yield task


def write_jsonl(path: Path, count: int) -> Path:
    path.write_text("".join(task.model_dump_json(exclude_defaults=True) + "\n" for task in make_tasks(count)))
    return path


def write_parquet(path: Path, count: int) -> Path:
    rows = [
        {**task.model_dump(exclude_defaults=True), "verifier": json.dumps(task.verifier)} for task in make_tasks(count)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


SOURCES: dict[str, Callable[[Path, int], Any]] = {
    "list": lambda _, count: list(make_tasks(count)),
    "generator": lambda _, count: make_tasks(count),
    "dicts": lambda _, count: [task.model_dump(exclude_defaults=True) for task in make_tasks(count)],
    "asynchronous": lambda _, count: asynchronous(count),
    "jsonl": lambda path, count: write_jsonl(path / "tasks.jsonl", count),
    "jsonl as text": lambda path, count: str(write_jsonl(path / "tasks.jsonl", count)),
    "parquet": lambda path, count: write_parquet(path / "tasks.parquet", count),
}


@pytest.mark.parametrize("kind", SOURCES)
async def test_every_kind_of_source_gives_its_tasks(kind: str, tmp_path: Path) -> None:
    async with make_engine(k=2) as engine:
        groups = [group async for group in engine.groups(SOURCES[kind](tmp_path, 9))]
    assert_whole(groups, 9, 2)
    assert {tuple(group.scores) for group in groups} == {(1.0, 1.0)}


@pytest.mark.parametrize("kind", ["list", "asynchronous"])
async def test_an_empty_source_ends_at_once(kind: str, tmp_path: Path) -> None:
    async with make_engine(tmp_path / "run") as engine:
        assert [group async for group in engine.groups(SOURCES[kind](tmp_path, 0))] == []
        await engine.finish(SOURCES[kind](tmp_path, 0))


def breaking(count: int) -> Iterator[Task]:
    yield from make_tasks(count)
    raise OSError("the source broke")


async def breaking_later(count: int) -> AsyncIterator[Task]:
    for task in make_tasks(count):
        yield task
    raise OSError("the source broke")


@pytest.mark.parametrize(
    ("source", "count"), [(breaking, 0), (breaking, 5), (breaking, 300), (breaking_later, 0), (breaking_later, 30)]
)
async def test_a_source_that_raises_does_so_after_the_groups_of_the_tasks_before(
    source: Callable[[int], Any], count: int, tmp_path: Path
) -> None:
    async with make_engine(tmp_path / "run") as engine:
        groups, error = await gathered(engine.groups(source(count)))
        again = [group async for group in engine.groups(make_tasks(3))]
    assert str(error) == "the source broke"
    assert_whole(groups, count, 1)
    assert_whole(again, 3, 1)
    assert status_of(tmp_path / "run") == "interrupted"


@pytest.mark.parametrize("kind", ["list", "asynchronous"])
async def test_a_wrong_task_is_told_by_its_number_after_the_groups_of_those_before(kind: str) -> None:
    tasks: list[Any] = [*make_tasks(4), {"prompt": "no verifier"}, *make_tasks(9)]

    async def given() -> AsyncIterator[Any]:
        for task in tasks:
            yield task

    async with make_engine() as engine:
        groups, error = await gathered(engine.groups(tasks if kind == "list" else given()))
    assert_whole(groups, 4, 1)
    assert isinstance(error, InputError)
    assert "needs a verifier" in str(error)


async def test_a_task_that_does_not_fit_the_config_is_told_after_those_before() -> None:
    tasks = [*make_tasks(4), task_of(task_id="boxed", environment={"trusted": True})]
    async with make_engine() as engine:
        groups, error = await gathered(engine.groups(tasks))
    assert_whole(groups, 4, 1)
    assert isinstance(error, InputError)
    assert "needs a sandbox" in str(error)


async def test_a_task_is_run_while_its_asynchronous_source_waits_for_what_became_of_it() -> None:
    seen = asyncio.Event()

    async def source() -> AsyncIterator[Task]:
        for task in make_tasks(3):
            yield task
            await seen.wait()
            seen.clear()

    groups = []
    async with asyncio.timeout(60), make_engine() as engine:
        async for group in engine.groups(source()):
            groups.append(group)
            seen.set()
    assert_whole(groups, 3, 1)


async def test_a_task_is_run_while_its_blocking_source_waits_for_what_became_of_it() -> None:
    seen = threading.Semaphore(0)

    def source() -> Iterator[Task]:
        for task in make_tasks(3):
            yield task
            assert seen.acquire(timeout=60)

    groups = []
    async with asyncio.timeout(60), make_engine() as engine:
        async for group in engine.groups(source()):
            groups.append(group)
            seen.release()
    assert_whole(groups, 3, 1)


async def test_a_source_that_blocks_for_ever_holds_up_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CLOSE_S", 0.1)
    release = threading.Event()

    def source() -> Iterator[Task]:
        yield from make_tasks(2)
        release.wait()

    began = time.monotonic()
    async with make_engine() as engine:
        async for _ in engine.groups(source()):
            break
    assert time.monotonic() - began < 30
    release.set()


async def test_an_endless_source_is_read_no_further_than_there_is_room() -> None:
    given = 0

    def source() -> Iterator[Task]:
        nonlocal given
        while True:
            yield task_of(task_id=f"t{given}")
            given += 1

    gate = Gate()
    async with make_engine(None, plan_ahead=50, host={"slots": 2, "prefetch": 0.0}, **gated(gate)) as engine:
        stream = engine.groups(source())
        first = asyncio.ensure_future(anext(stream))
        await gate.reached(2)
        async with asyncio.timeout(60):
            while given < 50:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert 50 <= given <= 50 + 2 + 3 * 256
        gate.open()
        await first
        await stream.aclose()


# -- leaving ----------------------------------------------------------------------------------------------------------


async def test_a_reader_that_breaks_off_cancels_the_rest_and_the_engine_goes_on(tmp_path: Path) -> None:
    gate = Gate()
    config = {"host": {"slots": 4}, "store": {"max_unread_rows": 5}, **gated(gate)}
    async with make_engine(tmp_path / "run", k=2, **config) as engine:
        stream = engine.groups(make_tasks(50))
        first = asyncio.ensure_future(anext(stream))
        await gate.reached(4)
        gate.let(4)
        await first
        await stream.aclose()
        gate.open()
        groups = [group async for group in engine.groups(make_tasks(10))]
    assert_whole(groups, 10, 2)
    rows = read_rollouts(tmp_path / "run", ["round", "status"]).to_pylist()
    old = Counter(row["status"] for row in rows if row["round"] == 0)
    assert old["cancelled"] >= 80
    assert old.keys() == {"completed", "cancelled"}
    assert status_of(tmp_path / "run") == "interrupted"


async def test_breaking_off_and_closing_at_once_leaves_nothing() -> None:
    before = asyncio.all_tasks()
    for _ in range(3):
        async with make_engine(k=4) as engine:
            async for _ in engine.groups(make_tasks(100)):
                break
    async with asyncio.timeout(60):
        while asyncio.all_tasks() != before:
            await asyncio.sleep(0.01)


async def test_an_error_of_the_reader_is_raised_and_leaves_nothing(tmp_path: Path) -> None:
    gate = Gate()

    async def read() -> None:
        async with make_engine(tmp_path / "run", **gated(gate)) as engine:
            async for _ in engine.groups(make_tasks(100)):
                raise ZeroDivisionError

    reading = asyncio.create_task(read())
    await gate.reached(1)
    gate.let(1)
    with pytest.raises(ZeroDivisionError):
        await reading
    assert status_of(tmp_path / "run") == "interrupted"


async def test_a_cancelled_reader_leaves_nothing() -> None:
    gate = Gate()

    async def read() -> None:
        async with make_engine(None, **gated(gate)) as engine:
            async for _ in engine.groups(make_tasks(10)):
                pass

    reading = asyncio.create_task(read())
    await gate.reached(10)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert gate.inside == 0


async def test_an_asynchronous_source_is_let_go_when_its_reader_leaves() -> None:
    ended = asyncio.Event()

    async def source() -> AsyncIterator[Task]:
        try:
            for task in make_tasks(3):
                yield task
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with make_engine() as engine:
        stream = engine.groups(source())
        await anext(stream)
        await stream.aclose()
        async with asyncio.timeout(60):
            await ended.wait()


# -- backpressure -----------------------------------------------------------------------------------------------------


async def test_a_slow_reader_bounds_what_is_run_and_the_run_goes_on_afterwards() -> None:
    store = {"max_unread_rows": 20}
    async with make_engine(None, SLOW, k=2, host={"slots": 4, "prefetch": 0.0}, store=store) as engine:
        stream = engine.groups(make_tasks(40))
        await anext(stream)
        async with asyncio.timeout(60):
            while engine.progress.done <= 20:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        assert engine.progress.done <= 20 + 2 + 12 + 20
        assert len([group async for group in stream]) == 39


async def test_rows_are_committed_although_nobody_reads_them_yet(tmp_path: Path) -> None:
    async with make_engine(tmp_path / "run") as engine:
        stream = engine.groups(make_tasks(30))
        await anext(stream)
        async with asyncio.timeout(60):
            while engine.progress.done < 30:
                await asyncio.sleep(0.01)
        assert open_run(tmp_path / "run").winners().rows == 30
        assert len([group async for group in stream]) == 29


# -- models that break ------------------------------------------------------------------------------------------------


async def test_a_model_that_answers_garbage_over_http_is_given_up_and_the_other_untouched(tmp_path: Path) -> None:
    solutions = {task.task_id: str(task.solution) for task in make_tasks(20)}
    models = {
        "good": ModelSpec(name="good", kind="scripted"),
        "bad": ModelSpec(name="bad", kind="scripted", options={"p_garbage": 0.5, "p_cut": 0.5}),
    }
    rules = {"max_retries": 1, "backoff_s": 0.0, "breaker_failures": 4, "breaker_pause_s": 0.05, "breaker_trips": 1}
    async with ModelServer(models, solutions=solutions) as server:
        wanted = [served(server.url, name, seed_header=True) for name in models]
        async with make_engine(tmp_path / "run", *wanted, k=2, retry=rules, host={"slots": 8}) as engine:
            groups = [group async for group in engine.groups(make_tasks(20))]
            notes = engine.progress.notes
    assert_whole(groups, 20, 2, models=2)
    for group in groups:
        if group.model == "good":
            assert group.scores == [1.0, 1.0]
        else:
            assert group.scores == [None, None]
            assert {record.failure_boundary for record in group.rollouts} == {"model"}
    assert any("bad was given up" in note for note in notes)
    assert status_of(tmp_path / "run") == "finished"


async def test_a_spent_budget_ends_a_run_with_all_rows_accounted_for(tmp_path: Path) -> None:
    model = {**scripted(tokens=1, latency_ms=100), "price_completion": 1e6}
    async with make_engine(
        tmp_path / "run", model, k=2, max_cost_usd=3.0, host={"slots": 2, "prefetch": 0.0}
    ) as engine:
        groups = [group async for group in engine.groups(make_tasks(20))]
    assert_whole(groups, 20, 2)
    statuses = Counter(record.status for group in groups for record in group.rollouts)
    assert statuses["completed"] + statuses["cancelled"] == 40
    assert 3 <= statuses["completed"] <= 12
    assert status_of(tmp_path / "run") == "finished"


# -- ends -------------------------------------------------------------------------------------------------------------


async def test_a_disk_that_refuses_ends_the_run_with_a_clear_error_and_it_can_be_resumed(tmp_path: Path) -> None:
    path = tmp_path / "run"
    store = {"segment_bytes": 1}
    host = {"slots": 4, "prefetch": 0.0}
    async with make_engine(path, SLOW, k=2, store=store, host=host) as engine:
        in_the_way = path / "log" / "1-2.arrows"
        in_the_way.mkdir()
        groups, error = await gathered(engine.groups(make_tasks(40)))
        assert isinstance(error, RunError)
        assert "log/1-2.arrows" in str(error)
        with pytest.raises(RunError):
            await engine.finish(make_tasks(1))
        in_the_way.rmdir()
    assert 0 < len(groups) < 40
    assert status_of(path) == "failed"
    async with make_engine(path, SLOW, k=2, store=store, resume=True) as engine:
        groups = [group async for group in engine.groups(make_tasks(40))]
    assert_whole(groups, 40, 2)
    assert read_rollouts(path).num_rows == 80
    assert status_of(path) == "finished"


@pytest.mark.slow
async def test_a_run_that_is_stuck_says_what_it_waits_for() -> None:
    gate = Gate()
    async with make_engine(None, no_progress_s=2.0, **gated(gate)) as engine:
        with pytest.raises(RunError, match=r"host-0-e1: m/0/t0: agent"):
            await engine.finish(make_tasks(1))


async def test_a_drained_run_has_all_that_ran_and_is_finished_by_a_resume(tmp_path: Path) -> None:
    path, gate = tmp_path / "run", Gate()
    fields = {"k": 2, "host": {"slots": 3}, **gated(gate)}
    async with make_engine(path, **fields) as engine:
        running = asyncio.create_task(engine.finish(make_tasks(10)))
        await gate.reached(3)
        draining = asyncio.create_task(engine.drain())
        (peer,) = engine._run.driver.board.peers.values()
        async with asyncio.timeout(60):
            while not peer.handle._host._held.paused:  # type: ignore[attr-defined]
                await asyncio.sleep(0.01)
        gate.let(3)
        async with asyncio.timeout(60):
            await draining
        assert not running.done()
        running.cancel()
        await asyncio.wait({running})
    assert (status_of(path), read_rollouts(path).num_rows) == ("interrupted", 3)
    gate.open()
    async with make_engine(path, **fields, resume=True) as engine:
        groups = [group async for group in engine.groups(make_tasks(10))]
    assert_whole(groups, 10, 2)
    assert read_rollouts(path).num_rows == 20


async def test_closing_with_work_left_is_an_interruption(tmp_path: Path) -> None:
    gate = Gate()
    async with make_engine(tmp_path / "run", **gated(gate)) as engine:
        running = asyncio.create_task(engine.finish(make_tasks(3)))
        await gate.reached(3)
        await engine.close()
        await engine.close()
        with pytest.raises(RunError, match="closed before"):
            await running
    assert status_of(tmp_path / "run") == "interrupted"


def bytes_below(path: Path) -> list[bytes]:
    return [file.read_bytes() for file in path.rglob("*") if file.is_file()]


async def test_closing_takes_no_longer_because_an_agent_does_not_let_itself_be_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "CLOSE_S", 0.2)
    monkeypatch.setattr(loopthread, "STOP_S", 0.2)
    gate = Gate()
    agent = {"agent": "tests.test_host:Deaf", "agent_options": {"gate": gate.name}}
    async with make_engine(tmp_path / "run", **agent) as engine:
        running = asyncio.create_task(engine.finish(make_tasks(2)))
        await gate.reached(2)
        began = time.monotonic()
        await engine.close()
        assert time.monotonic() - began < 15
        with pytest.raises(RunError):
            await running
    assert status_of(tmp_path / "run") == "interrupted"


async def test_two_engines_in_one_process_do_not_meet(tmp_path: Path) -> None:
    async def run(name: str, tasks: int) -> list[Group]:
        async with make_engine(tmp_path / name, scripted(name), k=2) as engine:
            return [group async for group in engine.groups(make_tasks(tasks))]

    for groups, tasks, name in zip(await asyncio.gather(run("a", 3), run("b", 5)), (3, 5), "ab", strict=True):
        assert_whole(groups, tasks, 2)
        assert {group.model for group in groups} == {name}


async def test_a_key_is_in_no_written_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "sk-very-secret-0123456789")

    async def echo(request: web.Request) -> web.Response:
        key = request.headers["authorization"]
        assert key == "Bearer sk-very-secret-0123456789"
        if "Say 1." in await request.text():
            return web.json_response({"error": {"message": f"no access with {key}"}}, status=403)
        return answer("0")

    async with chat_server(echo) as url:
        model = served(url, api_key_env="MY_KEY")
        async with make_engine(tmp_path / "run", model) as engine:
            await engine.finish(make_tasks(2))
    written = bytes_below(tmp_path)
    assert len(written) > 5
    assert not any(b"very-secret" in content for content in written)
    assert sorted(read_rollouts(tmp_path / "run").column("status").to_pylist()) == ["completed", "failed"]


async def test_the_tables_of_a_run_that_goes_on_can_be_read(tmp_path: Path) -> None:
    async with make_engine(tmp_path / "run", k=2) as engine:
        await engine.finish(make_tasks(3))
        run = await asyncio.to_thread(engine.tables)
        assert (run.rollouts.num_rows, run.groups.num_rows) == (6, 3)
        await engine.finish(make_tasks(3))
        assert (await asyncio.to_thread(engine.tables)).rollouts.num_rows == 12
