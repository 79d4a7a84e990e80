"""What the driver's rooms share: what is planned, who is served, whether the run goes on; and the tasks they run as.

Everything here belongs to the driver's event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import pyarrow as pa

from rollout_engine.budgets import Budgets
from rollout_engine.clusters import HostHandle
from rollout_engine.commits import Commits, RowStore
from rollout_engine.config import RunConfig
from rollout_engine.errors import describe
from rollout_engine.events import Event
from rollout_engine.fitness import Fitness
from rollout_engine.link import Link
from rollout_engine.monitor import Monitor
from rollout_engine.picture import Glance, ServedHost
from rollout_engine.plan import Done, Planner, PlanStore
from rollout_engine.progress import Progress
from rollout_engine.recoveries import Recoveries
from rollout_engine.scheduler import Scheduler
from rollout_engine.spending import Spending, Used
from rollout_engine.store.planfile import PlanEntry
from rollout_engine.submission import Submission
from rollout_engine.types import KeySpace
from rollout_engine.watch import Watch

log = logging.getLogger(__name__)

PROBES_PER_HOST = 8
"""Dry runs of tasks on a host at once: they come on top of its slots, and of an actor's calls."""


class RunStore(RowStore, Protocol):
    """What the driver asks of the run directory."""

    @property
    def plan(self) -> PlanStore: ...

    @property
    def done(self) -> Done: ...

    def dump(self, text: str) -> str:
        """Keeps the state of a stuck run; where. Called in a thread. Raises OSError."""
        ...

    def recall(self, keys: Sequence[int]) -> list[pa.RecordBatch]:
        """The rows that earlier epochs committed for these keys. Called in a thread."""
        ...

    @property
    def used(self) -> Used:
        """What the rows of earlier epochs used."""
        ...

    @property
    def done_before(self) -> int:
        """Rollouts that have a row of an earlier epoch and need no other."""
        ...

    def unfinished(self) -> Iterator[list[PlanEntry]]:
        """Slots that earlier epochs planned and that still need a row, some at a time. Iterated in a thread."""
        ...


@dataclass(eq=False, slots=True)
class Peer:
    """A host that is being served."""

    handle: HostHandle
    link: Link
    waiting: bool = False
    starved: bool = False
    drained: bool = False
    unfit: str = ""
    """Why its node can not run what it is given; empty: it can, as far as is known."""
    leaving_at: float | None = None
    """When its node will be gone, on the loop's clock; None: it stays."""
    notice_s: float = 0.0
    """How long before that this was known."""
    probes: int = 0
    """Dry runs that were given to it and have not ended."""
    probing: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(PROBES_PER_HOST))


class Board:
    """The state of one epoch of a run, and what every room may do with it."""

    def __init__(self, config: RunConfig, store: RunStore, epoch: int, monitor: Monitor) -> None:
        self.config, self.store, self.epoch, self.monitor = config, store, epoch, monitor
        self.space = KeySpace(len(config.models), config.k)
        self.progress = Progress()
        self.scheduler = Scheduler(self.space, config.retry, [model.fixed_concurrency for model in config.models])
        self.planner: Planner[Submission] = Planner(self.space, config.model_names, store.plan, store.done)
        self.budgets = Budgets(config.clients)
        self.spending = Spending(config, store.used)
        self.commits: Commits
        self.peers: dict[str, Peer] = {}
        self.fitness = Fitness()
        self.recoveries = Recoveries()
        self.submissions: list[Submission] = []
        self.draining = False
        """Nothing more is started."""
        self.spent: str | None = None
        """Which budget is, in words."""
        self.fatal: BaseException | None = None
        self.watch = Watch(config)
        self._tasks: set[asyncio.Task[None]] = set()

    def open(self) -> None:
        """On the loop that everything else runs on."""
        self.loop = asyncio.get_running_loop()
        self.changed = asyncio.Event()
        self.plan_more = asyncio.Event()
        self.over = asyncio.Event()
        """Set when the run has ended early or was closed."""
        self.watch.progressed = self.progress.started = self.progress.now = self.loop.time()

    # -- tasks --------------------------------------------------------------------------------------------------

    def spawn(self, work: Coroutine[object, object, None], name: str) -> asyncio.Task[None]:
        """A background task, which ends with the run, and the run with it where it fails."""
        task = self.loop.create_task(self._guard(work), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: work.close())  # cancelled before its first step, it was never awaited
        return task

    async def _guard(self, work: Coroutine[object, object, None]) -> None:
        try:
            await work
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self.fail(error)

    async def end_tasks(self) -> None:
        """Cancels all background tasks and waits for them."""
        self.over.set()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def fail(self, error: BaseException) -> None:
        """The run cannot go on: everybody who waits is told."""
        if self.fatal is None and not self.over.is_set():
            log.error("run ended early: %s", describe(error))
            self.fatal = error
            self.draining = True
            for submission in self.submissions:
                submission.fail(error)
            self.over.set()
            self.changed.set()

    def note(self, message: str) -> None:
        """What a person should know, once."""
        if message not in self.progress.notes:
            log.warning("%s", message)
            self.progress.notes.append(message)

    def event(
        self,
        kind: str,
        message: str,
        handle: HostHandle | None = None,
        *,
        node: str = "",
        rollouts: int = 0,
        seconds: float | None = None,
        tell: bool = True,
    ) -> None:
        """Something happened to a host or a node: on record, and told to people."""
        if handle is not None:
            node = handle.node_id
        host = handle.host_id if handle is not None else ""
        event = Event(time.time(), kind, message, host, node, rollouts, seconds)
        self.progress.events.append(event)
        self.commits.record(event)
        if tell:
            self.note(message)

    def taken(self, keys: Iterable[int]) -> None:
        """Rollouts were taken up by a host, or have ended: a loss may be made good by that."""
        for done in self.recoveries.taken(keys, self.loop.time()):
            message = f"all {done.rollouts} rollouts of host {done.host} were taken up again after {done.seconds:.1f} s"
            self.event("recovered", message, node=done.node, rollouts=done.rollouts, seconds=done.seconds)

    # -- what several rooms ask ---------------------------------------------------------------------------------

    @property
    def behind(self) -> bool:
        """Whether rows pile up in front of the disk or of a consumer: then nothing is granted."""
        return self.commits.waiting_bytes > self.config.store.max_uncommitted_bytes or self.unread_rows > 0

    @property
    def unread_rows(self) -> int:
        """Rows in front of consumers that are so far behind that nothing is granted; 0: none is."""
        store = self.config.store
        streams = [submission.stream for submission in self.submissions if submission.stream is not None]
        return sum(
            stream.unread_rows
            for stream in streams
            if stream.unread_rows > store.max_unread_rows or stream.unread_bytes > store.max_unread_bytes
        )

    def glance(self) -> Glance:
        """Where the run stands now."""
        hosts = [
            ServedHost(host, len(self.scheduler.held[host]), peer.link.running, self.draining)
            for host, peer in self.peers.items()
        ]
        ended, draining = self.over.is_set(), self.draining
        return Glance(
            now=self.loop.time(),
            progress=self.progress,
            hosts=hosts,
            breakers=self.scheduler.breakers,
            lent=self.budgets.lent,
            limits=self.budgets.limits,
            state="ended" if ended else "draining" if draining else "behind" if self.behind else "running",
        )

    def digest(self, key: int) -> str:
        """The digest of a key's task; empty where the task is done."""
        opened = self.planner.open.get(self.space.slot(key))
        return opened.digest if opened is not None else ""

    def poke(self) -> None:
        """Cuts short the exchanges of hosts that could be given something."""
        self.plan_more.set()
        work = self.scheduler.todo_count > 0 and not self.draining
        for peer in self.peers.values():
            if peer.waiting and ((work and peer.link.free_slots > 0) or peer.link.cancel_keys or self.draining):
                peer.waiting = False
                peer.handle.nudge()
