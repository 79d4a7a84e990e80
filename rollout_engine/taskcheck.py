"""Tries each task's verifier on answers that no good verifier passes, and on the task's own solution.

Verifiers that judge a sandbox are the dry run's (dryrun.py).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterable, AsyncIterator, Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from rollout_engine.errors import InputError, describe
from rollout_engine.specs import Task
from rollout_engine.types import Completion, Message, Trajectory, Turn
from rollout_engine.verifiers import make_verifier
from rollout_engine.verifiers.base import Verifier, judges_of, takes_sandbox
from rollout_engine.verifiers.workshop import Workshop

Severity: TypeAlias = Literal["error", "note"]

LONG_ANSWER_CHARS = 1_000_000
_LONG = ("so we carry the 17 over, and then\n" * (LONG_ANSWER_CHARS // 34 + 1))[:LONG_ANSWER_CHARS]
_GARBAGE = "\x00\x1b[31m ]}>'\"\\ %s ${x} <|im_end|> \U0001f600 \ufffd\u202e null NaN -0 1e999 (((((((("

BAD_ANSWERS = {"an empty answer": "", "a very long answer": _LONG, "a garbage answer": _GARBAGE}


@dataclass(frozen=True, slots=True)
class Finding:
    """What is wrong with one task's verifier: `error` makes its rewards worthless, `note` is for information."""

    task_id: str
    what: str
    severity: Severity = "error"


async def check_verifiers(
    tasks: Iterable[Task] | AsyncIterable[Task],
    *,
    timeout_s: float = 10.0,
) -> list[Finding]:
    """The findings about all tasks, in their order. See `find_problems`."""
    return [finding async for finding in find_problems(tasks, timeout_s=timeout_s)]


async def find_problems(
    tasks: Iterable[Task] | AsyncIterable[Task],
    *,
    timeout_s: float = 10.0,
) -> AsyncIterator[Finding]:
    """Verifiers that raise, hang, pass an empty, a very long or a garbage answer, or fail their own solution.

    Only verifiers that need no sandbox are run; a note says where one was not. `timeout_s` bounds one verdict.
    """
    workshop = Workshop()
    try:
        if isinstance(tasks, AsyncIterable):
            async for task in tasks:
                for finding in await _check(task, workshop, timeout_s):
                    yield finding
        else:
            for task in tasks:
                for finding in await _check(task, workshop, timeout_s):
                    yield finding
    finally:
        await workshop.close()


async def _check(task: Task, workshop: Workshop, timeout_s: float) -> list[Finding]:
    try:
        verifier = make_verifier(task.verifier or {}, timeout_s=timeout_s, workshop=workshop)
    except InputError as error:
        return [Finding(task.task_id, f"the verifier cannot be made: {error}")]
    if takes_sandbox(verifier):
        return [Finding(task.task_id, "the verifier needs a sandbox: --dry-run tries it", "note")]
    if judges_of(verifier):
        return [Finding(task.task_id, "the verifier asks a judge: only a run tries it", "note")]
    tries = [(name, answer, False) for name, answer in BAD_ANSWERS.items()]
    if task.answer is not None:
        tries.append(("the task's own solution", task.answer, True))
    findings = []
    for name, answer, right in tries:
        what = await _try(task, verifier, answer, right, timeout_s)
        if what is not None:
            findings.append(Finding(task.task_id, f"{what} {name}"))
    return findings


async def _try(task: Task, verifier: Verifier, answer: str, right: bool, timeout_s: float) -> str | None:
    """What the verifier does wrong about an answer, as a verb; None where it does right."""
    limit = asyncio.timeout(timeout_s * 2)  # its own limit comes first, unless it keeps none
    try:
        async with limit:
            score = await verifier.verify(task, _trajectory(task, answer), None)
    except TimeoutError as error:
        return f"does not end within {timeout_s * 2:g} s on" if limit.expired() else f"raises {describe(error)!r} on"
    except Exception as error:  # whatever a verifier raises is the finding
        return f"raises {type(error).__name__} ({describe(error)}) on"
    if not math.isfinite(score.value):
        return f"gives the score {score.value} to"
    passed = score.passed if score.passed is not None else score.value >= 1.0
    if passed == right:
        return None
    return "passes" if passed else f"fails (score {score.value:g})"


def _trajectory(task: Task, answer: str) -> Trajectory:
    message: Message = {"role": "assistant", "content": answer}
    return Trajectory((Turn(0, [*task.messages(), message], Completion(message, "stop")),), answer)
