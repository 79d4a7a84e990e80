"""A run that is killed anywhere and resumed has the rows of one that was not disturbed, and its readers whole groups.

One test: .venv/bin/pytest tests/test_resume.py -k anywhere
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from rollout_engine.clusters import LocalCluster
from rollout_engine.config import RunConfig
from rollout_engine.driver import Driver
from rollout_engine.engine import RolloutEngine
from rollout_engine.errors import InputError, RunError
from rollout_engine.hostplan import HostPlan
from rollout_engine.results import Group
from rollout_engine.runstore import RunStore, open_store
from rollout_engine.schema import batch_to_records, records_to_batch
from rollout_engine.specs import Task
from rollout_engine.store import create_run, open_run, read_rollouts
from rollout_engine.store.recall import Recall
from rollout_engine.submission import QueueFeed, Submission
from tests.helpers import make_config, make_tasks, scripted
from tests.rig import Gate, gated
from tests.store.rows import SPACE, make_run, record

K = 3
TASKS = 9
MODELS: tuple[dict[str, Any], ...] = (
    scripted("strong", skill=0.8, latency_ms=10),
    {**scripted("weak", skill=0.4, p_500=0.3, latency_ms=10), "call_retries": 0},
)
FIELDS: dict[str, Any] = {
    "k": K,
    "retry": {"max_retries": 1, "backoff_s": 0.0, "breaker_failures": 0},
    "host": {"slots": 6, "prefetch": 0.5, "max_batch_rows": 6},
}
MANY = {"slots": 256}
SAME = ["round", "task_id", "model", "attempt", "retries", "status", "score", "passed", "final_answer", "failure_type"]


def config_of(**fields: Any) -> RunConfig:
    return make_config(*MODELS, **{**FIELDS, **fields})


def rows_of(path: Path) -> list[tuple[Any, ...]]:
    """What must be the same however often a run was killed, in one order."""
    table = read_rollouts(path, SAME)
    return sorted((tuple(row.values()) for row in table.to_pylist()), key=str)


class KilledError(Exception):
    """The process is gone."""


class Dying(RunStore):
    """A run directory whose process is killed at its n-th batch: before that reached the disk, or right after."""

    def __init__(self, path: Path, config: RunConfig, batches: int, *, written: bool) -> None:
        if (path / "run.json").exists():
            run = open_run(path)
            run.adopt(config)
        else:
            run = create_run(path, config)
        super().__init__(run)
        self._left, self._written = batches, written

    def write(self, batches: list[pa.RecordBatch]) -> None:
        for batch in batches:  # how many a commit has says how busy the disk was
            self._left -= 1
            if self._left > 0 or (self._left == 0 and self._written):
                super().write([batch])
            if self._left <= 0:
                raise KilledError

    def die(self) -> None:
        """Nothing is closed, as a kill would have it, but for what makes a live process out of a dead one."""
        self._writer.epoch.release()


async def run_until_killed(store: RunStore, config: RunConfig, tasks: list[Task], *, go_on: bool = False) -> bool:
    """Whether it came to its end before it was killed."""

    def plan(host_id: str, node_id: str) -> HostPlan:
        name = f"{host_id}-e{store.epoch}"
        return HostPlan(store.run_id, store.epoch, name, node_id, config, str(store._run.path))

    driver = Driver(config, store, LocalCluster(), {}, plan, store.epoch)
    await driver.open()
    try:
        feed = QueueFeed()
        submission = Submission(0, feed, go_on=go_on)
        driver.submit(submission)
        for task in tasks:
            if not (go_on and store.has_planned(0, task.task_id)):
                await feed.put(task)
        await feed.put(None)
        async with asyncio.timeout(60):
            await submission.done.wait()
        assert submission.error is None or isinstance(submission.error, KilledError)
        return submission.error is None
    finally:
        await driver.close()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, ...]]:
    path = tmp_path_factory.mktemp("undisturbed") / "run"

    async def scenario() -> None:
        async with RolloutEngine(config=config_of(), run_dir=path) as engine:
            await engine.finish(make_tasks(TASKS))

    asyncio.run(scenario())
    rows = rows_of(path)
    assert len(rows) == TASKS * K * len(MODELS)
    assert len({row[SAME.index("score")] for row in rows}) == 3  # right, wrong, failed
    return rows


@pytest.mark.parametrize("go_on", [False, True])
@pytest.mark.parametrize("seed", range(5))
async def test_killed_anywhere_again_and_again_it_has_the_same_rows_in_the_end(
    seed: int, go_on: bool, tmp_path: Path, undisturbed: list[tuple[Any, ...]]
) -> None:
    random_ = random.Random(seed)
    path, config, kills, over = tmp_path / "run", config_of(), 0, False
    print(f"seed {seed}")
    while not over:
        store = Dying(path, config, random_.randint(1, 4), written=random_.random() < 0.5)
        over = await run_until_killed(store, config, list(make_tasks(TASKS)), go_on=go_on)
        if over:
            store.close("finished")
        else:
            kills += 1
            store.die()
        assert kills < 60
    assert kills > 0
    assert rows_of(path) == undisturbed


async def test_killed_and_resumed_by_the_engine_a_reader_gets_whole_groups(
    tmp_path: Path, undisturbed: list[tuple[Any, ...]]
) -> None:
    path, config = tmp_path / "run", config_of()
    store = Dying(path, config, 4, written=True)
    assert not await run_until_killed(store, config, list(make_tasks(TASKS)))
    store.die()
    before = open_run(path).winners().rows
    assert 0 < before < len(undisturbed)
    async with RolloutEngine(config=config, run_dir=path, resume=True) as engine:
        groups = [group async for group in engine.groups(make_tasks(TASKS))]
        assert engine.progress.before == before
        assert engine.progress.done == len(undisturbed) - before
    assert_whole(groups)
    seen = [
        (
            row.round,
            row.task_id,
            row.model,
            row.attempt,
            row.retries,
            row.status,
            row.score,
            row.passed,
            row.final_answer,
        )
        for group in groups
        for row in group.rollouts
    ]
    assert sorted(seen, key=str) == sorted((row[:-1] for row in undisturbed), key=str)
    assert rows_of(path) == undisturbed


def assert_whole(groups: list[Group], tasks: int = TASKS) -> None:
    assert Counter((group.task_id, group.model) for group in groups) == Counter(
        {(f"t{task}", model): 1 for task in range(tasks) for model in ("strong", "weak")}
    )
    for group in groups:
        assert [record.attempt for record in group.rollouts] == list(range(K))


@contextlib.asynccontextmanager
async def resumed(path: Path, **fields: Any) -> AsyncIterator[RolloutEngine]:
    retry_failed = fields.pop("retry_failed", False)
    async with RolloutEngine(
        config=config_of(**fields), run_dir=path, resume=True, retry_failed=retry_failed
    ) as engine:
        yield engine


async def test_a_run_goes_on_by_its_plan_before_its_tasks_are_read_again(
    tmp_path: Path, undisturbed: list[tuple[Any, ...]]
) -> None:
    path, config = tmp_path / "run", config_of(plan_ahead=4)
    store = Dying(path, config, 3, written=True)
    assert not await run_until_killed(store, config, list(make_tasks(TASKS - 4)))  # it came no further in its source
    store.die()
    with contextlib.closing(open_run(path).plan()) as plan:
        planned = len(plan)
    assert 0 < planned < TASKS
    before = open_run(path).winners().rows

    async with RolloutEngine(config=config, run_dir=path, resume=True) as engine:

        async def read_late() -> AsyncIterator[Task]:
            while engine.progress.before + engine.progress.done < planned * SPACE.m * K:
                await asyncio.sleep(0.005)
            for task in make_tasks(TASKS):
                yield task

        async with asyncio.timeout(60):
            await engine.finish(read_late(), round=0, total=TASKS, go_on=True)
        assert (engine.progress.before, engine.progress.done) == (before, len(undisturbed) - before)
        assert engine.progress.total == len(undisturbed)
    assert rows_of(path) == undisturbed


async def test_going_on_runs_failed_rollouts_again_and_all_rounds(tmp_path: Path) -> None:
    path = tmp_path / "run"
    async with resumed(path) as engine:
        for round in range(2):
            await engine.finish(make_tasks(TASKS), round=round)
    failed = [row for row in read_rollouts(path).to_pylist() if row["score"] is None]
    assert {row["round"] for row in failed} == {0, 1}
    async with resumed(path, retry_failed=True) as engine:
        await engine.finish((), total=0, go_on=True)
        assert (engine.progress.done, engine.progress.total) == (len(failed), 2 * TASKS * K * 2)
    again = [row for row in read_rollouts(path).to_pylist() if row["generation"] == 1]
    assert {row["rollout_id"] for row in again} == {row["rollout_id"] for row in failed}


async def test_a_plan_whose_tasks_were_changed_is_not_gone_on_with(tmp_path: Path) -> None:
    path, config = tmp_path / "run", config_of()
    store = Dying(path, config, 2, written=True)
    assert not await run_until_killed(store, config, list(make_tasks(TASKS)))
    store.die()
    file = path / "plan" / "1.jsonl"
    file.write_bytes(file.read_bytes().replace(b"Say ", b"Eat "))
    async with RolloutEngine(config=config, run_dir=path, resume=True) as engine:
        with pytest.raises(RunError, match=r"the plan's entry of slot \d+ .* was changed"):
            await engine.finish((), go_on=True)


async def test_a_finished_run_tells_its_readers_everything_again_and_runs_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run"
    async with resumed(path) as engine:  # of a run that does not exist yet: a new one
        first = [group async for group in engine.groups(make_tasks(TASKS))]
    async with resumed(path) as engine:
        groups = [group async for group in engine.groups(make_tasks(TASKS))]
        assert (engine.progress.done, engine.progress.before) == (0, TASKS * K * 2)
    assert_whole(groups)
    assert {(group.task_id, group.model): group.scores for group in groups} == {
        (group.task_id, group.model): group.scores for group in first
    }
    assert all(len(record.turns) == record.num_turns for group in groups for record in group.rollouts)


async def test_only_what_is_submitted_again_is_told_again(tmp_path: Path) -> None:
    path = tmp_path / "run"
    async with resumed(path) as engine:
        await engine.finish(make_tasks(6))
        await engine.finish(make_tasks(6), round=1)
    async with resumed(path) as engine:
        records = [record async for record in engine.rollouts(list(make_tasks(6))[2:4], round=1)]
        assert Counter((record.round, record.task_id) for record in records) == {(1, "t2"): 6, (1, "t3"): 6}
        groups = [group async for group in engine.groups(make_tasks(9))]
    assert_whole(groups, 9)


async def test_tasks_may_come_again_in_another_order(tmp_path: Path) -> None:
    path = tmp_path / "run"
    store = {"segment_bytes": 2000}
    async with resumed(path, store=store, host=MANY) as engine:
        await engine.finish(make_tasks(60))
    tasks = list(make_tasks(60))
    random.Random(1).shuffle(tasks)
    async with resumed(path, store=store) as engine:
        groups = [group async for group in engine.groups(tasks)]
    assert_whole(groups, 60)


async def test_a_reader_that_is_slow_bounds_what_is_told_again(tmp_path: Path) -> None:
    path = tmp_path / "run"
    async with resumed(path, host=MANY) as engine:
        await engine.finish(make_tasks(80))
    async with resumed(path, store={"max_unread_rows": 50}) as engine:
        stream = engine.groups(make_tasks(80))
        groups = [await anext(stream)]
        await asyncio.sleep(0.2)
        (submission,) = engine._submissions
        assert submission.stream is not None
        assert submission.stream.unread_rows <= 50 + 256 + 6
        groups += [group async for group in stream]
    assert_whole(groups, 80)


async def test_failed_rollouts_are_run_again_where_that_is_wanted_and_told_once(tmp_path: Path) -> None:
    """Their old rows are not told: a group has k attempts, the new ones."""
    path = tmp_path / "run"
    async with resumed(path) as engine:
        first = [group async for group in engine.groups(make_tasks(TASKS))]
    failed = {(record.task_id, record.attempt) for group in first for record in group.rollouts if record.score is None}
    assert failed
    sound = [MODELS[0], {**MODELS[1], "options": {**MODELS[1]["options"], "p_500": 0.0}}]
    with pytest.raises(InputError, match="p_500"):
        async with resumed(path, models=sound):
            pass
    async with resumed(path, retry_failed=True) as engine:
        groups = [group async for group in engine.groups(make_tasks(TASKS))]
        assert engine.progress.done == len(failed)
    assert_whole(groups)
    again = {
        (record.task_id, record.attempt) for group in groups for record in group.rollouts if record.generation == 1
    }
    assert again == failed
    async with resumed(path) as engine:
        groups = [group async for group in engine.groups(make_tasks(TASKS))]
    assert_whole(groups)
    generations = {record.generation for group in groups for record in group.rollouts if record.score is None}
    assert generations <= {1}


async def test_big_turns_that_were_traced_are_named_again(tmp_path: Path) -> None:
    path = tmp_path / "run"
    store = {"inline_trace_bytes": 1}
    async with resumed(path, store=store) as engine:
        await engine.finish(make_tasks(3))
    async with resumed(path, store=store) as engine:
        records = [record async for record in engine.rollouts(make_tasks(3))]
    assert {record.trace_file is not None for record in records if record.num_turns} == {True}


async def test_a_damaged_log_is_told_to_the_reader(tmp_path: Path) -> None:
    path = tmp_path / "run"
    async with resumed(path) as engine:
        await engine.finish(make_tasks(TASKS))
    async with resumed(path) as engine:
        segment = path / "log" / "1-0.arrows"
        good = segment.read_bytes()
        middle = len(good) // 2
        segment.write_bytes(good[:middle] + bytes(400) + good[middle + 400 :])
        with pytest.raises(RunError, match=r"1-0\.arrows"):
            [group async for group in engine.groups(make_tasks(TASKS))]
        segment.write_bytes(good)


async def test_groups_that_were_begun_are_finished_first(tmp_path: Path) -> None:
    path, gate = tmp_path / "run", Gate()
    fields = {**gated(gate), "host": {"slots": 2, "prefetch": 0.0}}
    async with resumed(path, **fields) as engine:
        running = asyncio.create_task(engine.finish(make_tasks(4)))
        await gate.reached(2)
        gate.let(2)
        await gate.reached(4)
        async with asyncio.timeout(60):
            while engine.progress.done < 2:
                await asyncio.sleep(0.005)
        await engine.close()
        with contextlib.suppress(RunError):
            await running
    gate.open()
    async with resumed(path, **fields) as engine:
        stream = engine.groups(make_tasks(4))
        first = await anext(stream)
        assert (first.task_id, first.model) == ("t0", "strong")
        assert_whole([first] + [group async for group in stream], 4)


def test_recalled_rows_are_the_ones_that_count(tmp_path: Path) -> None:
    """Of several rows of a key the same one that every other reader takes; unknown keys have none."""
    run = make_run(tmp_path)
    writer = run.start()
    for task in range(4):
        writer.plan.append(0, f"task/{task}", "d", b'{"prompt":"p","verifier":{"type":"match"}}')
    writer.commit([records_to_batch([record(0), record(1, score=None, status="failed"), record(7)])])
    writer.commit([records_to_batch([record(1, generation=1), record(0, score=0.5), record(13)])])
    writer.close("interrupted")
    recall = Recall(run.layout, SPACE, 4)
    found = [row for batch in recall.rows([0, 1, 2, 7, 13, 23]) for row in batch_to_records(batch)]
    assert [(row.key, row.score, row.generation) for row in found] == [
        (0, 1.0, 0),
        (7, 1.0, 0),
        (1, 1.0, 1),
        (13, 1.0, 0),
    ]
    assert recall.rows([2, 3]) == []
    assert recall.rows([]) == []


async def test_a_store_may_be_opened_again_once_its_driver_has_closed(tmp_path: Path) -> None:
    config = config_of()
    store = open_store(tmp_path / "run", config, resume=False, retry_failed=False)
    store.close("interrupted")
    again = open_store(tmp_path / "run", config, resume=True, retry_failed=False)
    assert again.epoch == store.epoch + 1
    again.close("interrupted")
