"""Ends a run whose driver is gone: every planned rollout that has no row gets one that says it was cancelled."""

from __future__ import annotations

import time
from pathlib import Path

from rollout_engine.plan import Planner
from rollout_engine.runstore import RunStore, open_store
from rollout_engine.schema import records_to_batch
from rollout_engine.specs import Task
from rollout_engine.store import RunDir
from rollout_engine.types import RolloutRecord, new_record

ROWS_AT_ONCE = 1024


def cancel_abandoned(run: RunDir) -> int:
    """Takes the run over, writes the missing rows and the tables, and lets it go. Returns how many rows it wrote.

    Whoever drove it finds out that it was superseded. Raises InputError where a driver is at work after all, RunError.
    """
    store = open_store(run.path, run.info.config, resume=True, retry_failed=False)
    try:
        written = _write_missing(store, run)
    except BaseException:
        store.abandon()
        raise
    store.close("interrupted")
    return written


def _write_missing(store: RunStore, run: RunDir) -> int:
    planner: Planner[Path] = Planner(run.space, run.info.config.model_names, store.plan, store.done)
    written, waiting = 0, list[RolloutRecord]()
    for entry in list(store.plan.entries()):
        _, groups = planner.add(Task.model_validate_json(entry.body), entry.round, run.path)
        for one in (one for group in groups for one in group):
            record = new_record(planner.spec(one), time.time())
            record.cancel()
            waiting.append(record)
            planner.committed(one.key)
        if len(waiting) >= ROWS_AT_ONCE:
            written += _write(store, waiting)
    return written + _write(store, waiting)


def _write(store: RunStore, waiting: list[RolloutRecord]) -> int:
    count = len(waiting)
    if waiting:
        store.write([records_to_batch(waiting)])
        waiting.clear()
        store.idle()
    return count
