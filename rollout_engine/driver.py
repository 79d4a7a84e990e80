"""The driver: plans, grants by credit, takes rows in, has them committed, and recovers what hosts lose.

Everything here runs on one event loop in a thread of its own, so that a run goes on whether or not anybody reads its
rows; only the committer's thread touches the disk. Decisions are the scheduler's, the leases' and the planner's.
The rooms: `board.py` (what they share), `planning.py`, `serving.py` (one exchange after the other with each host),
`intake.py` (rows), `fleet.py` (hosts), `ticking.py` (the clock).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping

from rollout_engine.board import Board, RunStore
from rollout_engine.clusters import Cluster
from rollout_engine.commits import Commits
from rollout_engine.config import RunConfig
from rollout_engine.dump import ask_hosts
from rollout_engine.errors import HostError, RunError
from rollout_engine.fleet import Fleet
from rollout_engine.hostplan import HostPlan
from rollout_engine.intake import Intake
from rollout_engine.monitor import Monitor
from rollout_engine.planning import Planning
from rollout_engine.probe import Probe
from rollout_engine.progress import Progress
from rollout_engine.serving import RETRY_PAUSE_S
from rollout_engine.submission import Submission
from rollout_engine.teardown import finish
from rollout_engine.ticking import Ticking
from rollout_engine.types import KeySpace
from rollout_engine.waiting import Waiting

PROBE_TRIES = 3
CLUSTER_CLOSE_S = 60.0
"""The longest that letting go of the cluster takes."""


class Driver:
    """One epoch of a run. Use from its own loop only; the engine crosses the threads."""

    def __init__(
        self,
        config: RunConfig,
        store: RunStore,
        cluster: Cluster,
        keys: Mapping[str, str],
        make_plan: Callable[[str, str], HostPlan],
        epoch: int,
        monitor: Monitor | None = None,
    ) -> None:
        self.config = config
        self._cluster, self._keys, self._make_plan = cluster, keys, make_plan
        self.board = Board(config, store, epoch, monitor or Monitor("", epoch, config.models))
        self._intake = Intake(self.board)
        self._planning = Planning(self.board, self._intake)
        self._fleet = Fleet(self.board, self._intake, cluster)
        self._ticking = Ticking(self.board, self._intake)
        self.disk_hangs = False
        """Whether, at the end, the disk had not taken all rows in time: nobody may write there beside it."""
        self._cancelled = False

    # -- life ---------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        """Brings the hosts up. Raises InputError where that is not possible."""
        board = self.board
        board.open()
        board.monitor.start()
        told, counted = self._intake.committed, board.monitor.committed
        board.commits = Commits(board.store, board.planner, board.progress, board.spending, told, board.fail, counted)
        limit = asyncio.timeout(self.config.cluster_s)
        try:
            async with limit:
                await self._fleet.open(self._make_plan, self._keys)
        except BaseException as error:
            await board.commits.close(self.config.store.commit_s)
            if isinstance(error, TimeoutError) and limit.expired():
                raise RunError(f"no host was up within {self.config.cluster_s:g} s (cluster_s)") from error
            raise
        board.spawn(self._ticking.tick(), "tick")

    async def close(self) -> None:
        """Stops hosts and commits what has arrived. What was in flight stays planned, for a resume."""
        await self.board.end_tasks()
        await self._fleet.stop()
        self.disk_hangs = not await self.board.commits.close(self.config.store.commit_s)
        await self.board.monitor.close(self.board.glance())
        await finish(self._cluster.close(), CLUSTER_CLOSE_S)
        for submission in self.board.submissions:
            submission.fail(self.fatal or RunError("the engine was closed before this submission was done"))

    @property
    def space(self) -> KeySpace:
        return self.board.space

    @property
    def progress(self) -> Progress:
        return self.board.progress

    @property
    def fatal(self) -> BaseException | None:
        return self.board.fatal

    @property
    def over(self) -> asyncio.Event:
        """Set when the run has ended early or was closed."""
        return self.board.over

    # -- what users ask -----------------------------------------------------------------------------------------

    def submit(self, submission: Submission) -> None:
        """Plans a submission's tasks as there is room for them."""
        if self.fatal is not None or self._cancelled:
            submission.fail(self.fatal or RunError("the run was cancelled"))
            return
        self.board.submissions.append(submission)
        self._intake.check_budget()
        submission.planning = self.board.spawn(self._planning.plan(submission), "plan")

    async def waiting(self) -> dict[str, list[Waiting]]:
        """What the oldest rollouts of each host wait for; a host that does not answer has none."""
        return {state.host: state.waiting for state in await ask_hosts(self.board.peers.values())}

    def cancel(self, keys: Iterable[int]) -> None:
        """Ends rollouts by the user's word: each gets a `cancelled` row."""
        dropped, on_hosts = self.board.scheduler.cancel(keys)
        self._intake.give_up(dropped, None)
        for host, mine in on_hosts.items():
            self.board.peers[host].link.cancel_keys.update(mine)
        self.board.poke()

    async def probe(self, body: bytes) -> Probe:
        """The dry run of a task on the host with the fewest of them. Raises HostError, TaskBodyError, RunError."""
        for tries_left in reversed(range(PROBE_TRIES)):
            if not self.board.peers:
                raise RunError("no host is left to check a task on")
            peer = min(self.board.peers.values(), key=lambda peer: peer.probes)
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
        board = self.board
        board.draining = True
        board.poke()
        while not all(peer.drained for peer in board.peers.values()) and not board.over.is_set():
            board.changed.clear()
            await board.changed.wait()

    def leave(self, submission: Submission) -> None:
        """Nobody reads it any more: what has not ended is cancelled, and what was not read holds nobody up."""
        submission.stream = None
        if submission in self.board.submissions:
            self.board.submissions.remove(submission)
        if not submission.done.is_set():
            self._end_early(submission)

    def cancel_all(self) -> None:
        """Nothing more is planned, and each planned rollout that has no row gets a cancelled one."""
        self.board.draining = self._cancelled = True
        for submission in list(self.board.submissions):
            if not submission.done.is_set():
                self._end_early(submission)

    def _end_early(self, submission: Submission) -> None:
        submission.exhausted = True
        if submission.planning is not None:
            submission.planning.cancel()
        keys = [
            key
            for slot, opened in self.board.planner.open.items()
            if opened.owner is submission
            for key in self.space.slot_keys(slot)
        ]
        self.cancel(keys)
        submission.settle()
