"""What becomes of rows that arrive, and of rollouts that no host will run."""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa

from rollout_engine.board import Board
from rollout_engine.breaker import Breaker, BreakerState
from rollout_engine.circuits import BOUNDARY_OF, Subject
from rollout_engine.commits import outcomes_of
from rollout_engine.errors import SandboxUnavailable
from rollout_engine.link import Link
from rollout_engine.tries import Lost, Try, Verdict
from rollout_engine.types import NO_SANDBOX, Boundary, Failure

_UNAVAILABLE = f"{Boundary.SANDBOX}:{SandboxUnavailable.__name__}"
_UNFIT = "it has no sandbox of the kind that tasks need and others have; `rollout doctor` there says why"
_LOST = Failure(Boundary.HOST, "HostLost", "its host was lost too often", retryable=True)

MAX_NAMED = 5
"""Hosts that one message names."""


class Intake:
    """Carries out the scheduler's verdicts."""

    def __init__(self, board: Board) -> None:
        self._board = board

    def rows(self, link: Link, seq: int, batch: pa.RecordBatch) -> None:
        """Decides on each row of a batch that arrives for the first time."""
        board, now = self._board, self._board.loop.time()
        keep = []
        keys = batch.column("key").to_pylist()
        for row, (key, outcome) in enumerate(zip(keys, outcomes_of(batch), strict=True)):
            digest = board.digest(key)
            if outcome.kind == _UNAVAILABLE and self._refused(link.host_id, key):
                board.spending.throw(key, batch.slice(row, 1))
                self.recover(board.scheduler.handed_back(link.host_id, (key,), started=True))
                verdict = Verdict.DROP
            else:
                verdict = board.scheduler.finished(link.host_id, key, outcome, now)
            link.done(key, digest)
            keep.append(verdict is Verdict.COMMIT)
            if verdict is Verdict.RETRY:
                board.progress.threw(board.spending.throw(key, batch.slice(row, 1)))
        if board.fitness.in_doubt:
            self._learn_fitness(batch)
        if not all(keep):
            batch = batch.filter(pa.array(keep))
        batch = board.spending.stamp(batch)
        board.watch.progressed = now
        board.commits.submit(batch, link, seq)
        self.tell_breakers()
        self.bury()

    def _refused(self, host: str, key: int) -> bool:
        """Whether a rollout for which a host has no sandbox is tried on another node before it counts."""
        board = self._board
        node = board.peers[host].handle.node_id
        others = {peer.handle.node_id for peer in board.peers.values() if peer.leaving_at is None and not peer.unfit}
        return board.fitness.refused(node, key, others - {node}, board.loop.time())

    def _learn_fitness(self, batch: pa.RecordBatch) -> None:
        """Where a rollout has had its sandbox, the hosts of nodes that refused it are to go."""
        board = self._board
        for key, sandbox in zip(batch.column("key").to_pylist(), batch.column("sandbox").to_pylist(), strict=True):
            blamed = board.fitness.blamed(key) if sandbox != NO_SANDBOX else ()
            for peer in board.peers.values() if blamed else ():
                if peer.handle.node_id in blamed:
                    peer.unfit = _UNFIT
                    peer.handle.nudge()
            if blamed:
                board.fitness.ended((key,))

    def give_up(self, tries: Iterable[Try], failure: Failure | None) -> None:
        """Rows for rollouts that no host will run: failed, or cancelled."""
        tries = list(tries)
        self._board.commits.give_up(tries, failure)
        self._board.taken(one.key for one in tries)
        self._board.fitness.ended(one.key for one in tries)

    def committed(self) -> None:
        """Something is on the disk now."""
        self.check_budget()
        self._board.plan_more.set()
        self._board.changed.set()

    def check_budget(self) -> None:
        """What has not started is cancelled once a budget is spent."""
        board = self._board
        if board.spent is None and (spent := board.spending.exceeded()) is not None:
            board.spent = spent
            board.event("budget", f"{spent}: what has not started is cancelled")
            self.bury()

    def bury(self) -> None:
        """What may not start any more gets its rows: of what was given up, or of a spent budget."""
        board = self._board
        if board.spent is not None and board.scheduler.pending:
            failure = Failure(Boundary.CANCEL, "BudgetSpent", board.spent, retryable=True)
            self.give_up(board.scheduler.drop_all(), failure)
        for model in board.scheduler.dead_models():
            subject = Subject("model", board.config.model_names[model])
            self._give_up(subject, board.scheduler.breakers[model], board.scheduler.drop_all(model))
        for subject, breaker, tries in board.scheduler.drop_dead():
            self._give_up(subject, breaker, tries)
        if hopeless := board.scheduler.circuits.hopeless(board.peers):
            message = (
                f"sandboxes were given up on every host ({_names(board.peers)}): they keep failing with {hopeless.kind}"
            )
            self._bury(board.scheduler.drop_all(), Boundary.SANDBOX, message)

    def _give_up(self, subject: Subject, breaker: Breaker, tries: list[Try]) -> None:
        """Rows for what depends on something that was given up."""
        message = f"{subject} was given up after {breaker.trips - 1} pauses; it kept failing with {breaker.kind}"
        self._bury(tries, BOUNDARY_OF[subject.kind], message)

    def _bury(self, tries: list[Try], boundary: Boundary, message: str) -> None:
        if tries:
            self._tell(message)
            self.give_up(tries, Failure(boundary, "CircuitOpen", message, retryable=True))

    def tell_breakers(self) -> None:
        """Notes of all that is paused."""
        board = self._board
        models = zip(board.config.model_names, board.scheduler.breakers, strict=True)
        shut = [*((Subject("model", name), breaker) for name, breaker in models), *board.scheduler.circuits.shut()]
        for subject, breaker in shut:
            if breaker.state is BreakerState.OPEN:
                self._tell(f"{subject} is paused (pause {breaker.trips}): it keeps failing with {breaker.kind}")

    def _tell(self, message: str) -> None:
        """Of a breaker: on record and told to people, each once."""
        if message not in self._board.progress.notes:
            self._board.event("breaker", message)

    def recover(self, lost: Lost, link: Link | None = None, keys: Iterable[int] = ()) -> None:
        """What a host lost was planned again; what was lost too often gets its rows.

        `keys` of `link`: those that a host that is still served does not hold.
        """
        board = self._board
        if link is not None:
            for key in keys:
                link.done(key, board.digest(key))
        self.give_up(lost.given_up, _LOST)
        self.give_up(lost.cancelled, None)
        self.bury()
        board.changed.set()
        board.poke()


def _names(hosts: Iterable[str]) -> str:
    names = sorted(hosts)
    return ", ".join(names[:MAX_NAMED]) + (f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else "")
