"""Plans a submission's tasks as there is room for them, and gives a resumed run's reader the rows that it had."""

from __future__ import annotations

import asyncio

from rollout_engine.board import Board
from rollout_engine.circuits import subjects_of
from rollout_engine.intake import Intake
from rollout_engine.specs import Task
from rollout_engine.submission import Submission

RECALLED_ROWS = 256
"""Rows of earlier epochs that are read for a consumer at once."""


class Planning:
    """From a submission's feed into the scheduler."""

    def __init__(self, board: Board, intake: Intake) -> None:
        self._board, self._intake = board, intake

    async def plan(self, submission: Submission) -> None:
        """Until its feed is exhausted; an error of the feed is the submission's."""
        board = self._board
        try:
            while not submission.exhausted:
                await self._room()
                tasks = await submission.feed.take()
                if not tasks:
                    break
                before: list[int] = []
                for task in tasks:
                    if board.scheduler.pending >= board.config.plan_ahead:
                        board.poke()
                        await self._room()
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
        board.watch.planned(board.config.limits.deadline_of(task.limits), board.loop.time())
        board.progress.before += board.space.per_slot - opened.left
        if opened.left:
            submission.open_slots += 1
        subjects = subjects_of(task, board.config.agent)
        for tries in groups:
            board.scheduler.add_group(tries, subjects)
        self._intake.bury()
        if opened.left == board.space.per_slot:
            return []
        planned = {one.key for tries in groups for one in tries}
        return [key for key in board.space.slot_keys(opened.slot) if key not in planned]
