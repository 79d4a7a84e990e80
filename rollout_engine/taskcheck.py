"""Tries each task's verifier on answers that no good verifier passes, and on the task's own solution.

A verifier that judges a sandbox is tried on an untouched one, which it must not pass, and on one in which the task's
solution was run.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterable, AsyncIterator, Iterable
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from rollout_engine.errors import InputError, SetupError, describe
from rollout_engine.sandboxes import sandbox_spec, task_recipe
from rollout_engine.sandboxes.base import EVERYTHING, SandboxProvider, SandboxSpec
from rollout_engine.specs import Task
from rollout_engine.types import Completion, Isolation, Message, Score, Trajectory, Turn
from rollout_engine.verifiers import make_verifier
from rollout_engine.verifiers.base import Verifier, takes_sandbox
from rollout_engine.verifiers.workshop import Workshop

Severity: TypeAlias = Literal["error", "note"]

LONG_ANSWER_CHARS = 1_000_000
_LONG = ("so we carry the 17 over, and then\n" * (LONG_ANSWER_CHARS // 34 + 1))[:LONG_ANSWER_CHARS]
_GARBAGE = "\x00\x1b[31m ]}>'\"\\ %s ${x} <|im_end|> \U0001f600 \ufffd\u202e null NaN -0 1e999 (((((((("

UNTOUCHED = "the untouched sandbox"
SETUP_S = 600.0
"""Of one setup command, and of the solution's script."""
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
    provider: SandboxProvider | None = None,
) -> list[Finding]:
    """The findings about all tasks, in their order. See `find_problems`."""
    return [finding async for finding in find_problems(tasks, timeout_s=timeout_s, provider=provider)]


async def find_problems(
    tasks: Iterable[Task] | AsyncIterable[Task],
    *,
    timeout_s: float = 10.0,
    provider: SandboxProvider | None = None,
) -> AsyncIterator[Finding]:
    """Verifiers that raise, hang, pass an empty, a very long or a garbage answer, or fail their own solution.

    `timeout_s` bounds one verdict. `provider` stays the caller's; without one, verifiers that need a sandbox are not
    tried, and a note says so.
    """
    trial = _Trial(provider, Workshop(provider), timeout_s)
    try:
        if isinstance(tasks, AsyncIterable):
            async for task in tasks:
                for finding in await _check(task, trial):
                    yield finding
        else:
            for task in tasks:
                for finding in await _check(task, trial):
                    yield finding
    finally:
        await trial.workshop.close()


async def _check(task: Task, trial: _Trial) -> list[Finding]:
    try:
        verifier = make_verifier(task.verifier or {}, timeout_s=trial.timeout_s, workshop=trial.workshop)
    except InputError as error:
        return [Finding(task.task_id, f"the verifier cannot be made: {error}")]
    if takes_sandbox(verifier) and trial.provider is None:
        return [Finding(task.task_id, "the verifier needs a sandbox and was not tried", "note")]
    findings = []
    for name, answer, right in _tries(task, in_sandbox=takes_sandbox(verifier)):
        what = await _try(task, verifier, answer, right, trial)
        if what is not None:
            findings.append(Finding(task.task_id, f"{what} {name}"))
    return findings


def _tries(task: Task, *, in_sandbox: bool) -> list[tuple[str, str, bool]]:
    """What is tried: its name, the final answer, and whether it is right."""
    bad = {UNTOUCHED: ""} if in_sandbox else BAD_ANSWERS
    tries = [(name, answer, False) for name, answer in bad.items()]
    if task.answer is not None or (task.script is not None and in_sandbox):
        tries.append(("the task's own solution", task.answer or "", True))
    return tries


@dataclass(frozen=True, slots=True)
class _Trial:
    provider: SandboxProvider | None
    workshop: Workshop
    timeout_s: float

    async def verdict(self, task: Task, verifier: Verifier, answer: str, *, solved: bool) -> Score:
        if self.provider is None or not takes_sandbox(verifier):
            return await verifier.verify(task, _trajectory(task, answer), None)
        spec = await self.provider.prepare(sandbox_spec(task), task_recipe(task, SETUP_S))
        layer = None
        if solved and task.script is not None:
            layer = await self._solve(self.provider, task, verifier, spec)
            spec = replace(spec, layers=(*spec.layers, layer))
        try:
            sandbox = await self.provider.open(spec)
            try:
                return await verifier.verify(task, _trajectory(task, answer), sandbox)
            finally:
                await sandbox.close()
        finally:
            if layer is not None:
                await self.provider.release(layer)

    async def _solve(self, provider: SandboxProvider, task: Task, verifier: Verifier, spec: SandboxSpec) -> str:
        """What the solution's script leaves, as the verifier will see it."""
        sandbox = await provider.open(spec)
        try:
            result = await sandbox.exec(["sh", "-c", task.script or ""], timeout_s=SETUP_S)
            if not result.ok:
                output = (result.stdout + result.stderr)[-500:].decode(errors="replace")
                raise SetupError(f"the solution exited with {result.exit_code}: {output}")
            declared = list(task.workspace) or [spec.workdir]
            return await sandbox.export(declared if verifier.isolation is Isolation.FRESH else [EVERYTHING])
        finally:
            await sandbox.close()


async def _try(task: Task, verifier: Verifier, answer: str, right: bool, trial: _Trial) -> str | None:
    """What the verifier does wrong about an answer, as a verb; None where it does right."""
    # Its own limit comes first, unless it keeps none.
    limit_s = trial.timeout_s * 2 + (2 * SETUP_S if takes_sandbox(verifier) else 0)
    limit = asyncio.timeout(limit_s)
    try:
        async with limit:
            score = await trial.verdict(task, verifier, answer, solved=right)
    except TimeoutError as error:
        return f"does not end within {limit_s:g} s on" if limit.expired() else f"raises {describe(error)!r} on"
    except SetupError as error:
        return f"cannot be tried ({describe(error)}) on"
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
