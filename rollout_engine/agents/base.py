"""The contract of an agent: what happens between a task and its final answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias, cast

from rollout_engine.sandboxes.base import Sandbox, SandboxSpec
from rollout_engine.specs import Task
from rollout_engine.types import Completion, Message, StopReason, ToolSpec, Turn

OnTurn: TypeAlias = Callable[[Turn], None]
"""Records a turn of the trajectory as soon as it is known, so that a cut agent keeps its prefix."""


@dataclass(frozen=True, slots=True)
class AgentLimits:
    """What an agent may use. The rollout enforces `agent_s` itself; the rest is the agent's to keep."""

    max_turns: int
    max_tokens: int
    max_output_bytes: int
    agent_s: float


class AgentModel(Protocol):
    """The model as an agent sees it: bound to its rollout, within budgets, counted."""

    async def complete(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> Completion:
        """One call. Raises ModelError (let it pass: the rollout classifies it) and LimitReached."""
        ...


@dataclass(slots=True)
class AgentReport:
    """What an agent leaves beside its turns. It counts whatever ended the agent: fill it in as you go."""

    final_answer: str | None = None
    """None: the text of the agent's last turn."""
    exit_code: int | None = None
    """Of an agent that is a program; None: it did not end by itself."""
    evidence: str | None = None
    """JSON of what shows how the program fared: its output, logs and counts, bounded by the agent."""


class Agent(Protocol):
    """A way to work on a task. One object serves all rollouts of a host, so it keeps no state of its own.

    A class (or factory) with `needs_sandbox = True` gets a sandbox also for tasks that declare nothing. One with a
    method `async equip(spec) -> SandboxSpec` says what its own sandboxes hold beyond the task's.
    """

    async def run(
        self, task: Task, model: AgentModel, sandbox: Sandbox | None, limits: AgentLimits, on_turn: OnTurn
    ) -> StopReason:
        """Works until the agent is done or meets a limit. The final answer is the last turn's text.

        Raises plain errors: a ModelError or SandboxError passes through and fails the rollout.
        """
        ...


async def equipped(agent: Agent, spec: SandboxSpec) -> SandboxSpec:
    """The spec of the agent's own sandbox: the task's, with what the agent brings along."""
    equip = getattr(agent, "equip", None)
    return cast("SandboxSpec", await equip(spec)) if equip is not None else spec
