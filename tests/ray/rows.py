"""What must be the same of two runs with the same seed, however they were disturbed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa

from rollout_engine import RolloutEngine
from rollout_engine.config import RunConfig
from rollout_engine.store.rundir import read_rollouts
from tests.helpers import make_tasks

SAME = ("round", "task_id", "model", "attempt", "status", "stop_reason", "score", "passed", "final_answer", "num_turns")


def essence(rollouts: pa.Table) -> list[tuple[Any, ...]]:
    """One tuple a row, in the order of their keys."""
    return sorted(zip(*(rollouts[name].to_pylist() for name in SAME), strict=True), key=lambda row: row[:4])


def essence_of(run_dir: Path) -> list[tuple[Any, ...]]:
    return essence(read_rollouts(run_dir))


async def undisturbed(config: RunConfig, tasks: int, **fields: Any) -> list[tuple[Any, ...]]:
    """The same run in-process, where nothing happens to it."""
    async with RolloutEngine(config=config, ray="off") as engine:
        await engine.finish(make_tasks(tasks, **fields))
        await engine.close()
        return essence(engine.tables().rollouts)
