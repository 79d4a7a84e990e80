"""Plans a submission's tasks as there is room for them, and gives a resumed run's reader the rows that it had."""

from __future__ import annotations

import asyncio

from pydantic import ValidationError

from rollout_engine.board import Board
from rollout_engine.circuits import subjects_of
from rollout_engine.errors import RunError
from rollout_engine.intake import Intake
from rollout_engine.plan import OpenSlot
from rollout_engine.specs import Task, body_digest
from rollout_engine.store.planfile import PlanEntry
from rollout_engine.submission import Submission
from rollout_engine.tries import Try

RECALLED_ROWS = 256
"""Rows of earlier epochs that are read for a consumer at once."""
TASKS_AT_ONCE = 8
"""Planned before the loop's other callbacks get their turn."""


class Planning:
    """From a submission's feed into the scheduler."""

    def __init__(self, board: Board, intake: Intake) -> None:
        self._board, self._intake = board, intake
        self._gone_on = False
        """Whether all that earlier epochs planned is planned again, and what they have done counted."""

    async def plan(self, submission: Submission) -> None:
        """Until its feed is exhausted; an error of the feed is the submission's."""
        board = self._board
        try:
            if submission.go_on and not self._gone_on:
                self._gone_on = True
                await self._go_on(submission)
            while not submission.exhausted:
                await self._room()
                tasks = await submission.feed.take()
                if not tasks:
                    break
                before: list[int] = []
                for number, task in enumerate(tasks):
                    await self._turn(number)
                    before += self._add(task, submission)
                    if len(before) >= RECALLED_ROWS:
                        await self._recall(before, submission)
                        before = []
                await self._recall(before, submission)
                board.poke()
        except Exception as error:
            submission.error = error
        finally:
            await submission.feed.close()
        submission.exhausted = True
        submission.settle()

    async def _go_on(self, submission: Submission) -> None:
        """What earlier epochs left, as the plan has it: it starts without a look at the tasks that are done."""
        board = self._board
        board.progress.before = board.store.done_before
        left = board.store.unfinished()
        while not submission.exhausted and (entries := await asyncio.to_thread(next, left, None)) is not None:
            await self._room()
            for number, entry in enumerate(entries):
                await self._turn(number)
                if entry.slot not in board.planner.open:
                    self._schedule(_task_of(entry), *board.planner.go_on(entry, submission))
            board.poke()

    async def _turn(self, number: int) -> None:
        """Returns once there is room for another task, and others have had the loop."""
        board = self._board
        if number % TASKS_AT_ONCE == TASKS_AT_ONCE - 1:
            await asyncio.sleep(0)
        if board.scheduler.pending >= board.config.plan_ahead:
            board.poke()
            await self._room()

    async def _room(self) -> None:
        board = self._board
        while board.draining or board.scheduler.pending >= board.config.plan_ahead or board.behind:
            board.plan_more.clear()
            await board.plan_more.wait()

    async def _recall(self, keys: list[int], submission: Submission) -> None:
        """A reader of a resumed run gets the rows that it had before, so that its groups are whole."""
        if keys and submission.stream is not None:
            await self._room()
            async with asyncio.timeout(self._board.config.store.commit_s):
                batches = await asyncio.to_thread(self._board.store.recall, keys)
            for batch in batches:
                if submission.stream is not None:
                    submission.stream.put(batch, batch.num_rows, batch.nbytes)

    def _add(self, task: Task, submission: Submission) -> list[int]:
        """Plans a task; returns the keys that earlier epochs have rows for."""
        board = self._board
        opened, groups = board.planner.add(task, submission.round, submission)
        if not self._gone_on:
            board.progress.before += board.space.per_slot - opened.left
        self._schedule(task, opened, groups)
        if opened.left == board.space.per_slot:
            return []
        planned = {one.key for tries in groups for one in tries}
        return [key for key in board.space.slot_keys(opened.slot) if key not in planned]

    def _schedule(self, task: Task, opened: OpenSlot[Submission], groups: list[list[Try]]) -> None:
        board = self._board
        board.watch.planned(board.config.limits.deadline_of(task.limits), board.loop.time())
        if opened.left:
            opened.owner.open_slots += 1
        subjects = subjects_of(task, board.config.agent)
        for tries in groups:
            board.scheduler.add_group(tries, subjects)
        self._intake.bury()


def _task_of(entry: PlanEntry) -> Task:
    """Raises RunError where the plan has not the task that was planned."""
    if body_digest(entry.body) != entry.digest:
        raise RunError(f"the plan's entry of slot {entry.slot} (task {entry.task_id!r}) was changed; restore the plan")
    try:
        return Task.model_validate_json(entry.body)
    except ValidationError as error:
        raise RunError(f"the plan's entry of slot {entry.slot} is no task of this version: {error}") from error
