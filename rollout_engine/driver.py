"""The driver's loop: plans, grants by credit, takes rows in, has them committed, and recovers what hosts lose.

Everything here runs on one event loop in a thread of its own, so that a run goes on whether or not anybody reads its
rows; only the committer's thread touches the disk. Decisions are the scheduler's, the leases' and the planner's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import pyarrow as pa

from rollout_engine.breaker import BreakerState
from rollout_engine.budgets import Budgets
from rollout_engine.clusters import Cluster, HostHandle
from rollout_engine.commits import Commits, RowStore, outcomes_of
from rollout_engine.config import RunConfig
from rollout_engine.errors import HostError, HostLost, RunError, describe
from rollout_engine.exchange import HostLimits, Lease, Reply
from rollout_engine.host import HostPlan
from rollout_engine.link import Link
from rollout_engine.plan import Done, Planner, PlanStore
from rollout_engine.probe import Probe
from rollout_engine.progress import Progress
from rollout_engine.scheduler import Lost, Scheduler, Verdict
from rollout_engine.specs import Task
from rollout_engine.submission import Submission
from rollout_engine.types import Boundary, Failure, KeySpace

log = logging.getLogger(__name__)

RECALLED_ROWS = 256
"""Rows of earlier epochs that are read for a consumer at once."""
TICK_S = 0.1
"""How often back-offs, breakers, leases and the watchdog are looked at."""
EXCHANGE_GRACE_S = 10.0
"""An exchange that has not returned this long after its own limit is asked again."""
RETRY_PAUSE_S = 0.2
"""Pause before a failed exchange is asked again."""
BASE_LINGER_S = 0.05
"""How long a finished row waits for company, with up to two hosts; grows with their number."""
MAX_LINGER_S = 1.0
HEARTBEAT_S = 1.0
PROBES_PER_HOST = 8
"""Dry runs of tasks on a host at once: they come on top of its slots, and of an actor's calls."""
PROBE_TRIES = 3
TOKEN_POLL_S = 0.1
"""Heartbeat of a host whose calls wait for a request rate."""
UNLIMITED = Lease(-1, -1.0)
STOP_S = 40.0
"""The longest that stopping the hosts takes before they are left to their leases."""


class RunStore(RowStore, Protocol):
    """What the driver asks of the run directory."""

    @property
    def plan(self) -> PlanStore: ...

    @property
    def done(self) -> Done: ...

    def recall(self, keys: Sequence[int]) -> list[pa.RecordBatch]:
        """The rows that earlier epochs committed for these keys. Called in a thread."""
        ...

    @property
    def cost_usd(self) -> float:
        """What the rows of earlier epochs cost."""
        ...


@dataclass(eq=False, slots=True)
class _Peer:
    """A host that is being served."""

    handle: HostHandle
    link: Link
    waiting: bool = False
    starved: bool = False
    drained: bool = False
    probes: int = 0
    """Dry runs that were given to it and have not ended."""
    probing: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(PROBES_PER_HOST))
    task: asyncio.Task[None] | None = field(default=None)


class Driver:
    """One epoch of a run. Use from its own loop only; `engine.py` crosses the threads."""

    def __init__(
        self,
        config: RunConfig,
        store: RunStore,
        cluster: Cluster,
        keys: Mapping[str, str],
        make_plan: Callable[[str, str], HostPlan],
        epoch: int,
    ) -> None:
        self.config = config
        self.progress = Progress()
        self.space = KeySpace(len(config.models), config.k)
        self._store, self._cluster, self._keys, self._make_plan, self._epoch = store, cluster, keys, make_plan, epoch
        self._scheduler = Scheduler(self.space, config.retry, [model.max_concurrency for model in config.models])
        self._planner: Planner[Submission] = Planner(self.space, config.model_names, store.plan, store.done)
        self._budgets = Budgets(config.models)
        self._peers: dict[str, _Peer] = {}
        self._submissions: list[Submission] = []
        self._replacing = 0
        self._draining = False
        self._spent = False
        self._fatal: BaseException | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    # -- life ---------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Brings the hosts up. Raises InputError where that is not possible."""
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._plan_more = asyncio.Event()
        self._over = asyncio.Event()
        self._progressed = self._loop.time()
        self.progress.started = self.progress.now = self._loop.time()
        for handle in await self._cluster.open(self._make_plan, self._keys):
            self._serve_host(handle)
        self._commits = Commits(self._store, self._planner, self.progress, self._committed, self._fail)
        self._spawn(self._tick(), "tick")

    async def close(self) -> None:
        """Stops hosts and commits what has arrived. What was in flight stays planned, for a resume."""
        self._over.set()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        stops = [asyncio.ensure_future(peer.handle.stop()) for peer in self._peers.values()]
        if stops:
            _, late = await asyncio.wait(stops, timeout=STOP_S)
            for stop in late:
                stop.cancel()
            await asyncio.gather(*stops, return_exceptions=True)
        await self._commits.close()
        await self._cluster.close()
        for submission in self._submissions:
            submission.fail(self._fatal or RunError("the engine was closed before this submission was done"))

    def _spawn(self, work: Coroutine[object, object, None], name: str) -> asyncio.Task[None]:
        task = self._loop.create_task(self._guard(work), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _guard(self, work: Coroutine[object, object, None]) -> None:
        """A background task that fails ends the run; it is never lost."""
        try:
            await work
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """The run cannot go on: everybody who waits is told."""
        if self._fatal is None and not self._over.is_set():
            log.error("run ended early: %s", describe(error))
            self._fatal = error
            self._draining = True
            for submission in self._submissions:
                submission.fail(error)
            self._over.set()
            self._changed.set()

    @property
    def fatal(self) -> BaseException | None:
        return self._fatal

    @property
    def over(self) -> asyncio.Event:
        """Set when the run has ended early or was closed."""
        return self._over

    # -- what users ask -----------------------------------------------------------------------------------------

    def submit(self, submission: Submission) -> None:
        """Plans a submission's tasks as there is room for them."""
        if self._fatal is not None:
            submission.fail(self._fatal)
            return
        self._submissions.append(submission)
        self._check_budget()
        submission.planning = self._spawn(self._plan(submission), "plan")

    def cancel(self, keys: Iterable[int]) -> None:
        """Ends rollouts by the user's word: each gets a `cancelled` row."""
        dropped, on_hosts = self._scheduler.cancel(keys)
        self._commits.give_up(dropped, None)
        for host, mine in on_hosts.items():
            self._peers[host].link.cancel_keys.update(mine)
        self._poke()

    async def probe(self, body: bytes) -> Probe:
        """The dry run of a task on the host with the fewest of them. Raises HostError, TaskBodyError, RunError."""
        for tries_left in reversed(range(PROBE_TRIES)):
            if not self._peers:
                raise RunError("no host is left to check a task on")
            peer = min(self._peers.values(), key=lambda peer: peer.probes)
            peer.probes += 1
            try:
                async with peer.probing:
                    return await peer.handle.probe(body)
            except HostError:
                if not tries_left:
                    raise
                await asyncio.sleep(RETRY_PAUSE_S)
            finally:
                peer.probes -= 1
        raise AssertionError("unreachable: the last try returns or raises")

    async def drain(self) -> None:
        """Starts nothing more, lets what runs end and commits it. Returns when that is done."""
        self._draining = True
        self._poke()
        while not all(peer.drained for peer in self._peers.values()) and not self._over.is_set():
            self._changed.clear()
            await self._changed.wait()

    def leave(self, submission: Submission) -> None:
        """Nobody reads it any more: what has not ended is cancelled, and what was not read holds nobody up."""
        submission.stream = None
        if submission in self._submissions:
            self._submissions.remove(submission)
        if submission.done.is_set():
            return
        submission.exhausted = True
        if submission.planning is not None:
            submission.planning.cancel()
        keys = [
            key
            for slot, opened in self._planner.open.items()
            if opened.owner is submission
            for key in self.space.slot_keys(slot)
        ]
        self.cancel(keys)
        submission.settle()

    # -- planning -----------------------------------------------------------------------------------------------

    async def _plan(self, submission: Submission) -> None:
        try:
            while not submission.exhausted:
                await self._room_to_plan()
                tasks = await submission.feed.take()
                if not tasks:
                    break
                before: list[int] = []
                for task in tasks:
                    if self._scheduler.pending >= self.config.plan_ahead:
                        self._poke()
                        await self._room_to_plan()
                    before += self._add(task, submission)
                    if len(before) >= RECALLED_ROWS:
                        await self._recall(before, submission)
                        before = []
                await self._recall(before, submission)
                self._poke()
        except Exception as error:
            submission.error = error
        finally:
            await submission.feed.close()
        submission.exhausted = True
        submission.settle()

    async def _room_to_plan(self) -> None:
        while self._draining or self._scheduler.pending >= self.config.plan_ahead or self._behind:
            self._plan_more.clear()
            await self._plan_more.wait()

    async def _recall(self, keys: list[int], submission: Submission) -> None:
        """A reader of a resumed run gets the rows that it had before, so that its groups are whole."""
        if keys and submission.stream is not None:
            await self._room_to_plan()
            for batch in await asyncio.to_thread(self._store.recall, keys):
                if submission.stream is not None:
                    submission.stream.put(batch, batch.num_rows, batch.nbytes)

    def _add(self, task: Task, submission: Submission) -> list[int]:
        """Plans a task; returns the keys that earlier epochs have rows for."""
        opened, groups = self._planner.add(task, submission.round, submission)
        self._progressed = self._loop.time()
        self.progress.before += self.space.per_slot - opened.left
        if opened.left:
            submission.open_slots += 1
        for tries in groups:
            self._scheduler.add_group(tries)
        self._bury()
        if opened.left == self.space.per_slot:
            return []
        planned = {one.key for tries in groups for one in tries}
        return [key for key in self.space.slot_keys(opened.slot) if key not in planned]

    # -- serving hosts ------------------------------------------------------------------------------------------

    def _serve_host(self, handle: HostHandle) -> None:
        peer = _Peer(handle, Link(handle.host_id, self._epoch))
        self._peers[handle.host_id] = peer
        self._scheduler.join(handle.host_id)
        self._budgets.join(handle.host_id)
        self.progress.hosts = len(self._peers)
        self._spawn(self._serve(peer), f"serve {handle.host_id}")

    async def _serve(self, peer: _Peer) -> None:
        while True:
            self._grant(peer)
            limits = self._limits(peer)
            reply = await self._exchange(peer, limits)
            if reply is not None:
                # A host that is told to start nothing and runs nothing has sent every row that it will have.
                peer.drained = limits.paused and not reply.running
                self._take_in(peer, reply)

    async def _exchange(self, peer: _Peer, limits: HostLimits) -> Reply | None:
        """One exchange; None where it failed and should be asked again. Lost hosts end the task."""
        peer.waiting = True
        try:
            async with asyncio.timeout(limits.wait_s + EXCHANGE_GRACE_S):
                reply = await peer.handle.exchange(peer.link.request(limits))
        except HostLost as error:
            self._lost(peer, error)
            raise asyncio.CancelledError from error
        except Exception as error:
            now = self._loop.time()
            peer.link.silent_since = silent = peer.link.silent_since or now
            log.warning("host=%s exchange failed, asking again: %s", peer.link.host_id, describe(error))
            if now - silent > self.config.host.lease_s:
                self._lost(peer, HostLost(f"silent for {now - silent:.0f} s: {describe(error)}"))
                raise asyncio.CancelledError from error
            await asyncio.sleep(RETRY_PAUSE_S)
            return None
        finally:
            peer.waiting = False
        peer.link.silent_since = None
        return reply

    @property
    def _behind(self) -> bool:
        """Whether rows pile up in front of the disk or of a consumer: then nothing is granted."""
        store = self.config.store
        if self._commits.waiting_bytes > store.max_uncommitted_bytes:
            return True
        streams = [submission.stream for submission in self._submissions if submission.stream is not None]
        return any(
            stream.unread_rows > store.max_unread_rows or stream.unread_bytes > store.max_unread_bytes
            for stream in streams
        )

    def _grant(self, peer: _Peer) -> None:
        link = peer.link
        if self._draining or link.free_slots <= 0 or self._behind:
            return
        for one in self._scheduler.grant(link.host_id, link.free_slots, self._loop.time()):
            spec = self._planner.spec(one)
            if link.lacks(spec.digest):
                link.bring(spec.digest, self._planner.of(one.key).body)
            link.grant(spec)
        if self._scheduler.pending < self.config.plan_ahead:
            self._plan_more.set()

    def _limits(self, peer: _Peer) -> HostLimits:
        host = peer.link.host_id
        lent = self._budgets.lend(host, self._scheduler.in_flight_on[host], self._loop.time())
        peer.starved = lent.starved
        # A new host says at once how much fits on it; until then it is granted nothing.
        wait_s = min(HEARTBEAT_S, self.config.host.lease_s / 4) if peer.link.stats else 0.0
        if lent.waits_for_tokens:
            wait_s = TOKEN_POLL_S
        linger_s = min(BASE_LINGER_S * max(1.0, len(self._peers) / 2), MAX_LINGER_S)
        return HostLimits(lent.leases, linger_s, wait_s, self._draining)

    def _take_in(self, peer: _Peer, reply: Reply) -> None:
        link = peer.link
        news = link.take_in(reply)
        self._budgets.confirm(link.host_id, reply.demand)
        for seq, batch in news.batches:
            self._rows(link, seq, batch)
        for digest in news.bodies:
            self._bring(link, digest)
        if news.missing:
            log.warning("host=%s lacks %d rollouts that it was granted", link.host_id, len(news.missing))
            self._recover(link, self._scheduler.missing(link.host_id, news.missing), news.missing)
        link.cancel_keys.update(news.strange)
        self._poke_starved()
        self._changed.set()

    def _bring(self, link: Link, digest: str) -> None:
        for key in self._scheduler.held[link.host_id]:
            opened = self._planner.of(key)
            if opened.digest == digest:
                link.bring(digest, opened.body)
                return

    def _poke(self) -> None:
        """Cuts short the exchanges of hosts that could be given something."""
        self._plan_more.set()
        work = self._scheduler.todo_count > 0 and not self._draining
        for peer in self._peers.values():
            if peer.waiting and ((work and peer.link.free_slots > 0) or peer.link.cancel_keys or self._draining):
                peer.waiting = False
                peer.handle.nudge()

    def _poke_starved(self) -> None:
        for peer in self._peers.values():
            if peer.waiting and peer.starved and self._budgets.has_idle_permits:
                peer.waiting = False
                peer.handle.nudge()

    # -- rows ---------------------------------------------------------------------------------------------------

    def _rows(self, link: Link, seq: int, batch: pa.RecordBatch) -> None:
        """Decides on each row: commit, try again, or drop."""
        now = self._loop.time()
        keys = batch.column("key").to_pylist()
        outcomes = outcomes_of(batch)
        keep = []
        for key, outcome in zip(keys, outcomes, strict=True):
            digest = self._digest(key)
            verdict = self._scheduler.finished(link.host_id, key, outcome, now)
            link.done(key, digest)
            keep.append(verdict is Verdict.COMMIT)
            self.progress.retries += verdict is Verdict.RETRY
        if not all(keep):
            batch = batch.filter(pa.array(keep))
        self._progressed = now
        self._commits.submit(batch, link, seq)
        self._tell_breakers()
        self._bury()

    def _digest(self, key: int) -> str:
        opened = self._planner.open.get(self.space.slot(key))
        return opened.digest if opened is not None else ""

    def _committed(self) -> None:
        """Something is on the disk now."""
        self._check_budget()
        self._plan_more.set()
        self._changed.set()

    def _check_budget(self) -> None:
        limit = self.config.max_cost_usd
        if limit is None or self._spent or self._store.cost_usd + self.progress.cost_usd < limit:
            return
        self._spent = True
        self._note(f"the budget of ${limit:g} is spent: what has not started is cancelled")
        self._bury()

    def _bury(self) -> None:
        """What may not start any more gets its rows: of models whose breaker has given up, or of a spent budget."""
        if self._spent and self._scheduler.pending:
            self._commits.give_up(self._scheduler.drop_all(), _SPENT)
        for model in self._scheduler.dead_models():
            breaker = self._scheduler.breakers[model]
            name = self.config.model_names[model]
            message = f"model {name} was given up after {breaker.trips - 1} pauses; it kept failing with {breaker.kind}"
            self._note(message)
            self._commits.give_up(
                self._scheduler.drop_all(model), Failure(Boundary.MODEL, "CircuitOpen", message, retryable=True)
            )

    def _note(self, message: str) -> None:
        if message not in self.progress.notes:
            log.warning("%s", message)
            self.progress.notes.append(message)

    # -- losses -------------------------------------------------------------------------------------------------

    def _lost(self, peer: _Peer, error: HostLost) -> None:
        """A host is gone: its work is planned again elsewhere, and another host is asked for."""
        host = peer.link.host_id
        self._note(f"host {host} is lost: {describe(error)}")
        now = self._loop.time()
        self._budgets.lost(host, now if error.process_gone else now + self.config.host.lease_s)
        del self._peers[host]
        self.progress.hosts = len(self._peers)
        self._recover(None, self._scheduler.lost(host), ())
        if not self._over.is_set():
            self._spawn(self._replace(host), f"replace {host}")

    async def _replace(self, host: str) -> None:
        handle, why = None, ""
        self._replacing += 1
        try:
            handle = await self._cluster.replace(host)
        except Exception as error:  # the others go on without it
            why = f": {describe(error)}"
            self._note(f"host {host} could not be replaced{why}")
        finally:
            self._replacing -= 1
        if handle is not None and self._over.is_set():
            await handle.stop()
        elif handle is not None:
            self._serve_host(handle)
        elif not self._peers and not self._replacing:
            raise RunError(f"no host is left (the last one was {host}){why}; resume the run when the cluster is back")

    def _recover(self, link: Link | None, lost: Lost, keys: Iterable[int]) -> None:
        if link is not None:
            for key in keys:
                link.done(key, self._digest(key))
        failure = Failure(Boundary.HOST, "HostLost", "its host was lost too often", retryable=True)
        self._commits.give_up(lost.given_up, failure)
        self._commits.give_up(lost.cancelled, None)
        self._bury()
        self._changed.set()
        self._poke()

    # -- the clock ----------------------------------------------------------------------------------------------

    async def _tick(self) -> None:
        limit = self.config.no_progress_s or self.config.limits.deadline_s + 60.0
        behind = False
        while True:
            await asyncio.sleep(TICK_S)
            was_behind, behind = behind, self._behind
            now = self._loop.time()
            self.progress.now = now
            self.progress.pending = self._scheduler.pending
            self.progress.running = sum(self._running_on(peer.link) for peer in self._peers.values())
            self._tell_breakers()
            wake = self._scheduler.next_wakeup()
            if (wake is not None and wake <= now) or (was_behind and not behind):
                self._poke()
            if self._scheduler.pending + self._scheduler.held_count == 0 or behind:
                self._progressed = now
            elif now - self._progressed > limit:
                await self._stuck(limit)

    def _running_on(self, link: Link) -> int:
        """What a host said last, or what it has surely started since: it replies only when there is news."""
        return max(link.running, min(len(self._scheduler.held[link.host_id]), self.config.host.slots))

    def _tell_breakers(self) -> None:
        for name, breaker in zip(self.config.model_names, self._scheduler.breakers, strict=True):
            if breaker.state is BreakerState.OPEN:
                self._note(f"model {name} is paused (pause {breaker.trips}): it keeps failing with {breaker.kind}")

    async def _stuck(self, limit: float) -> None:
        """Nothing has ended for too long: says what everything waits for, and ends the run."""
        lines = [f"{self._scheduler.pending} rollouts wait for a host"]
        for host, peer in self._peers.items():
            try:
                async with asyncio.timeout(EXCHANGE_GRACE_S):
                    lines += [f"{host}: {line}" for line in await peer.handle.waiting_for()]
            except Exception as error:
                lines.append(f"{host}: does not answer ({describe(error)})")
        raise RunError(f"nothing has ended for {limit:g} s; waiting for:\n  " + "\n  ".join(lines))


_SPENT = Failure(Boundary.CANCEL, "BudgetSpent", "the run's max_cost_usd was reached", retryable=True)
