"""A run's directory: made, opened, read, and for the one driver that holds its epoch written."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from rollout_engine.config import RunConfig
from rollout_engine.errors import InputError, RunError, describe
from rollout_engine.store.compact import Compaction, check_log, check_sizes, compact, current_parts, has_only_tables
from rollout_engine.store.epochs import Epoch, EpochRecord, live_driver, take_epoch
from rollout_engine.store.files import TEMPORARY, sync_file, writing
from rollout_engine.store.layout import Layout
from rollout_engine.store.ledger import Ledger
from rollout_engine.store.log import CommitLog
from rollout_engine.store.mirrors import local_root, mirror_of, named, publish
from rollout_engine.store.objectlog import ObjectLog
from rollout_engine.store.planlog import PlanLog
from rollout_engine.store.read import rollout_turns, rollouts_table, turns_table
from rollout_engine.store.runinfo import (
    RunInfo,
    RunStatus,
    differences,
    read_info,
)
from rollout_engine.store.scan import scan, segments
from rollout_engine.store.swap import finish
from rollout_engine.store.winners import winners
from rollout_engine.types import KeySpace, Turn


class RunDir:
    """One run on disk. Reading needs no lock and may go on while a driver writes."""

    def __init__(self, layout: Layout, info: RunInfo) -> None:
        self.layout = layout
        self.info = info
        self.space = KeySpace(len(info.config.models), info.config.k)
        self.mirror = mirror_of(layout.root)

    @property
    def where(self) -> str:
        """Its directory or URI, for people."""
        return named(self.layout.root)

    @property
    def path(self) -> Path:
        return self.layout.root

    @property
    def run_id(self) -> str:
        return self.info.run_id

    def scan(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """All committed rows, superseded ones among them, with these columns of the log. Raises RunError."""
        return scan(self.layout, self.space, columns)

    def winners(self) -> Ledger:
        """Which row counts for each rollout, and what it says. Raises RunError."""
        return winners(self.layout, self.space)

    def rollouts(self, columns: Sequence[str] | None = None) -> pa.Table:
        """One row per rollout that has one. Raises RunError."""
        return rollouts_table(self.layout, self.run_id, self.space, columns)

    def turns_table(self) -> pa.Table:
        """All turns, those in trace files too, ordered by rollout_id and index within each part. Raises RunError."""
        return turns_table(self.layout, self.space)

    def turns(self, rollout_id: str) -> list[Turn]:
        """Raises InputError where there is no such rollout, RunError where a file is damaged."""
        return rollout_turns(self.layout, self.space, rollout_id)

    def plan(self) -> PlanLog:
        """The plan, for reading. The caller closes it. Raises RunError."""
        return PlanLog(self.layout)

    def has_tables(self) -> bool:
        """Whether the Parquet tables hold all that the log does. Raises InputError where a store does not say."""
        if self.mirror is not None:  # which holds no tables; its store does, if it has what is put after the last
            try:
                return self.mirror.objects.exists(self.layout.compacted.name)
            except OSError as error:
                raise InputError(f"cannot be read: {describe(error)}", where=self.where) from error
        return current_parts(self.layout, "rollouts") is not None and current_parts(self.layout, "turns") is not None

    def has_only_tables(self) -> bool:
        """Whether it is a copy without its log, to be read. Raises RunError where a part of the log is missing."""
        if self.mirror is not None:
            return False
        found = has_only_tables(self.layout)
        if not found:
            check_sizes(self.layout)
        return found

    def driver(self) -> EpochRecord | None:
        """The driver that is at work on the run now. Raises InputError where its record is damaged."""
        return live_driver(self.layout.epochs)

    def start(self) -> RunWriter:
        """Takes the next epoch. The caller closes the writer. Raises InputError where a driver is at work."""
        if self.mirror is not None:
            self.mirror.objects.check_exclusive()
        try:
            make_rooms(self.layout)
        except OSError as error:
            raise InputError(f"cannot be written: {describe(error)}", where=self.where) from error
        epoch = take_epoch(self.layout.epochs, self.info.config.store.heartbeat_s)
        try:
            return RunWriter(self, epoch)
        except BaseException:
            epoch.release()
            raise

    def adopt(self, config: RunConfig) -> None:
        """Makes this the config from the next `start` on; nothing is written before. Raises InputError.

        What would mix results is refused, with the difference shown.
        """
        changed = differences(self.info.config, config)
        if changed:
            raise InputError(
                "the config differs from the run's own in what would mix results:\n    " + "\n    ".join(changed),
                where=self.where,
                fix="resume with the run's own config, or start a new run directory",
            )
        self.info = self.info.model_copy(update={"config": config})


class RunWriter:
    """The run in the hands of its one driver: plan, log and ledger of an epoch. Whoever starts it closes it.

    `plan` is safe from several threads; all else belongs to one.
    """

    def __init__(self, run: RunDir, epoch: Epoch) -> None:
        self.run = run
        self.epoch = epoch
        layout = run.layout
        if run.mirror is not None:
            run.mirror.start_driving(epoch.number, run.info.config.store.patience_s)
        with writing(layout.root):
            for leftover in (*layout.root.glob(TEMPORARY), *layout.epochs.glob(TEMPORARY)):
                leftover.unlink(missing_ok=True)
            finish(layout)
            if run.mirror is None:  # an object store's fences say which segments there have to be
                check_log(layout)
            # Rows of a killed driver that were never synced count from here on, so they must not vanish any more.
            for segment in segments(layout) if run.mirror is None else ():
                sync_file(segment.path)
        self.plan = PlanLog(layout)
        try:
            self._check_shape()
            self.ledger = run.winners()
            self.record("running")
            self.plan.begin(epoch.number, run.info.config.model_names, run.info.config.k)
        except BaseException:
            self.plan.close()
            self._leave_mirror()
            raise
        self._log = self._make_log()

    def _make_log(self) -> CommitLog | ObjectLog:
        layout, epoch, spec = self.run.layout, self.epoch.number, self.run.info.config.store
        if self.run.mirror is None:
            return CommitLog(layout, epoch, spec.segment_bytes)
        return ObjectLog(layout, epoch, spec.seal_bytes, self.run.mirror.publish)

    def _leave_mirror(self) -> None:
        if self.run.mirror is not None:
            self.run.mirror.stop_driving(self.epoch.number)

    def _check_shape(self) -> None:
        header = self.plan.header
        if header is not None and (header.models, header.k) != (self.run.info.config.model_names, self.run.space.k):
            raise RunError(
                f"{named(self.run.layout.plan)}: planned {header.k} attempts of {', '.join(header.models)}, "
                "which is not what run.json says"
            )

    def commit(self, batches: Sequence[pa.RecordBatch]) -> None:
        """Makes rows durable, after the plan they belong to, and enters them in the ledger.

        Raises RunError where another driver has taken over or the disk refuses: the rows are not to be acknowledged.
        """
        self.epoch.check()
        self.plan.sync()
        self._log.commit(batches)
        if self.run.mirror is not None:
            self.epoch.check()  # a put takes its time; whoever took over meanwhile may not have seen these rows
        for batch in batches:
            self.ledger.add(batch)

    def beat(self) -> None:
        """Renews the epoch where that is due; call it at least every `heartbeat_s`. Raises RunError."""
        self.epoch.beat()

    def record(self, status: RunStatus, provenance: Mapping[str, Any] | None = None) -> None:
        """Rewrites run.json with a status and with further facts of provenance. Raises RunError."""
        info = self.run.info
        facts = {**info.provenance, **(provenance or {})}
        self.run.info = info.model_copy(update={"status": status, "provenance": facts})
        with writing(self.run.layout.run_json):
            self.run.info.write(self.run.layout.run_json)
            publish(self.run.layout.run_json)

    def compact(self) -> Compaction:
        """Rewrites the Parquet tables from the log. Raises RunError; the old tables stay then."""
        self._log.close()  # its end mark belongs to the log that the tables are made from
        done = compact(self.run.layout, self.run.run_id, self.run.space, check=self.epoch.check)
        if self.run.mirror is not None:
            with writing(self.run.path):
                self.run.mirror.publish_tables()
        return done

    def close(self, status: RunStatus) -> None:
        """Ends the epoch. Safe to call twice; where another driver has taken over, run.json is left to it."""
        if self.epoch.released:
            return
        try:
            self.plan.close()
            self._log.close()
            if not self.epoch.superseded:
                self.record(status)
        finally:
            self._leave_mirror()
            self.epoch.release()


def make_rooms(layout: Layout) -> None:
    for directory in (layout.epochs, layout.plan, layout.log, layout.traces):
        directory.mkdir(exist_ok=True)


def open_run(path: str | os.PathLike[str], *, log: bool = True) -> RunDir:
    """Opens a run directory, or a URI (of which without `log` only what is small is fetched).

    Raises InputError where it is none, or its run.json is damaged or of another version.
    """
    layout = Layout(local_root(path))
    if (mirror := mirror_of(layout.root)) is not None:
        mirror.pull(log)
    return RunDir(layout, read_info(layout.run_json))


def read_rollouts(run_dir: str | os.PathLike[str], columns: Sequence[str] | None = None) -> pa.Table:
    """One row per rollout of a run that has one: the Parquet tables where they are current, else the log."""
    return open_run(run_dir).rollouts(columns)


def read_turns(run_dir: str | os.PathLike[str], rollout_id: str) -> list[Turn]:
    """The turns of one rollout, in order."""
    return open_run(run_dir).turns(rollout_id)
