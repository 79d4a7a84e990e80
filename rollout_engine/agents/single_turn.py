"""The `single_turn` agent: one model call, whose text is the final answer."""

from __future__ import annotations

from rollout_engine.agents.base import AgentLimits, AgentModel, OnTurn
from rollout_engine.sandboxes.base import Sandbox
from rollout_engine.specs import Task
from rollout_engine.types import StopReason, Turn


class SingleTurn:
    """Asks once. An answer that was cut at its token limit makes the rollout `truncated`."""

    async def run(
        self, task: Task, model: AgentModel, sandbox: Sandbox | None, limits: AgentLimits, on_turn: OnTurn
    ) -> StopReason:
        messages = task.messages()
        completion = await model.complete(messages)
        on_turn(Turn(0, [*messages, completion.message], completion))
        return StopReason.MAX_TOKENS if completion.finish_reason == "length" else StopReason.FINISHED
