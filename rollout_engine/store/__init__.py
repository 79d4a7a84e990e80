"""A run on disk: an append-only plan and log that survive any kill, and the Parquet tables made from them."""

from rollout_engine.store.compact import Compaction
from rollout_engine.store.create import create_run, is_run
from rollout_engine.store.epochs import Epoch, EpochRecord
from rollout_engine.store.files import write_table
from rollout_engine.store.ledger import Dense, Ledger
from rollout_engine.store.mirrors import local_root, named
from rollout_engine.store.planfile import PlanEntry
from rollout_engine.store.planlog import PlanLog
from rollout_engine.store.rundir import RunDir, RunWriter, open_run, read_rollouts, read_turns
from rollout_engine.store.runinfo import RunInfo, RunStatus, differences
from rollout_engine.store.traces import TraceRef, TraceWriter, read_trace, sees_run

__all__ = [
    "Compaction",
    "Dense",
    "Epoch",
    "EpochRecord",
    "Ledger",
    "PlanEntry",
    "PlanLog",
    "RunDir",
    "RunInfo",
    "RunStatus",
    "RunWriter",
    "TraceRef",
    "TraceWriter",
    "create_run",
    "differences",
    "is_run",
    "local_root",
    "named",
    "open_run",
    "read_rollouts",
    "read_trace",
    "read_turns",
    "sees_run",
    "write_table",
]
