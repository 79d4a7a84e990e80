"""The `judge` verifier: a model of the run's config (`[judges.NAME]`) reads the final answer and gives the verdict.

    {"type": "judge", "judge": "grader", "expected": "42", "rubric": "Units may be left out."}

judge      which of the config's judges; may be left out where there is one
expected   the right answer, where there is one: {expected} of the judge's prompt
rubric     {rubric} of the prompt
prompt     in place of the judge's own

The judge's reply is read strictly (verdict.py); one that cannot be used is answered with what is wrong with it, up to
the judge's `tries`. A judge that cannot be asked, or never replies usably, is no finding: the score is null.
No answer at all is a wrong answer, and nobody is asked.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from rollout_engine.config import JudgeSpec
from rollout_engine.errors import (
    InputError,
    LimitReached,
    ModelError,
    VerifierBadReturn,
    VerifierTimeout,
    VerifierUnavailable,
    describe,
)
from rollout_engine.problems import checked
from rollout_engine.sandboxes.base import Sandbox
from rollout_engine.specs import Spec, Task
from rollout_engine.types import Isolation, Message, Score, Trajectory
from rollout_engine.verifiers.case import BoundJudge, find_judge
from rollout_engine.verifiers.verdict import FORM, parse_verdict

MAX_QUESTION_CHARS = 65_536
"""Of a longer question the judge sees the beginning."""
_FIELD = re.compile(r"\{(question|answer|expected|rubric)\}")


class JudgeVerifierSpec(Spec):
    """The fields of a task's `verifier` of type judge."""

    type: Literal["judge"] = "judge"
    judge: str | None = None
    expected: str | int | float | None = None
    rubric: str = ""
    prompt: str | None = None


class Judge:
    """Has final answers judged by a model."""

    isolation = Isolation.PURE

    def __init__(self, spec: Mapping[str, Any], *, timeout_s: float = 300.0) -> None:
        """Raises InputError naming the field that cannot be used."""
        self._spec = checked(JudgeVerifierSpec, spec, "verifier")
        self._timeout_s = timeout_s
        if self._spec.prompt is not None and "{answer}" not in self._spec.prompt:
            raise InputError(
                "the prompt does not hold {answer}", "verifier.prompt", "say where the answer that is judged goes"
            )

    @property
    def judge(self) -> str | None:
        """Whom it asks; None: the run's only judge."""
        return self._spec.judge

    async def verify(self, task: Task, trajectory: Trajectory, sandbox: Sandbox | None) -> Score:
        answer = trajectory.final_answer
        if answer is None or not answer.strip():
            return Score(0.0, False)
        judge = find_judge(self._spec.judge)
        limit = asyncio.timeout(self._timeout_s)
        try:
            async with limit:
                return await _verdict(judge, self._messages(judge.judge, task, answer))
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise VerifierTimeout(f"judge {judge.judge.name}: no verdict within {self._timeout_s:g} s") from error

    def _messages(self, judge: JudgeSpec, task: Task, answer: str) -> list[Message]:
        fields = {
            "question": question_of(task)[:MAX_QUESTION_CHARS],
            "answer": _end_of(answer, judge.max_answer_chars),
            "expected": "(none is given)" if self._spec.expected is None else str(self._spec.expected),
            "rubric": self._spec.rubric,
        }
        # In one pass, so that an answer that says {expected} is not told it.
        prompt = _FIELD.sub(lambda found: fields[found[1]], self._spec.prompt or judge.prompt)
        head = [] if judge.system_prompt is None else [{"role": "system", "content": judge.system_prompt}]
        return [*head, {"role": "user", "content": prompt}]


async def _verdict(bound: BoundJudge, messages: Sequence[Message]) -> Score:
    judge = bound.judge
    for tries_left in reversed(range(judge.tries)):
        reply = await _reply(bound, messages)
        try:
            return replace(parse_verdict(reply, judge.score_range), output=reply)
        except VerifierBadReturn as error:
            if not tries_left:
                raise VerifierBadReturn(
                    f"judge {judge.name} gave no usable verdict in {judge.tries} tries; of the last one: {error}"
                ) from error
            again = f"This cannot be used: {error}. {FORM}"
            messages = [
                *messages,
                {"role": "assistant", "content": reply},
                {"role": "user", "content": again},
            ]
    raise AssertionError("unreachable: the last try returns or raises")


async def _reply(bound: BoundJudge, messages: Sequence[Message]) -> str:
    """Raises VerifierUnavailable: a fault of the judge's server is no fault of the rollout's model."""
    try:
        completion = await bound.complete(messages)
    except (ModelError, LimitReached) as error:
        reason = f"{type(error).__name__}: {describe(error)}"
        raise VerifierUnavailable(f"judge {bound.judge.name} could not be asked: {reason}") from error
    content = completion.message.get("content")
    return content if isinstance(content, str) else ""


def question_of(task: Task) -> str:
    """The text of what a task's user says."""
    if isinstance(task.prompt, str):
        return task.prompt
    said = [message.get("content") for message in task.prompt if message.get("role") == "user"]
    return "\n\n".join(each for each in said if isinstance(each, str))


def _end_of(answer: str, chars: int) -> str:
    return answer if len(answer) <= chars else f"[... {len(answer) - chars} characters left out]\n{answer[-chars:]}"
