"""An agent and a verifier that end as their task says: `metadata.agent` and `metadata.verifier`."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from rollout_engine.agents.base import AgentLimits, AgentModel, OnTurn
from rollout_engine.agents.single_turn import SingleTurn
from rollout_engine.sandboxes.base import Sandbox
from rollout_engine.specs import Task
from rollout_engine.types import Isolation, Score, StopReason, Trajectory

BLOCK_S = 100.0
"""The longest that an agent blocks its host's event loop."""


def end(how: str | None) -> None:
    if how == "SystemExit":
        raise SystemExit(3)
    if how == "KeyboardInterrupt":
        raise KeyboardInterrupt
    if how == "os._exit":
        os._exit(7)
    if how is not None and how.startswith("block:"):  # until that file is there
        ends = time.monotonic() + BLOCK_S
        while not os.path.exists(how.removeprefix("block:")) and time.monotonic() < ends:
            time.sleep(0.02)


class Agent(SingleTurn):
    async def run(
        self, task: Task, model: AgentModel, sandbox: Sandbox | None, limits: AgentLimits, on_turn: OnTurn
    ) -> StopReason:
        end(task.metadata.get("agent"))
        return await super().run(task, model, sandbox, limits, on_turn)


class Verifier:
    isolation = Isolation.PURE

    def __init__(self, spec: Mapping[str, Any], *, timeout_s: float) -> None:
        pass

    async def verify(self, task: Task, trajectory: Trajectory, sandbox: Sandbox | None) -> Score:
        end(task.metadata.get("verifier"))
        return Score(float(trajectory.final_answer == task.solution))
