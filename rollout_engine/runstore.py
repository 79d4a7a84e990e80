"""The run directory as the driver uses it: plan, commits, what was done before, and live tables."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rollout_engine.config import RunConfig
from rollout_engine.errors import describe
from rollout_engine.events import Event, to_lines
from rollout_engine.machine import give_back_memory
from rollout_engine.results import Run
from rollout_engine.rewards import GROUPS, REWARDS, groups_table, rewards_table, summary
from rollout_engine.scores import SCORED, Kind, Scores, scores_from_rollouts
from rollout_engine.store import Ledger, PlanLog, RunDir, RunStatus, RunWriter, create_run, is_run, open_run
from rollout_engine.store.files import sync_directory, sync_file, writing
from rollout_engine.store.mirrors import detach, named, publish
from rollout_engine.store.outside import Outside
from rollout_engine.store.planfile import PlanEntry
from rollout_engine.store.recall import Recall
from rollout_engine.types import KeySpace

log = logging.getLogger(__name__)

CHUNK_SLOTS = 1024
"""Slots whose rewards are computed at once: bounds the memory of a live table."""
TRIM_S = 2.0
"""How often freed memory is given back to the system."""
LIVE_SHARE = 0.05
"""Live tables may take this part of the committer's time."""
_AGAIN = frozenset({Kind.FAILED, Kind.CANCELLED, Kind.VERIFIER_ERROR})

TableChunks: TypeAlias = Iterator[Scores]


class SlotNames:
    """Round and task id of every slot, kept in Arrow memory: some 20 bytes a slot."""

    def __init__(self, plan: PlanLog) -> None:
        self._plan = plan
        self._ids: list[pa.Array] = []
        self._rounds: list[pa.Array] = []
        self._known = 0

    def arrays(self) -> tuple[pa.ChunkedArray, pa.ChunkedArray]:
        """(task ids, rounds) of all slots planned so far."""
        stop = len(self._plan)
        for start in range(self._known, stop, CHUNK_SLOTS):
            entries = list(self._plan.entries(start, min(start + CHUNK_SLOTS, stop)))
            self._ids.append(pa.array([entry.task_id for entry in entries], pa.string()))
            self._rounds.append(pa.array([entry.round for entry in entries], pa.int32()))
        self._known = stop
        return pa.chunked_array(self._ids, pa.string()), pa.chunked_array(self._rounds, pa.int32())


def score_chunks(ledger: Ledger, names: SlotNames, config: RunConfig) -> TableChunks:
    """The scores of all slots, CHUNK_SLOTS at a time."""
    ids, rounds = names.arrays()
    for start in range(0, len(ids), CHUNK_SLOTS):
        stop = min(start + CHUNK_SLOTS, len(ids))
        dense = ledger.dense(stop, start)
        yield Scores(
            models=config.model_names,
            k=config.k,
            task_ids=pa.concat_arrays(ids.slice(start, stop - start).chunks),
            rounds=rounds.slice(start, stop - start).to_numpy().astype(np.int32),
            values=dense.values,
            passed=dense.passed.astype(np.bool_),
            kinds=dense.kinds,
        )


class RunStore:
    """One epoch of a run. `write` and `idle` belong to the committer's thread."""

    def __init__(self, run: RunDir, retry_failed: bool = False, missing: Sequence[Path] | None = None) -> None:
        """`missing`: for a new run, the directories that were made for it, innermost first."""
        self._run = run
        self._missing = missing
        self._status_before = run.info.status
        self._writer: RunWriter = run.start()
        self._again = _AGAIN if retry_failed else frozenset[Kind]()
        self.planned_before = len(self._writer.plan)
        """Slots that earlier epochs planned."""
        self.done_before = self._count_done()
        self._names = SlotNames(self._writer.plan)
        self._next_tables = time.monotonic() + run.info.config.store.live_tables_s
        self._next_trim = 0.0
        self._rows_in_tables = self._writer.ledger.rows
        self.used = self._writer.ledger.used
        """What the rows of earlier epochs used."""
        self.closed = False
        self._recall: Recall | None = None
        self._recalling = threading.Lock()
        self.outside = Outside(run, self._writer.epoch)

    @property
    def run_id(self) -> str:
        return self._run.run_id

    @property
    def epoch(self) -> int:
        return self._writer.epoch.number

    @property
    def seal(self) -> tuple[float, int] | None:
        spec = self._run.info.config.store
        return None if self._run.mirror is None else (spec.seal_s, spec.seal_bytes)

    @property
    def space(self) -> KeySpace:
        return self._run.space

    @property
    def plan(self) -> PlanLog:
        return self._writer.plan

    @property
    def done(self) -> RunStore:
        return self

    def todo(self, keys: range) -> list[tuple[int, int]]:
        """(key, generation) of those that need a row: all of a new slot, what earlier epochs left of an old one."""
        if self.space.slot(keys.start) >= self.planned_before:
            return [(key, 0) for key in keys]
        return self._writer.ledger.todo(keys, self._again)

    def _count_done(self) -> int:
        counts = self._writer.ledger.counts
        return int(counts.sum() - sum(counts[kind] for kind in self._again))

    def unfinished(self) -> Iterator[list[PlanEntry]]:
        """Slots that earlier epochs planned and that still need a row, some at a time. Raises RunError."""
        wanted = [Kind.NONE, *self._again]
        for start in range(0, self.planned_before, CHUNK_SLOTS):
            stop = min(start + CHUNK_SLOTS, self.planned_before)
            kinds = self._writer.ledger.dense(stop, start).kinds
            slots = start + np.flatnonzero(np.isin(kinds, wanted).any(axis=(1, 2)))
            if len(slots):
                yield [self.plan.entry(slot) for slot in slots.tolist()]

    def has_planned(self, round: int, task_id: str) -> bool:
        """Whether an earlier epoch has planned this task in this round."""
        slot = self.plan.find(round, task_id)
        return slot is not None and slot < self.planned_before

    def dump(self, text: str) -> str:
        """Writes the state of a stuck run beside its log, for its owner alone. Raises OSError."""
        path = self._run.layout.stuck(self.epoch)
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        with os.fdopen(os.open(path, flags, 0o600), "w", errors="replace") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(text)
        return named(path)

    def recall(self, keys: Sequence[int]) -> list[pa.RecordBatch]:
        """The rows that earlier epochs committed for these keys. Call it from a thread. Raises RunError."""
        with self._recalling:
            if self._recall is None:
                self._recall = Recall(self._run.layout, self.space, self.planned_before)
            return self._recall.rows(keys)

    def write(self, batches: list[pa.RecordBatch]) -> None:
        self._writer.commit(batches)

    def record(self, events: Sequence[Event]) -> None:
        with contextlib.suppress(OSError), self._run.layout.events.open("a") as file:
            file.write(to_lines(events))

    def idle(self) -> None:
        """Heartbeat, and live tables when they are due. Raises RunError where another driver has taken over."""
        self._writer.beat()
        now = time.monotonic()
        self.outside.look(now)
        if now >= self._next_trim:
            self._next_trim = now + TRIM_S
            give_back_memory()
        if now >= self._next_tables and self._writer.ledger.rows != self._rows_in_tables:
            self.write_tables()
            spent = time.monotonic() - now
            self._next_tables = now + max(self._run.info.config.store.live_tables_s, spent / LIVE_SHARE)

    def write_tables(self) -> None:
        """Rewrites groups.parquet and rewards.parquet from what is committed."""
        self._rows_in_tables = self._writer.ledger.rows
        write_tables(self._run, self._writer.ledger, self._names)

    def close(self, status: RunStatus) -> None:
        """Final tables, compaction, and the end of the epoch. Safe to call twice. Raises RunError."""
        if self.closed:
            return
        self.closed = True
        try:
            self._writer.plan.sync()
            self.write_tables()
            self._writer.compact()
            self.outside.publish()
        finally:
            self._writer.close(status)

    def publish_logs(self) -> None:
        """This process's log files, which nobody writes any more, go to the object store, where the run is on one.

        A store that refuses them costs the log alone: the rows are there by now.
        """
        mirror = self._run.mirror
        for path in sorted(self._run.layout.logs.glob("*.jsonl*")) if mirror is not None else ():
            try:
                publish(path)
            except OSError as error:
                log.warning("%s: %s; the rest of the logs is lost with this process", named(path), describe(error))
                return

    def abandon(self) -> None:
        """The epoch ends before it began: an old run is as it was, and of a new one nothing stays."""
        if self.closed:
            return
        self.closed = True
        self._writer.close(self._status_before)
        if self._missing is None:
            return
        if (mirror := self._run.mirror) is not None:
            try:
                mirror.objects.delete(mirror.objects.list())
            except OSError as error:
                log.warning("%s: what was made for the run is still there: %s", mirror.uri, describe(error))
            detach(self._run.path)
            return
        for path in self._run.path.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        # A directory around it may hold another run by now, which keeps it.
        with contextlib.suppress(OSError):
            for directory in self._missing:
                directory.rmdir()

    def tables(self) -> Run:
        """All tables of the run, as they are on disk."""
        return read_run(self._run.path)


def open_store(path: Path, config: RunConfig, *, resume: bool, retry_failed: bool) -> RunStore:
    """A new run's store, or with `resume` an existing one's. Raises InputError with nothing half-written."""
    if resume and is_run(path):
        run = open_run(path)
        run.adopt(config)
        return RunStore(run, retry_failed)
    missing = [each for each in (path, *path.parents) if not each.exists()]
    run = create_run(path, config)
    return RunStore(run, retry_failed, missing)


def write_tables(run: RunDir, ledger: Ledger, names: SlotNames) -> None:
    """groups.parquet and rewards.parquet, chunk by chunk, each replaced as a whole."""
    config = run.info.config
    targets = ((run.layout.groups, GROUPS), (run.layout.rewards, REWARDS))
    with writing(run.layout.groups):
        _write_tables(run, targets, score_chunks(ledger, names, config), config)


def _write_tables(
    run: RunDir, targets: Sequence[tuple[Path, pa.Schema]], chunks: TableChunks, config: RunConfig
) -> None:
    temporary = [path.with_name(f".{path.name}.tmp") for path, _ in targets]
    writers = [
        pq.ParquetWriter(file, schema, compression="zstd") for file, (_, schema) in zip(temporary, targets, strict=True)
    ]
    for scores in chunks:
        writers[0].write_table(groups_table(scores, config.rewards))
        writers[1].write_table(rewards_table(scores, config.rewards))
    for writer, file, (path, _) in zip(writers, temporary, targets, strict=True):
        writer.close()
        sync_file(file)
        os.replace(file, path)
    sync_directory(run.path)
    for path, _ in targets:
        publish(path)


def read_run(path: Path) -> Run:
    """A run's tables, recomputed from its log where it is unfinished. Raises InputError, RunError."""
    run = open_run(path)
    config, scores = run.info.config, read_scores(run)
    return Run(
        rollouts=run.rollouts(),
        turns=run.turns_table(),
        groups=groups_table(scores, config.rewards),
        rewards=rewards_table(scores, config.rewards),
        summary=summary(scores, config.rewards),
        run_id=run.run_id,
        run_dir=path,
    )


def read_scores(run: RunDir) -> Scores:
    """The scores of everything planned so far, whether or not a driver is at work. Raises RunError."""
    config = run.info.config
    if run.has_only_tables():
        return scores_from_rollouts(run.rollouts(SCORED), config.model_names, config.k, config.rewards.pass_threshold)
    plan = run.plan()
    try:
        return _joined(list(score_chunks(run.winners(), SlotNames(plan), config)), config)
    finally:
        plan.close()


def _joined(chunks: list[Scores], config: RunConfig) -> Scores:
    shape = (0, len(config.models), config.k)
    return Scores(
        models=config.model_names,
        k=config.k,
        task_ids=pa.concat_arrays([chunk.task_ids for chunk in chunks]) if chunks else pa.array([], pa.string()),
        rounds=np.concatenate([np.empty(0, np.int32), *(chunk.rounds for chunk in chunks)]),
        values=np.concatenate([np.empty(shape), *(chunk.values for chunk in chunks)]),
        passed=np.concatenate([np.empty(shape, np.bool_), *(chunk.passed for chunk in chunks)]),
        kinds=np.concatenate([np.empty(shape, np.uint8), *(chunk.kinds for chunk in chunks)]),
    )
