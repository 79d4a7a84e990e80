"""The public engine: tasks in, committed rollouts and finished groups out, from any event loop or from none.

The driver runs in a thread of its own and commits whether or not anybody reads; what a consumer has seen is on disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import pyarrow as pa

from rollout_engine.agents import make_agent
from rollout_engine.clusters import Cluster, LocalCluster
from rollout_engine.config import LogLevel, ModelSpec, RunConfig, api_keys, log_level
from rollout_engine.driver import Driver
from rollout_engine.errors import InputError, RunError
from rollout_engine.evaluation import Evaluation, assess, judge, not_run
from rollout_engine.hostplan import HostPlan
from rollout_engine.loglines import About, Redactor
from rollout_engine.logs import open_logs
from rollout_engine.loopthread import LoopThread
from rollout_engine.models import check_model
from rollout_engine.monitor import Monitor
from rollout_engine.problems import checked
from rollout_engine.progress import Progress
from rollout_engine.results import Group, Run, group_stream, record_stream
from rollout_engine.runstore import open_store
from rollout_engine.specs import Task, task_body
from rollout_engine.staticcheck import static_reasons
from rollout_engine.store import RunStatus, local_root
from rollout_engine.store.layout import Layout
from rollout_engine.store.mirrors import mirror_of
from rollout_engine.store.objects import is_remote
from rollout_engine.store.statusfile import write_status
from rollout_engine.store.temporary import make_temporary
from rollout_engine.stream import Stream
from rollout_engine.submission import QUEUED_TASKS, ChunkFeed, QueueFeed, Submission
from rollout_engine.tasks import TaskSource, check_task, check_tasks, iter_tasks, resolve, task_chunks
from rollout_engine.threads import in_own_thread
from rollout_engine.types import Message, RolloutRecord
from rollout_engine.waiting import Waiting

T = TypeVar("T")


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
        try:
            await self._open(keys)
        except BaseException:
            self._remove_temporary()
            raise
        return self

    async def _open(self, keys: Mapping[str, str]) -> None:
        # To import Ray takes as long as to read a large run: beside it.
        making = asyncio.ensure_future(asyncio.to_thread(make_cluster, self.config))
        try:
            self._store = await asyncio.to_thread(
                open_store, self.run_dir, self.config, resume=self._resume, retry_failed=self._retry_failed
            )
        except BaseException:
            await asyncio.gather(making, return_exceptions=True)  # half-imported, it would be in the way of our end
            raise
        try:
            await self._start(keys, await making)
        except BaseException:
            await asyncio.to_thread(self._store.abandon)
            raise

    async def _start(self, keys: Mapping[str, str], cluster: Cluster) -> None:
        epoch = self._store.epoch
        self._log_level: LogLevel = "off" if self._temporary else log_level(self.config)
        with contextlib.ExitStack() as undo:
            about = About(self._store.run_id, epoch)
            self._logs = open_logs(
                Layout(self.run_dir).logs, f"driver-e{epoch}", about, self._log_level, self.config.logs, keys.values()
            )
            undo.callback(self._logs.close)
            monitor = self._make_monitor(cluster, Redactor(keys.values()), undo)
            self._thread = LoopThread("rollout-driver")
            self._driver = Driver(self.config, self._store, cluster, keys, self._make_plan, epoch, monitor)
            self._store.outside.on_cancel = self._cancel_asked
            try:
                await self._thread.call(self._driver.open())
            except BaseException:
                await self._thread.stop()
                raise
            undo.pop_all()

    def _make_monitor(self, cluster: Cluster, redact: Redactor, undo: contextlib.ExitStack) -> Monitor:
        """Shows the run to other terminals and to who collects metrics. Raises InputError where a port is taken."""
        exporters = [cluster.exporter()]
        if self.config.metrics.port is not None:
            from rollout_engine.prometheus import Endpoint

            endpoint = Endpoint(self.config.metrics.address, self.config.metrics.port)
            undo.callback(endpoint.close)
            self.metrics_url = endpoint.url
            exporters.append(endpoint)

        def write(data: bytes) -> None:
            write_status(self.run_dir, redact.encoded(data.decode()).encode())

        return Monitor(
            self._store.run_id,
            self._store.epoch,
            self.config.models,
            None if self._temporary else write,
            [exporter for exporter in exporters if exporter is not None],
        )

    def _cancel_asked(self, who: str) -> None:
        """In the committer's thread."""
        self.cancelled_by, self._given_up = who, True
        self._thread.soon(self._driver.cancel_all)

    def _make_plan(self, host_id: str, node_id: str) -> HostPlan:
        return HostPlan(
            run_id=self._store.run_id,
            epoch=self._store.epoch,
            host_id=f"{host_id}-e{self._store.epoch}",
            node_id=node_id,
            config=self.config,
            # A run on an object store has no directory that a host could write to: turns travel with their rows.
            run_dir=str(self.run_dir.resolve()) if mirror_of(self.run_dir) is None else None,
            log_level=self._log_level,
        )

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.close()
        finally:
            self._remove_temporary()

    async def close(self) -> None:
        """Stops the hosts, commits what has arrived, and writes the final tables. May be called twice."""
        if self._store.closed:
            return
        self._closing = True
        for carrier in list(self._submissions.values()):
            await _end(carrier)
        fatal = self._driver.fatal
        finished = not self._given_up and all(submission.done.is_set() for submission in self._submissions)
        status: RunStatus = "failed" if fatal is not None else "finished" if finished else "interrupted"
        try:
            await asyncio.shield(self._thread.call(self._driver.close()))
        finally:
            await self._thread.stop()
            try:
                await self._end_run(status)
            finally:
                await in_own_thread(self._close_logs, "close logs")

    def _close_logs(self) -> None:
        self._logs.close()
        self._store.publish_logs()

    async def _end_run(self, status: RunStatus) -> None:
        """Final tables and the end of the epoch. Raises RunError where the disk does not let it."""
        if self._driver.disk_hangs:
            limit_s = self.config.store.commit_s
            raise RunError(f"the disk did not take all rows within {limit_s:g} s (store.commit_s); resume the run")
        limit_s = self.config.store.final_tables_s
        limit = asyncio.timeout(limit_s)
        try:
            async with limit:
                await in_own_thread(partial(self._store.close, status), "close run")
        except TimeoutError:
            if not limit.expired():
                raise
            raise RunError(
                f"the final tables were not written within {limit_s:g} s (store.final_tables_s); all rows are in the "
                "log, and `rollout resume` makes the tables"
            ) from None

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
        task = check_task(
            checked(Task, {name: value for name, value in given.items() if value is not None}), self.config
        )
        reasons = static_reasons(task)
        if reasons:
            return not_run(task.task_id, self.config, 0.0, reasons)
        validity, reasons = judge(await self._thread.call(self._driver.probe(task_body(task))))
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
        await self._thread.call(submission.done.wait())
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
        submission = await self._thread.call(
            self._make_submission(tasks, round, stream if read else None, total, wanted)
        )
        carrier = self._carry(submission.feed, tasks, wanted) if isinstance(submission.feed, QueueFeed) else None
        self._submissions[submission] = None if carrier is None else asyncio.create_task(carrier)
        await self._thread.call(_called(self._driver.submit, submission))
        return submission, stream

    def _is_new(self, round: int, task: Task) -> bool:
        return not self._store.has_planned(round, task.task_id)

    async def _make_submission(
        self,
        tasks: TaskSource,
        round: int,
        stream: Stream[pa.RecordBatch] | None,
        total: int | None,
        wanted: Callable[[Task], bool] | None,
    ) -> Submission:
        """On the driver's loop, where the submission's events live."""
        go_on = wanted is not None
        if total is not None:
            total = max(total, self._store.planned_before if go_on else 0)
            self._driver.progress.total = total * self._store.space.per_slot
        if isinstance(tasks, AsyncIterable):
            return Submission(round, QueueFeed(), stream, go_on)
        check = resolve if isinstance(tasks, str | Path) else check_task
        return Submission(round, ChunkFeed(self._checked(tasks, check, wanted)), stream, go_on)

    async def _checked(
        self,
        tasks: str | Path | Iterable[Task | Mapping[str, Any]],
        check: Callable[[Task, RunConfig], Task],
        wanted: Callable[[Task], bool] | None,
    ) -> AsyncGenerator[list[Task], None]:
        async with contextlib.aclosing(task_chunks(tasks, wanted)) as chunks:
            async for chunk in chunks:
                good: list[Task] = []
                try:
                    good.extend(check(task, self.config) for task in chunk)
                except InputError:
                    if good:
                        yield good
                    raise
                yield good

    async def _carry(self, feed: QueueFeed, tasks: TaskSource, wanted: Callable[[Task], bool] | None) -> None:
        """Carries tasks from the caller's loop, where their source lives, to the driver's, as there is room."""
        waiting: asyncio.Queue[Task | BaseException | None] = asyncio.Queue(QUEUED_TASKS)
        sender = asyncio.create_task(self._send(feed, waiting))
        try:
            try:
                async for task in iter_tasks(tasks):
                    if wanted is None or wanted(task):
                        await waiting.put(check_task(task, self.config))
                await waiting.put(None)
            except asyncio.CancelledError:
                raise
            except BaseException as error:
                await waiting.put(error)
            await sender
        finally:
            await _end(sender)

    async def _send(self, feed: QueueFeed, waiting: asyncio.Queue[Task | BaseException | None]) -> None:
        """Crosses the threads with all that has gathered at once; a crossing costs much more than a task."""
        over = False
        while not over:
            items = [await waiting.get()]
            while not waiting.empty():
                items.append(waiting.get_nowait())
            over = not isinstance(items[-1], Task)
            await self._thread.call(feed.put(*items))

    async def _leave(self, submission: Submission) -> None:
        """A consumer that stops reading early gives up what it asked for."""
        if self._closing or submission not in self._submissions:
            return
        self._given_up |= not submission.done.is_set() or submission.error is not None
        await _end(self._submissions.pop(submission))
        await self._thread.call(_called(self._driver.leave, submission))

    async def drain(self) -> None:
        """Starts nothing more, and returns when what was running has ended and is committed."""
        await self._thread.call(self._driver.drain())

    def give_up(self) -> None:
        """What is not done stays undone: the run ends as interrupted."""
        self._given_up = True

    @property
    def run_id(self) -> str:
        return self._store.run_id

    async def waiting(self) -> dict[str, list[Waiting]]:
        """What the oldest rollouts of each host wait for, now; a host that does not answer in time has none."""
        return await self._thread.call(self._driver.waiting())

    @property
    def progress(self) -> Progress:
        """Where the run stands; a live object, to be read only."""
        return self._driver.progress

    def tables(self) -> Run:
        """Everything committed so far as Arrow tables. Reads the run directory: call it from a thread."""
        return self._store.tables()


async def _end(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _called(function: Callable[..., T], *arguments: Any) -> T:
    return function(*arguments)


def make_config(
    config: RunConfig | None, models: Sequence[ModelSpec | Mapping[str, Any]] | None, options: Mapping[str, Any]
) -> RunConfig:
    """The config with what was given apart from it. Raises InputError naming the field."""
    from pydantic import ValidationError

    fields = config.model_dump(exclude_unset=True) if config is not None else {}
    if models is not None:
        fields["models"] = [model.model_dump() if isinstance(model, ModelSpec) else model for model in models]
    try:
        return RunConfig.model_validate({**fields, **options})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise InputError(first["msg"], where=where, fix="see rollout_engine.config.RunConfig for the fields") from error


def check_config(config: RunConfig, keys: Mapping[str, str] | None = None) -> Mapping[str, str]:
    """All that can be checked before a run starts. Returns the API keys; raises InputError."""
    if not config.models:
        raise InputError("a run needs at least one model", where="models", fix="-m NAME=KIND:..., or models=[...]")
    for model in config.models:
        check_model(model)
    for asked in config.judges.values():
        try:
            check_model(asked)
        except InputError as error:
            where = error.where.replace(f"models.{asked.name}", asked.where, 1)
            raise InputError(error.message, where, error.fix) from error
    make_agent(config.agent, config.agent_options)
    log_level(config)
    return api_keys(config.clients) if keys is None else keys


def make_cluster(config: RunConfig) -> Cluster:
    """In-process hosts, or the Ray binding by its entry point. Raises InputError."""
    if config.ray == "off":
        return LocalCluster(config.hosts_per_node)
    found = entry_points(group="rollout_engine.clusters", name="ray")
    if not found:
        raise InputError(
            "the Ray binding is not installed", where="ray", fix="pip install rollout-engine, or use --ray off"
        )
    cluster: Cluster = next(iter(found)).load()(config.ray, config.hosts_per_node)
    return cluster


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
