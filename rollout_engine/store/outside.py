"""What others may ask of a driver through its run directory, and what they can read there of what it says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rollout_engine.store.epochs import Epoch
from rollout_engine.store.files import writing
from rollout_engine.store.mirrors import publish
from rollout_engine.store.rundir import RunDir

LOOK_S = 1.0
"""How often a driver looks for a request to cancel; on an object store, at its heartbeat."""


class Outside:
    """One epoch's side of it. Used from the committer's thread."""

    def __init__(self, run: RunDir, epoch: Epoch) -> None:
        self._run, self._epoch = run, epoch
        self._pause = LOOK_S if run.mirror is None else run.info.config.store.heartbeat_s
        self._next = 0.0
        self._written: dict[Path, int] = {}
        self.on_cancel: Callable[[str], None] | None = None
        """Told once who has asked for the run to be cancelled."""

    def look(self, now: float) -> None:
        """Does its work where that is due; `now`: monotonic seconds. Raises RunError where the store refuses."""
        if now < self._next:
            return
        self._next = now + self._pause
        if self.on_cancel is not None and (who := self._epoch.cancel_asked()) is not None:
            self.on_cancel(who)
            self.on_cancel = None
        self.publish()

    def publish(self) -> None:
        """What the driver has said so far goes to the object store, where the run is on one."""
        if self._run.mirror is None:
            return
        layout = self._run.layout
        for path in (layout.status, layout.said, layout.events, layout.stuck(self._epoch.number)):
            written = path.stat().st_mtime_ns if path.exists() else None
            if written is not None and written != self._written.get(path):
                with writing(path):
                    publish(path)
                self._written[path] = written
