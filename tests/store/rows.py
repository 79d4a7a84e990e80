"""Rows, configs and runs that the store's tests are made of."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from rollout_engine.config import RunConfig
from rollout_engine.schema import LOG, records_to_batch
from rollout_engine.store import RunDir, RunWriter, create_run
from rollout_engine.types import Completion, KeySpace, RolloutRecord, Turn, Usage

SPACE = KeySpace(m=2, k=3)
MODELS = ("strong", "weak")
BODY = b'{"prompt":"say 1","verifier":{"type":"match"}}'


def make_config(**fields: Any) -> RunConfig:
    models = [{"name": name, "kind": "scripted"} for name in MODELS]
    return RunConfig.model_validate({"models": models, "k": SPACE.k, **fields})


def make_run(path: Path, **fields: Any) -> RunDir:
    return create_run(path / "run", make_config(**fields))


def turn(index: int, text: str = "hello", tokens: int = 2) -> Turn:
    completion = Completion(
        message={"role": "assistant", "content": text},
        finish_reason="stop",
        usage=Usage(10, tokens),
        completion_token_ids=list(range(tokens)),
        model_s=0.5,
    )
    return Turn(index, [{"role": "user", "content": "q"}, completion.message], completion)


def record(key: int, *, score: float | None = 1.0, status: str = "completed", **fields: Any) -> RolloutRecord:
    """The row of a key of SPACE; the task of slot s is `task/s`."""
    slot = SPACE.slot(key)
    made = RolloutRecord(
        key=key,
        round=0,
        task_id=f"task/{slot}",
        model=MODELS[SPACE.model(key)],
        attempt=SPACE.attempt(key),
        status=status,
        score=score,
        passed=None if score is None else score >= 1,
        prompt_tokens=10,
        completion_tokens=2,
        cost_usd=0.25,
        queued_at=1.5,
        started_at=2.0,
        ended_at=3.0,
        turns=[turn(0)],
    )
    made.num_turns = 1
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def failed(key: int, generation: int = 0, **fields: Any) -> RolloutRecord:
    return record(
        key,
        score=None,
        status="failed",
        generation=generation,
        failure_boundary="model",
        turns=[],
        num_turns=0,
        **fields,
    )


def batch(records: Iterable[RolloutRecord]) -> pa.RecordBatch:
    return records_to_batch(list(records))


def many(keys: Sequence[int] | np.ndarray[Any, Any], like: RolloutRecord) -> pa.RecordBatch:
    """Copies of one row under other keys, made fast."""
    keys = np.asarray(keys, np.int64)
    rows = records_to_batch([like]).take(pa.array(np.zeros(len(keys), np.int64)))
    columns = rows.columns
    columns[LOG.get_field_index("key")] = pa.array(keys)
    columns[LOG.get_field_index("attempt")] = pa.array((keys % SPACE.k).astype(np.int32))
    columns[LOG.get_field_index("model")] = pa.array(np.array(MODELS)[keys // SPACE.k % SPACE.m])
    columns[LOG.get_field_index("task_id")] = pa.array([f"task/{slot}" for slot in keys // SPACE.per_slot])
    return pa.RecordBatch.from_arrays(columns, schema=LOG)


def plan(writer: RunWriter, slots: int) -> None:
    """Plans `task/0`, `task/1`, ... up to this number of slots."""
    for slot in range(len(writer.plan), slots):
        assert writer.plan.append(0, f"task/{slot}", "d" * 32, BODY) == slot


def abandon(run: RunDir, epoch: int) -> None:
    """Makes an epoch look like that of a driver on another machine that died long ago."""
    path = run.layout.epoch_file(epoch)
    path.write_text(json.dumps({**json.loads(path.read_text()), "machine": "elsewhere", "heartbeat": 0.0}))
    os.utime(path, (0, 0))


def rows_of(run: RunDir, *columns: str) -> list[tuple[Any, ...]]:
    """These columns of every committed row, in the order of the log."""
    return [tuple(row.values()) for found in run.scan(columns) for row in found.to_pylist()]
