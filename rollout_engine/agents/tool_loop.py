"""The `tool_loop` agent: the model works in the task's sandbox by its native tool calls until it needs no more."""

from __future__ import annotations

import asyncio
import math

from rollout_engine.agents.base import AgentLimits, AgentModel, OnTurn
from rollout_engine.agents.tools.calls import Call, answer_to, calls_of, sendable
from rollout_engine.agents.tools.toolbox import Toolbox, open_toolbox
from rollout_engine.errors import InputError, SandboxUnavailable
from rollout_engine.sandboxes.base import Sandbox
from rollout_engine.specs import Task
from rollout_engine.types import Message, StopReason, Turn
from rollout_engine.waiting import awaiting

COMMAND_TIMEOUT_S = 120.0
MAX_CALLS = 64
"""Calls in one message that are run; the rest is answered with that."""


class ToolLoop:
    """Offers a `shell` and the task's own tools; the answer without calls is the final one."""

    needs_sandbox = True

    def __init__(self, command_timeout_s: float = COMMAND_TIMEOUT_S) -> None:
        """`command_timeout_s` bounds one tool call. Raises InputError."""
        if isinstance(command_timeout_s, bool) or not isinstance(command_timeout_s, int | float):
            raise InputError(f"{command_timeout_s!r} is no number", "agent_options.command_timeout_s", "give seconds")
        if not 0 < command_timeout_s < math.inf:
            raise InputError("must be greater than 0", "agent_options.command_timeout_s", "give seconds")
        self._timeout_s = float(command_timeout_s)

    async def run(
        self, task: Task, model: AgentModel, sandbox: Sandbox | None, limits: AgentLimits, on_turn: OnTurn
    ) -> StopReason:
        if sandbox is None:
            raise SandboxUnavailable("the tool_loop agent needs a sandbox and was given none")
        began = asyncio.get_running_loop().time()
        async with open_toolbox(
            task, sandbox, timeout_s=self._timeout_s, max_output_bytes=limits.max_output_bytes
        ) as tools:
            return await _Conversation(model, tools, limits, on_turn, began).run(task.messages())


class _Conversation:
    """The calls of one rollout, one after the other."""

    def __init__(self, model: AgentModel, tools: Toolbox, limits: AgentLimits, on_turn: OnTurn, began: float) -> None:
        self._model, self._tools, self._limits, self._on_turn = model, tools, limits, on_turn
        self._tools_began = began
        self._tokens = 0

    async def run(self, new: list[Message]) -> StopReason:
        said: list[Message] = []
        for index in range(self._limits.max_turns):
            env_s = asyncio.get_running_loop().time() - self._tools_began
            said += new
            completion = await self._model.complete(said, self._tools.specs)
            self._on_turn(Turn(index, [*new, completion.message], completion, env_s=env_s))
            self._tokens += completion.usage.completion_tokens
            calls = calls_of(completion.message, index)
            # Calls that were cut, or whose results no turn would hold, are not run: what is done is on the record.
            if completion.finish_reason == "length":
                return StopReason.MAX_TOKENS
            if not calls:
                return StopReason.FINISHED
            if self._tokens >= self._limits.max_tokens:
                return StopReason.MAX_TOKENS
            if index + 1 < self._limits.max_turns:
                said.append(sendable(completion.message, calls))
                new = await self._answers(calls)
        return StopReason.MAX_TURNS

    async def _answers(self, calls: list[Call]) -> list[Message]:
        self._tools_began = asyncio.get_running_loop().time()
        answers = [answer_to(call, await self._answer(call)) for call in calls[:MAX_CALLS]]
        late = f"[tool error] not run: one message may hold {MAX_CALLS} calls"
        return answers + [answer_to(call, late) for call in calls[MAX_CALLS:]]

    async def _answer(self, call: Call) -> str:
        with awaiting(f"tool {call.name}"):
            return await self._tools.answer(call)
