"""What must be true of a run's rows when it is over, however it was struck."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from rollout_engine.store.rundir import open_run
from tests.ray.rows import SAME

Key = tuple[Any, ...]
KEY = ("round", "task_id", "model", "attempt")
MORE = ("rollout_id", "retries", "failure_boundary", "failure_type", "retryable")


class Rows(NamedTuple):
    """What a run's tables say."""

    essence: dict[Key, Key]
    """Key -> what must be the same of all runs with these seeds, of rows that have a score."""
    failed: Counter[str]
    """`boundary:type` of the others."""
    retries: int
    """Tries that were thrown away."""
    written: int
    """Rows in the log, with those that another one superseded."""


def read(run_dir: Path) -> Rows:
    """Raises AssertionError where a row is doubled, or is neither scored nor failed at a boundary."""
    run = open_run(run_dir)
    table = run.rollouts([*dict.fromkeys((*SAME, *MORE))])
    rows = table.to_pylist()
    keys = Counter(tuple(row[name] for name in KEY) for row in rows)
    assert set(keys.values()) <= {1}, f"doubled: {[key for key, times in keys.items() if times > 1]}"
    failed: Counter[str] = Counter()
    essence: dict[Key, Key] = {}
    for row in rows:
        if row["score"] is None:
            assert row["failure_boundary"], f"neither scored nor failed at a boundary: {row}"
            failed[f"{row['failure_boundary']}:{row['failure_type']}"] += 1
        else:
            assert row["failure_boundary"] is None, f"scored and failed: {row}"
            essence[tuple(row[name] for name in KEY)] = tuple(row[name] for name in SAME)
    turns = Counter(run.turns_table()["rollout_id"].to_pylist())
    wrong = [row for row in rows if turns[row["rollout_id"]] != row["num_turns"]]
    assert not wrong, f"turns lost or doubled: {wrong[:3]}"
    written = sum(batch.num_rows for batch in run.scan(["key"]))
    return Rows(essence, failed, sum(row["retries"] for row in rows), written)


def same(rows: Rows, calm: Rows, planned: int) -> None:
    """Raises AssertionError where a row is missing, or differs from that of the undisturbed run."""
    assert len(rows.essence) + rows.failed.total() == planned, f"{planned} planned: {rows.essence.keys()}"
    different = [(row, calm.essence[key]) for key, row in rows.essence.items() if row != calm.essence[key]]
    assert not different, f"other results than of the undisturbed run: {different[:3]}"
