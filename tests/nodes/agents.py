"""Agents that hold their host up, or wait until a file is there."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

from rollout_engine.agents.base import AgentLimits, AgentModel, OnTurn
from rollout_engine.agents.single_turn import SingleTurn
from rollout_engine.sandboxes.base import Sandbox
from rollout_engine.specs import Task
from rollout_engine.types import StopReason

BLOCK_S = 100.0
POLL_S = 0.05
PACE_S = 0.3


def attempt(on_turn: OnTurn) -> int:
    """Which attempt it is that an agent runs: agents are not told."""
    number: int = on_turn.__self__.record.attempt  # type: ignore[attr-defined]
    return number


class BlocksOnce(SingleTurn):
    """The first rollout of all blocks its host's event loop; the marker says where."""

    def __init__(self, marker: str) -> None:
        self._marker = Path(marker)

    async def run(
        self, task: Task, model: AgentModel, sandbox: Sandbox | None, limits: AgentLimits, on_turn: OnTurn
    ) -> StopReason:
        if "RAY_JOB_ID" in os.environ and not self._marker.exists():
            import ray

            text = f"{os.getpid()} {ray.get_runtime_context().get_node_id()}"
            draft = self._marker.with_name(f"{self._marker.name}-{os.getpid()}")
            draft.write_text(text)
            try:
                os.link(draft, self._marker)
            except FileExistsError:
                pass
            else:
                time.sleep(BLOCK_S)  # noqa: ASYNC251
        return await super().run(task, model, sandbox, limits, on_turn)


class Waits(SingleTurn):
    """Says that it runs, and goes on once the gate is there; off Ray at once."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    async def run(
        self, task: Task, model: AgentModel, sandbox: Sandbox | None, limits: AgentLimits, on_turn: OnTurn
    ) -> StopReason:
        if self._folder.exists():
            (self._folder / f"{task.task_id}-{attempt(on_turn)}-{os.getpid()}").touch()
            while not (self._folder / "gate").exists():
                await asyncio.sleep(POLL_S)
        return await super().run(task, model, sandbox, limits, on_turn)


class Paces(SingleTurn):
    """Takes PACE_S until the gate is there, and no time from then on."""

    def __init__(self, folder: str) -> None:
        self._gate = Path(folder) / "gate"

    async def run(
        self, task: Task, model: AgentModel, sandbox: Sandbox | None, limits: AgentLimits, on_turn: OnTurn
    ) -> StopReason:
        if not self._gate.exists():
            await asyncio.sleep(PACE_S)
        return await super().run(task, model, sandbox, limits, on_turn)


class Trails(SingleTurn):
    """Leaves a line for each rollout that it runs, where ROLLOUT_TEST_TRAIL says: what no row tells."""

    async def run(
        self, task: Task, model: AgentModel, sandbox: Sandbox | None, limits: AgentLimits, on_turn: OnTurn
    ) -> StopReason:
        folder = os.environ.get("ROLLOUT_TEST_TRAIL")
        if folder is not None:
            import ray

            line = f"{time.time()} {ray.get_runtime_context().get_node_id()} {task.task_id}/{attempt(on_turn)}\n"
            with (Path(folder) / f"trail-{os.getpid()}").open("a") as file:
                file.write(line)
        return await super().run(task, model, sandbox, limits, on_turn)
