"""What a user gets back: records, groups as they finish, and the tables of a whole run."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from rollout_engine.config import RunConfig
from rollout_engine.schema import batch_to_records
from rollout_engine.stream import Stream
from rollout_engine.summaries import Summary
from rollout_engine.types import RolloutRecord

SLICE_ROWS = 32
"""Rows made into Python objects at once, so that the consumer's loop is never held up for long."""


@dataclass(frozen=True, slots=True)
class Group:
    """The k rollouts of one round x task x model, in the order of their attempts."""

    round: int
    task_id: str
    model: str
    rollouts: tuple[RolloutRecord, ...]

    @property
    def scores(self) -> list[float | None]:
        """One per attempt; None where there is no score (never 0.0)."""
        return [record.score for record in self.rollouts]

    @property
    def valid(self) -> list[float]:
        return [record.score for record in self.rollouts if record.score is not None]

    @property
    def mean_score(self) -> float | None:
        return sum(self.valid) / len(self.valid) if self.valid else None

    @property
    def learnability(self) -> float | None:
        """The unbiased variance of the valid scores; None below two of them."""
        return sample_variance(self.valid)


def sample_variance(scores: list[float]) -> float | None:
    """sum((x - mean)²) / (n - 1); None where n < 2."""
    if len(scores) < 2:
        return None
    mean = sum(scores) / len(scores)
    return sum((score - mean) ** 2 for score in scores) / (len(scores) - 1)


@dataclass(frozen=True, slots=True)
class Run:
    """The tables of a run; see docs/schema.md for their columns."""

    rollouts: pa.Table
    turns: pa.Table
    groups: pa.Table
    rewards: pa.Table
    summary: Summary
    run_id: str
    run_dir: Path
    """Gone by now where the run had only a temporary folder."""


async def record_stream(stream: Stream[pa.RecordBatch]) -> AsyncIterator[RolloutRecord]:
    """Records out of committed batches."""
    async for batch in stream:
        for start in range(0, batch.num_rows, SLICE_ROWS):
            for record in batch_to_records(batch.slice(start, SLICE_ROWS)):
                yield record


async def group_stream(stream: Stream[pa.RecordBatch], config: RunConfig) -> AsyncIterator[Group]:
    """Groups as soon as all their attempts have a row."""
    open_groups: dict[int, list[RolloutRecord]] = {}
    async for record in record_stream(stream):
        number = record.key // config.k
        members = open_groups.setdefault(number, [])
        members.append(record)
        if len(members) == config.k:
            del open_groups[number]
            members.sort(key=lambda member: member.attempt)
            yield Group(record.round, record.task_id, record.model, tuple(members))
