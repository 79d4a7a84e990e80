"""What a run directory says of a run that another process drives: read again and again, and cheaply."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pyarrow.compute as pc
import pyarrow.parquet as pq

from rollout_engine.commands.source import read_source
from rollout_engine.progress import Progress
from rollout_engine.store import EpochRecord, RunDir, open_run
from rollout_engine.store.files import MAKE_ANEW, reading

COUNTS = ("n_requested", "n_valid", "n_failed", "n_verifier_error", "n_cancelled", "n_pending")


class Seen(NamedTuple):
    """A run at one moment."""

    run: RunDir
    driver: EpochRecord | None
    progress: Progress


def look(path: Path, first: Progress | None, now: float) -> Seen:
    """Where a run stands, by its live tables: at most `store.live_tables_s` old. `now`: monotonic seconds.

    `first` is what was seen at the first look, from which the rate is counted. Raises InputError, RunError.
    """
    run = open_run(path, log=False)
    counts = _counts(run)
    done = counts["n_requested"] - counts["n_pending"]
    before = first.before if first is not None else done
    progress = Progress(
        total=_total(run, counts["n_requested"]),
        before=before,
        done=done - before,
        running=None,
        pending=counts["n_pending"],
        valid=counts["n_valid"],
        verifier_errors=counts["n_verifier_error"],
        cancelled=counts["n_cancelled"],
        started=first.started if first is not None else now,
        now=now,
    )
    if counts["n_failed"]:
        progress.failed["failed"] = counts["n_failed"]
    return Seen(run, run.driver(), progress)


def _counts(run: RunDir) -> dict[str, int]:
    """Of groups.parquet; all zero before it is written for the first time."""
    if not run.layout.groups.exists():
        return dict.fromkeys(COUNTS, 0)
    with reading(run.layout.groups, MAKE_ANEW):
        table = pq.read_table(run.layout.groups, columns=list(COUNTS), use_threads=False)
        return {name: int(pc.sum(table[name]).as_py() or 0) for name in COUNTS}


def _total(run: RunDir, planned: int) -> int | None:
    source = read_source(run.path)
    if source is None:
        return planned or None
    return max(source.count * run.space.per_slot, planned)
