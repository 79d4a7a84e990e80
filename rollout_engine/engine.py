"""The public engine: tasks in, committed rollouts and finished groups out, from any event loop or from none.

The driver runs in a thread of its own and commits whether or not anybody reads; what a consumer has seen is on disk.
"""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pyarrow as pa

from rollout_engine.carrying import Wanted, carry, end, make_feed
from rollout_engine.config import ModelSpec, RunConfig
from rollout_engine.configcheck import check_config, make_config
from rollout_engine.errors import RunError
from rollout_engine.evaluation import Evaluation, assess, judge, not_run
from rollout_engine.openrun import OpenRun
from rollout_engine.problems import checked
from rollout_engine.progress import Progress
from rollout_engine.results import Group, Run, group_stream, record_stream
from rollout_engine.specs import Task, task_body
from rollout_engine.staticcheck import static_reasons
from rollout_engine.store import local_root
from rollout_engine.store.objects import is_remote
from rollout_engine.store.temporary import make_temporary
from rollout_engine.stream import Stream
from rollout_engine.submission import QueueFeed, Submission
from rollout_engine.tasks import TaskSource, check_task, check_tasks
from rollout_engine.types import Message, RolloutRecord
from rollout_engine.waiting import Waiting


class RolloutEngine:
    """k attempts x m models x n tasks, from `async with` to the end of the block.

    Arguments are those of `RunConfig` (models, k, agent, sandbox, ray, ...), or a whole `config` which they override.
    `run_dir` is a path, or s3://BUCKET/PREFIX; None: a temporary folder, gone when the block ends. An existing run is
    gone on with if `resume` is set.
    `keys`: API keys by model; None: from the environment variables that the models name.
    Raises InputError before anything starts.
    """

    def __init__(
        self,
        models: Sequence[ModelSpec | Mapping[str, Any]] | None = None,
        *,
        run_dir: str | Path | None = None,
        resume: bool = False,
        retry_failed: bool = False,
        config: RunConfig | None = None,
        keys: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        self.config = make_config(config, models, options)
        self._wanted_dir, self._resume, self._retry_failed = run_dir, resume, retry_failed
        self._keys = keys
        self._temporary: Path | None = None
        self._rounds = 0
        self._evaluated: Counter[str] = Counter()
        """Task id -> how often it was evaluated: its rounds."""
        self._submissions: dict[Submission, asyncio.Task[None] | None] = {}
        """Those that are not done, each with what carries its tasks from this loop to the driver's."""
        self._given_up = False
        """Whether a consumer has left before its submission was done, or its source failed."""
        self.metrics_url: str | None = None
        """Where the run's metrics are served while it is open, if `metrics.port` asks for it."""
        self._closing = False
        self.cancelled_by: str | None = None
        """Who has asked, by `rollout cancel`, for the run to end; its planned rollouts have cancelled rows then."""

    # -- life ---------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        keys = check_config(self.config, self._keys)
        if self._wanted_dir is None:
            self._temporary = await asyncio.to_thread(make_temporary)
        wanted = self._temporary or self._wanted_dir or ""
        self.run_dir = await asyncio.to_thread(local_root, wanted) if is_remote(wanted) else Path(wanted)
        temporary = self._temporary is not None
        try:
            self._run = OpenRun(self.config, self.run_dir, keys, temporary=temporary, on_cancel=self._cancel_asked)
            await self._run.open(resume=self._resume, retry_failed=self._retry_failed)
        except BaseException:
            self._remove_temporary()
            raise
        self.metrics_url = self._run.metrics_url
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.close()
        finally:
            self._remove_temporary()

    def _cancel_asked(self, who: str) -> None:
        """In the committer's thread."""
        self.cancelled_by, self._given_up = who, True

    async def close(self) -> None:
        """Stops the hosts, commits what has arrived, and writes the final tables. May be called twice."""
        if self._run.store.closed:
            return
        self._closing = True
        for carrier in list(self._submissions.values()):
            await end(carrier)
        finished = not self._given_up and all(submission.done.is_set() for submission in self._submissions)
        await self._run.close(finished)

    def _remove_temporary(self) -> None:
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)

    # -- work ---------------------------------------------------------------------------------------------------

    async def rollouts(self, tasks: TaskSource, *, round: int | None = None) -> AsyncIterator[RolloutRecord]:
        """Every rollout of the tasks as soon as it is committed, in the order of their endings.

        In a resumed run also those that an earlier epoch committed, as soon as their task is submitted again.
        """
        submission, stream = await self._submit(tasks, round, read=True)
        try:
            async for record in record_stream(stream):
                yield record
        finally:
            await self._leave(submission)

    async def groups(self, tasks: TaskSource, *, round: int | None = None) -> AsyncIterator[Group]:
        """Every group (one task, one model) as soon as its k rollouts are committed.

        In a resumed run also those that an earlier epoch has finished or begun: each group is whole.
        """
        submission, stream = await self._submit(tasks, round, read=True)
        try:
            async for group in group_stream(stream, self.config):
                yield group
        finally:
            await self._leave(submission)

    async def evaluate(
        self,
        prompt: str | list[Message] = "",
        verifier_code: str | None = None,
        env_key: str = "",
        env_version: str = "",
        env_variables: Mapping[str, str] | None = None,
        data_key: str | None = None,
        data_version: str | None = None,
        **fields: Any,
    ) -> Evaluation:
        """One generated task: static check, dry run, then k attempts by every model. Many at once share the engine.

        `fields` are further fields of `Task` (task_id, verifier, solution, files, setup, limits, ...). A task that is
        not valid costs no rollouts and has reward 0. Raises InputError where it is no task at all.
        """
        named = f"{env_key}:{env_version}" if env_version else env_key
        given = {
            "prompt": prompt,
            "verifier_code": verifier_code,
            "env_key": named or None,
            "env_variables": dict(env_variables or {}),
            "data_key": data_key,
            "data_version": data_version,
            **fields,
        }
        task = checked(Task, {name: value for name, value in given.items() if value is not None})
        reasons = static_reasons(task)  # first: code that does not even parse is a finding about the task
        if reasons:
            return not_run(task.task_id, self.config, 0.0, reasons)
        task = check_task(task, self.config)
        validity, reasons = judge(await self._run.thread.call(self._run.driver.probe(task_body(task))))
        if validity != 1.0:
            return not_run(task.task_id, self.config, validity, reasons)
        round = self._evaluated[task.task_id]
        self._evaluated[task.task_id] += 1
        groups = [group async for group in self.groups([task], round=round)]
        return assess(task.task_id, groups, self.config)

    async def finish(
        self, tasks: TaskSource, *, round: int | None = None, total: int | None = None, go_on: bool = False
    ) -> None:
        """Runs all rollouts of the tasks without reading them. `total`: how many tasks there are, for the ETA.

        `go_on`, in a resumed run: what its plan holds and has no row yet is run first, of every round and whoever
        submitted it, and those of `tasks` that were planned are passed over. A large run so starts again at once.
        """
        submission, _ = await self._submit(tasks, round, read=False, total=total, go_on=go_on)
        await self._run.thread.call(submission.done.wait())
        await self._leave(submission)
        if submission.error is not None:
            raise submission.error

    async def _submit(
        self, tasks: TaskSource, round: int | None, *, read: bool, total: int | None = None, go_on: bool = False
    ) -> tuple[Submission, Stream[pa.RecordBatch]]:
        if round is None:
            round = self._rounds
        self._rounds = max(self._rounds, round) + 1
        if isinstance(tasks, str | Path):
            total = (await asyncio.to_thread(check_tasks, tasks, self.config)).count
        stream: Stream[pa.RecordBatch] = Stream()
        wanted = partial(self._is_new, round) if go_on else None
        submission = await self._run.thread.call(
            self._make_submission(tasks, round, stream if read else None, total, wanted)
        )
        carrier = None
        if isinstance(submission.feed, QueueFeed):
            carrier = asyncio.create_task(carry(tasks, submission.feed, self.config, wanted, self._run.thread))
        self._submissions[submission] = carrier
        await self._run.thread.call(_called(self._run.driver.submit, submission))
        return submission, stream

    def _is_new(self, round: int, task: Task) -> bool:
        return not self._run.store.has_planned(round, task.task_id)

    async def _make_submission(
        self,
        tasks: TaskSource,
        round: int,
        stream: Stream[pa.RecordBatch] | None,
        total: int | None,
        wanted: Wanted,
    ) -> Submission:
        """On the driver's loop, where the submission's events live."""
        go_on = wanted is not None
        if total is not None:
            store = self._run.store
            total = max(total, store.planned_before if go_on else 0)
            self._run.driver.progress.total = total * store.space.per_slot
        return Submission(round, make_feed(tasks, self.config, wanted), stream, go_on)

    async def _leave(self, submission: Submission) -> None:
        """A consumer that stops reading early gives up what it asked for."""
        if self._closing or submission not in self._submissions:
            return
        self._given_up |= not submission.done.is_set() or submission.error is not None
        await end(self._submissions.pop(submission))
        await self._run.thread.call(_called(self._run.driver.leave, submission))

    async def drain(self) -> None:
        """Starts nothing more, and returns when what was running has ended and is committed."""
        await self._run.thread.call(self._run.driver.drain())

    def give_up(self) -> None:
        """What is not done stays undone: the run ends as interrupted."""
        self._given_up = True

    @property
    def run_id(self) -> str:
        return self._run.store.run_id

    async def waiting(self) -> dict[str, list[Waiting]]:
        """What the oldest rollouts of each host wait for, now; a host that does not answer in time has none."""
        return await self._run.thread.call(self._run.driver.waiting())

    @property
    def progress(self) -> Progress:
        """Where the run stands; a live object, to be read only."""
        return self._run.driver.progress

    def tables(self) -> Run:
        """Everything committed so far as Arrow tables. Reads the run directory: call it from a thread."""
        return self._run.store.tables()


async def _called(function: Callable[[Submission], None], submission: Submission) -> None:
    function(submission)


def run(
    tasks: TaskSource,
    models: Sequence[ModelSpec | Mapping[str, Any]] | None = None,
    *,
    run_dir: str | Path | None = None,
    **options: Any,
) -> Run:
    """Runs everything and returns its tables. For callers without an event loop; else use `RolloutEngine`."""

    async def all_of_it() -> Run:
        async with RolloutEngine(models, run_dir=run_dir, **options) as engine:
            await engine.finish(tasks)
            await engine.close()
            return await asyncio.to_thread(engine.tables)

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(all_of_it())
    raise RunError("run() was called from a running event loop; use `async with RolloutEngine(...)` there")
