"""How a run stands, read from its directory alone: nothing is locked, nothing is asked of its driver."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout_engine.commands.report import shown_path
from rollout_engine.status import MAX_STATUS_BYTES, Status, parse_status
from rollout_engine.store import EpochRecord, RunInfo
from rollout_engine.store.epochs import newest_holder
from rollout_engine.store.layout import Layout
from rollout_engine.store.mirrors import mirror_of
from rollout_engine.store.runinfo import read_info
from rollout_engine.store.statusfile import read_status

STALE_S = 15.0
"""A live driver that has not written for so long is stuck, or its disk is."""
GONE, STARTING = "gone", "starting"


@dataclass(frozen=True, slots=True)
class Standing:
    """A run at one moment, as seen from here."""

    path: Path
    info: RunInfo
    driver: EpochRecord | None
    """Of the newest epoch, whether or not it lives."""
    alive: bool
    silent_s: float
    """Seconds since the driver's heartbeat."""
    status: Status | None
    """What the driver wrote last; None: nothing (yet)."""
    read_at: float
    """Wall clock, seconds since 1970."""

    @property
    def state(self) -> str:
        """starting, running, draining, behind; gone (killed); finished, interrupted, failed."""
        if not self.alive:
            return GONE if self.info.status == "running" else self.info.status
        if self.status is None or self.driver is None or self.status.epoch != self.driver.epoch:
            return STARTING
        # Its driver has ended the work and still writes the tables.
        return "running" if self.status.state == "ended" else self.status.state

    @property
    def age_s(self) -> float | None:
        """Seconds since the status was written; clocks of two machines may differ, so never less than 0."""
        return None if self.status is None else max(self.read_at - self.status.written_at, 0.0)

    def remark(self) -> str | None:
        """What a person should know about the driver; None: nothing."""
        if self.state == GONE:
            return (
                f"the driver is gone{self._whose()}: what was committed is kept; rollout resume {self._shown} goes on"
            )
        if self.alive and self.age_s is not None and self.age_s > STALE_S and self.state != STARTING:
            return f"the driver{self._whose()} has written no status for {self.age_s:.0f} s: it, or its disk, is stuck"
        if self.status is None and self.state != STARTING:
            return "this run has no status.json (it is a copy, or an older version's); rollout show has its rollouts"
        return None

    @property
    def _shown(self) -> str:
        return shown_path(self.path)

    def _whose(self) -> str:
        if self.driver is None:
            return ""
        who = f"pid {self.driver.pid} on {self.driver.host}, epoch {self.driver.epoch}"
        return f" ({who}, heartbeat {self.silent_s:.0f} s ago)"

    def to_dict(self) -> dict[str, Any]:
        """For `--json`."""
        driver = None if self.driver is None else {
            "host": self.driver.host, "pid": self.driver.pid, "epoch": self.driver.epoch, "alive": self.alive,
            "heartbeat_s": self.silent_s,
        }  # fmt: skip
        return {
            "run": str(self.path),
            "run_id": self.info.run_id,
            "state": self.state,
            "driver": driver,
            "remark": self.remark(),
            "age_s": self.age_s,
            "status": None if self.status is None else self.status.model_dump(mode="json"),
        }


def read_standing(path: Path) -> Standing:
    """Raises InputError where the path is no run, or its files are not what the engine wrote."""
    if (mirror := mirror_of(path)) is not None:
        mirror.pull(log=False)
    layout, now = Layout(path), time.time()
    # The driver's record first: one that ends meanwhile has written everything else before it lets go.
    holder = newest_holder(layout.epochs)
    driver, silent_s, alive = holder if holder is not None else (None, 0.0, False)
    info = read_info(layout.run_json)
    raw = read_status(path, MAX_STATUS_BYTES)
    status = None if raw is None else parse_status(raw, str(layout.status))
    return Standing(path, info, driver, alive, silent_s, status, now)
