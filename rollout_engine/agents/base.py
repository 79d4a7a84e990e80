"""The contract of an agent: what happens between a task and its final answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from rollout_engine.sandboxes.base import Sandbox
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


class Agent(Protocol):
    """A way to work on a task. One object serves all rollouts of a host, so it keeps no state of its own.

    A class (or factory) with `needs_sandbox = True` gets a sandbox also for tasks that declare nothing.
    """

    async def run(
        self, task: Task, model: AgentModel, sandbox: Sandbox | None, limits: AgentLimits, on_turn: OnTurn
    ) -> StopReason:
        """Works until the agent is done or meets a limit. The final answer is the last turn's text.

        Raises plain errors: a ModelError or SandboxError passes through and fails the rollout.
        """
        ...
