"""Small real pieces that several tests use: tasks, configs, a store in memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from rollout_engine.config import RunConfig
from rollout_engine.events import Event
from rollout_engine.hostplan import HostPlan
from rollout_engine.specs import Task
from rollout_engine.spending import Used
from rollout_engine.store.planfile import PlanEntry


def make_tasks(n: int, **fields: Any) -> Iterator[Task]:
    """Tasks t0, t1, ... whose right answer is their number."""
    for number in range(n):
        yield Task(
            task_id=f"t{number}",
            prompt=f"Say {number}.",
            verifier={"type": "match", "compare": "exact", "expected": str(number)},
            solution=str(number),
            **fields,
        )


def scripted(name: str = "m", **options: Any) -> dict[str, Any]:
    """A scripted model that always answers right, at once, unless told otherwise."""
    return {"name": name, "kind": "scripted", "options": {"skill": 1.0, **options}}


def make_config(*models: dict[str, Any], **fields: Any) -> RunConfig:
    """A run without sandbox and without Ray."""
    return RunConfig.model_validate({"models": list(models) or [scripted()], "sandbox": "none", "ray": "off", **fields})


def make_plan(config: RunConfig, host_id: str = "host-0") -> HostPlan:
    return HostPlan(run_id="run", epoch=1, host_id=host_id, node_id="node", config=config)


class MemoryStore:
    """A run directory that keeps everything in memory: plan, log, and nothing done before."""

    def __init__(self) -> None:
        self.batches: list[pa.RecordBatch] = []
        self.used = Used()
        self.done_before = 0
        self.dumps: list[str] = []
        self.events: list[Event] = []
        self.seal = None
        self._slots: dict[tuple[int, str], int] = {}

    @property
    def plan(self) -> MemoryStore:
        return self

    @property
    def done(self) -> MemoryStore:
        return self

    def append(self, round: int, task_id: str, digest: str, body: bytes) -> int:
        return self._slots.setdefault((round, task_id), len(self._slots))

    def find(self, round: int, task_id: str) -> int | None:
        return self._slots.get((round, task_id))

    def todo(self, keys: range) -> list[tuple[int, int]]:
        return [(key, 0) for key in keys]

    def unfinished(self) -> Iterator[list[PlanEntry]]:
        return iter(())

    def write(self, batches: list[pa.RecordBatch]) -> None:
        self.batches += batches

    def record(self, events: list[Event]) -> None:
        self.events += events

    def dump(self, text: str) -> str:
        self.dumps.append(text)
        return "memory"

    def idle(self) -> None:
        return None

    def rows(self) -> pa.Table:
        return pa.Table.from_batches(self.batches)
