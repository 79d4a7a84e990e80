"""Makes a run directory of which most rollouts are done, by the store's own writer: no rollout is run for it.

    python -m benchmarks.finished_run FOLDER -n 1000000 [--killed]

The rows are those of a small real run, under other keys: `--rows` of them a commit, in the order in which `IN_FLIGHT`
rollouts at once end, planned as far ahead as a driver plans, with live tables as they fall due. FOLDER gets tasks.jsonl
and run/. Without --killed the driver was interrupted and has left its tables; with it, it ends by SIGKILL as soon as
the last row is synced, in the middle of the next batch.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa

from benchmarks.noop_case import tasks
from rollout_engine.commands.source import source_of
from rollout_engine.config import ModelSpec, RunConfig
from rollout_engine.engine import RolloutEngine
from rollout_engine.runstore import RunStore, open_store
from rollout_engine.schema import LOG
from rollout_engine.specs import Task, body_digest, task_body
from rollout_engine.store import open_run
from rollout_engine.store.files import sync_file

IN_FLIGHT = 4000
SAMPLE_TASKS = 64
ROW_US = 200
"""Between two ends of rollouts."""
_BEGAN = 1_750_000_000_000_000


def config_of(k: int) -> RunConfig:
    model = ModelSpec(name="noop", kind="scripted", options={"skill": 0.5})
    return RunConfig(models=(model,), k=k, sandbox="none", ray="off")


def write_tasks(path: Path, count: int) -> None:
    with path.open("wb") as file:
        for task in tasks(count, "task"):
            file.write(task_body(task) + b"\n")


def sample(folder: Path, config: RunConfig) -> pa.RecordBatch:
    """What a real run commits, in the schema of the log."""

    async def run() -> None:
        async with RolloutEngine(config=config, run_dir=folder) as engine:
            await engine.finish(tasks(SAMPLE_TASKS, "task"))

    asyncio.run(run())
    return pa.concat_batches(list(open_run(folder).scan(LOG.names)))


class Rows:
    """Rows of the log under keys of one's own."""

    def __init__(self, like: pa.RecordBatch, ids: list[str], k: int) -> None:
        self._like, self._ids, self._k = like, pa.array(ids), k
        self._made = 0

    def batch(self, keys: np.ndarray) -> pa.RecordBatch:
        """The next rows that end, one for each key."""
        ends = _BEGAN + (self._made + np.arange(len(keys))) * ROW_US
        started = ends - IN_FLIGHT * ROW_US
        rows = self._like.take(pa.array((self._made + np.arange(len(keys))) % len(self._like)))
        self._made += len(keys)
        columns = dict(zip(LOG.names, rows.columns, strict=True))
        columns |= {
            "key": pa.array(keys),
            "task_id": self._ids.take(pa.array(keys // self._k)),
            "attempt": pa.array(keys % self._k, pa.int32()),
            **{name: pa.array(each).cast(LOG.field(name).type) for name, each in _times(started, ends)},
        }
        return pa.RecordBatch.from_arrays([columns[name] for name in LOG.names], schema=LOG)


def _times(started: np.ndarray, ended: np.ndarray) -> list[tuple[str, np.ndarray]]:
    return [("queued_at", started - 1000), ("started_at", started), ("ended_at", ended)]


def in_order_of_ending(n: int) -> np.ndarray:
    """All keys: each may be overtaken by those that run beside it."""
    return np.argsort(np.arange(n) + np.random.default_rng(1).uniform(0, IN_FLIGHT, n), kind="stable")


def fill(store: RunStore, rows: Rows, asked: Iterator[Task], keys: np.ndarray, per_commit: int, ahead: int) -> None:
    """Plans and commits as a driver does."""
    planned, per_slot = 0, store.space.per_slot
    for start in range(0, len(keys), per_commit):
        mine = keys[start : start + per_commit]
        wanted = (start + IN_FLIGHT + ahead) // per_slot
        for task in islice(asked, max(wanted - planned, 0)):
            body = task_body(task)
            planned = store.plan.append(0, task.task_id, body_digest(body), body) + 1
        store.write([rows.batch(mine)])
        store.idle()


def tear(run_dir: Path) -> None:
    """Cuts the last batch of the log in two, as a kill in the middle of a write does."""
    last = max((run_dir / "log").glob("*.arrows"), key=lambda path: path.stat().st_mtime_ns)
    os.truncate(last, last.stat().st_size - 100)


def build(folder: Path, n: int, k: int, share: float, per_commit: int, killed: bool) -> None:
    """Ends this process by SIGKILL where `killed`."""
    config, file, run_dir = config_of(k), folder / "tasks.jsonl", folder / "run"
    write_tasks(file, n // k)
    like = sample(folder / "sample", config)
    source, _ = source_of(file, config, None, None)
    keys = in_order_of_ending(n)[: int(n * share)]
    store = open_store(run_dir, config, resume=False, retry_failed=False)
    source.write(run_dir)
    os.fdatasync = lambda handle: None  # a sync for each commit is what takes long; all is synced at the end
    ids = [task.task_id for task in tasks(n // k, "task")]
    rows = Rows(like, ids, k)
    fill(store, rows, tasks(n // k, "task"), keys, per_commit, config.plan_ahead)
    if not killed:
        store.close("interrupted")
        return
    store.write([rows.batch(keys[-per_commit:])])
    tear(run_dir)
    for segment in (run_dir / "log").glob("*.arrows"):
        sync_file(segment)
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("-n", type=int, default=1_000_000, help="rollouts of the run")
    parser.add_argument("-k", type=int, default=10, help="attempts of a task")
    parser.add_argument("--share", type=float, default=0.9, help="what part of them is done")
    parser.add_argument("--rows", type=int, default=256, help="rows of a commit")
    parser.add_argument("--killed", action="store_true")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    build(args.folder, args.n, args.k, args.share, args.rows, args.killed)
    print(f"made in {time.perf_counter() - began:.1f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
