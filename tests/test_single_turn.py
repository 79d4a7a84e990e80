"""The `single_turn` agent, and how agents are named."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from rollout_engine.agents import make_agent
from rollout_engine.agents.base import AgentLimits
from rollout_engine.agents.single_turn import SingleTurn
from rollout_engine.errors import InputError, ModelServerError
from rollout_engine.specs import Task
from rollout_engine.types import Completion, Message, StopReason, ToolSpec, Turn

LIMITS = AgentLimits(max_turns=1, max_tokens=100, max_output_bytes=100, agent_s=1.0)
TASK = Task(task_id="t", prompt="2+2?", system_prompt="Add.", verifier={"type": "match", "expected": 4})
ANSWER: Message = {"role": "assistant", "content": "4"}


class Model:
    """Answers always the same, and remembers what it was asked."""

    def __init__(self, finish_reason: str = "stop") -> None:
        self.completion = Completion(ANSWER, finish_reason)
        self.asked: list[list[Message]] = []

    async def complete(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> Completion:
        self.asked.append(list(messages))
        return self.completion


class Failing:
    async def complete(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> Completion:
        raise ModelServerError("503")


async def test_it_asks_once_and_records_the_turn() -> None:
    model, turns = Model(), list[Turn]()
    assert await make_agent("single_turn").run(TASK, model, None, LIMITS, turns.append) is StopReason.FINISHED
    asked = [{"role": "system", "content": "Add."}, {"role": "user", "content": "2+2?"}]
    assert model.asked == [asked]
    assert turns == [Turn(0, [*asked, ANSWER], model.completion)]


async def test_a_cut_answer_is_told_apart() -> None:
    turns = list[Turn]()
    assert await SingleTurn().run(TASK, Model("length"), None, LIMITS, turns.append) is StopReason.MAX_TOKENS
    assert len(turns) == 1


async def test_a_models_error_passes_through_without_a_turn() -> None:
    turns = list[Turn]()
    with pytest.raises(ModelServerError):
        await SingleTurn().run(TASK, Failing(), None, LIMITS, turns.append)
    assert turns == []


async def test_it_adds_microseconds() -> None:
    agent, model, turns = SingleTurn(), Model(), list[Turn]()
    best = 1.0
    for _ in range(200):
        start = time.thread_time()
        for _ in range(100):
            await agent.run(TASK, model, None, LIMITS, turns.append)
        best = min(best, (time.thread_time() - start) / 100)
    assert best < 10e-6


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("singleturn", {}, "did you mean 'single_turn'"),
        ("single_turn", {"depth": 3}, "'depth'"),
        ("no.such.module:Agent", {}, "cannot import"),
    ],
)
def test_unknown_agents_and_options(name: str, options: dict[str, int], said: str) -> None:
    with pytest.raises(InputError, match=said):
        make_agent(name, options)


def test_own_agents() -> None:
    assert isinstance(make_agent("rollout_engine.agents.single_turn:SingleTurn", {}), SingleTurn)
