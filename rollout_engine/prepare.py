"""From a task's body and the run's config to what all rollouts of the task share on a host."""

from __future__ import annotations

from dataclasses import dataclass

from rollout_engine.agents.base import AgentLimits
from rollout_engine.config import RunConfig
from rollout_engine.sandboxes import sandbox_spec, task_recipe
from rollout_engine.sandboxes.base import Recipe, SandboxProvider, SandboxSpec
from rollout_engine.specs import Task
from rollout_engine.taskplace import needs_sandbox
from rollout_engine.verifiers import make_verifier
from rollout_engine.verifiers.base import Verifier
from rollout_engine.verifiers.workshop import Workshop
from rollout_engine.waiting import Cell


@dataclass(frozen=True, slots=True)
class PreparedTask:
    """A task with what every rollout of it shares on a host."""

    task: Task
    verifier: Verifier
    sandbox: SandboxSpec | None
    """The agent's; None: nothing of the task happens in a sandbox."""
    base: SandboxSpec
    """What a sandbox of this task is made from, the verifier's own among them."""
    recipe: Recipe
    """The task's files and setup commands."""
    limits: AgentLimits
    start_s: float
    verify_s: float
    deadline_s: float

    async def ready(self, spec: SandboxSpec, provider: SandboxProvider, at: Cell) -> SandboxSpec:
        """A spec that holds the task's files, and what its setup made of them: once per task and node."""
        if not self.recipe.files and not self.recipe.commands:
            return spec
        phase = at.phase
        at.enter("setup", "the prepared sandbox of its task")
        ready = await provider.prepare(spec, self.recipe)
        at.enter(phase, "a sandbox")
        return ready


def prepare(body: bytes, config: RunConfig, workshop: Workshop | None = None) -> PreparedTask:
    """Raises pydantic's ValidationError or InputError where the body does not fit this version."""
    task = Task.model_validate_json(body)
    run = config.limits
    own = task.limits
    limits = AgentLimits(
        max_turns=own.max_turns or run.max_turns,
        max_tokens=own.max_tokens or run.max_tokens,
        max_output_bytes=own.max_output_bytes or run.max_output_bytes,
        agent_s=own.agent_s or run.agent_s,
    )
    start_s, verify_s = own.start_s or run.start_s, own.verify_s or run.verify_s
    base = sandbox_spec(task, task.environment, task.task_id)
    return PreparedTask(
        task=task,
        verifier=make_verifier(task.verifier or {}, timeout_s=verify_s, workshop=workshop),
        sandbox=base if needs_sandbox(task, config) else None,
        base=base,
        recipe=task_recipe(task, start_s),
        limits=limits,
        start_s=start_s,
        verify_s=verify_s,
        deadline_s=run.deadline_of(own),
    )
