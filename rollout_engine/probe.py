"""The dry run of a task: what its verifier says of the untouched sandbox, and of the task's own solution.

Both run as rollouts do, with agents that call no model: the same sandbox, the same isolation, the same limits.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace

from rollout_engine.agents.base import AgentLimits, AgentModel, OnTurn
from rollout_engine.config import RunConfig
from rollout_engine.errors import AgentError
from rollout_engine.hooks import tear_down
from rollout_engine.prepare import PreparedTask, prepare
from rollout_engine.resources import Resources
from rollout_engine.rollout import Rollout
from rollout_engine.sandboxes.base import Sandbox
from rollout_engine.specs import Task
from rollout_engine.types import Boundary, Completion, RolloutSpec, StopReason, Turn
from rollout_engine.verifiers.workshop import Workshop

log = logging.getLogger(__name__)

OUTPUT_CHARS = 500
"""A solution that fails shows this much of its output."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What came of one dry run: a score, or what was in its way."""

    score: float | None
    passed: bool | None
    boundary: str | None = None
    """Where it failed; `verifier` is the task's own fault, most others are the machine's."""
    message: str | None = None

    @property
    def is_verdict(self) -> bool:
        return self.score is not None and self.boundary is None


@dataclass(frozen=True, slots=True)
class Probe:
    """Both dry runs; `solved` None: the task gives no solution."""

    untouched: Finding
    solved: Finding | None


class Untouched:
    """An agent that does nothing and says nothing."""

    async def run(
        self, task: Task, model: AgentModel, sandbox: Sandbox | None, limits: AgentLimits, on_turn: OnTurn
    ) -> StopReason:
        return StopReason.FINISHED


class Oracle:
    """An agent that gives the task's own solution."""

    async def run(
        self, task: Task, model: AgentModel, sandbox: Sandbox | None, limits: AgentLimits, on_turn: OnTurn
    ) -> StopReason:
        answer = task.answer or "Done."
        if isinstance(task.solution, dict) and sandbox is not None:
            result = await sandbox.exec(["sh", "-c", task.solution["script"]])
            if not result.ok:
                output = (result.stdout + result.stderr)[-OUTPUT_CHARS:].decode(errors="replace")
                raise AgentError(f"the solution ended with {result.exit_code}: {output}")
        message = {"role": "assistant", "content": answer}
        on_turn(Turn(0, [*task.messages(), message], Completion(message, "stop")))
        return StopReason.FINISHED


async def probe(body: bytes, config: RunConfig, resources: Resources, workshop: Workshop | None = None) -> Probe:
    """Runs the verifier twice. Raises what `prepare` raises for a body that is no task."""
    prepared = prepare(body, config, workshop)
    if isinstance(prepared.task.solution, dict):
        prepared = replace(prepared, sandbox=prepared.base)
    try:
        untouched = await _finding(prepared, replace(resources, agent=Untouched()))
        if prepared.task.solution is None:
            return Probe(untouched, None)
        return Probe(untouched, await _finding(prepared, replace(resources, agent=Oracle())))
    finally:
        await tear_down([prepared.verifier], log.warning)


async def _finding(prepared: PreparedTask, resources: Resources) -> Finding:
    spec = RolloutSpec(0, 0, prepared.task.task_id, "", resources.config.models[0].name, 0, 0, 0, time.time())
    rollout = Rollout(spec, prepared, resources, _nothing)
    await rollout.run()
    record = rollout.record
    return Finding(
        record.score, record.passed, record.failure_boundary, _told(record.failure_type, record.failure_message)
    )


def _told(kind: str | None, message: str | None) -> str | None:
    return None if kind is None else f"{kind}: {message}"


def _nothing() -> None:
    return None


TASKS_OWN = frozenset({Boundary.VERIFIER.value, Boundary.SETUP.value, Boundary.AGENT.value, Boundary.TASK.value})
"""Failures that speak against the task; the others say only that it could not be checked."""
