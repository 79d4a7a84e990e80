"""The taskset of verifiers04.py for `null`: the questions of the other cases, with the same regex as the reward."""

from __future__ import annotations

import re

import verifiers.v1 as vf

from benchmarks.work import EXPECTED, PATTERN, question

__all__ = ["Questions"]


class Question(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    """One question, with the reward of the other cases."""

    @vf.reward
    async def exact_match(self, trace: vf.Trace) -> float:
        found = re.search(PATTERN, trace.last_reply or "")
        return 1.0 if found is not None and found.group(1) == EXPECTED else 0.0


class QuestionsConfig(vf.TasksetConfig):
    """How many questions."""

    count: int = 1


class Questions(vf.Taskset[Question, QuestionsConfig]):
    """The questions of the other cases."""

    def load(self) -> list[Question]:
        data = (vf.TaskData(idx=index, prompt=question(index)) for index in range(self.config.count))
        return [Question(one, self.config.task) for one in data]
