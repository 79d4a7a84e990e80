"""`rollout attach`: shows a run that another process drives, until its end; Ctrl-C lets it go on."""

from __future__ import annotations

import time
from pathlib import Path

from rollout_engine.commands import text
from rollout_engine.commands.console import OK, say
from rollout_engine.commands.display import Display, make_display
from rollout_engine.commands.report import shown_path
from rollout_engine.commands.run import report_on
from rollout_engine.commands.watching import Seen, look
from rollout_engine.store import EpochRecord

LOOK_S = 1.0
FAR_LOOK_S = 5.0
"""How often a run is looked at, on a disk and on an object store."""


def attach(path: Path, *, as_json: bool, quiet: bool) -> int:
    """Returns the exit code that the run's own command has. Raises InputError where the path is no run."""
    seen = look(path, None, time.monotonic())
    title = f"{shown_path(path)}  {', '.join(seen.run.info.config.model_names)}"
    if seen.driver is None:
        say(f"no driver is at work on it: the run is {_status(seen)}")
        return report_on(path, OK, as_json=as_json)
    display = make_display(title, quiet)
    try:
        _follow(path, seen, seen.driver, display)
    except KeyboardInterrupt:
        display.close()
        again = shown_path(path)
        say(f"detached: the run goes on; `rollout attach {again}` shows it again, `rollout cancel {again}` ends it")
        return OK
    finally:
        display.close()
    return report_on(path, OK, as_json=as_json)


def _follow(path: Path, seen: Seen, driver: EpochRecord, display: Display) -> None:
    """Returns when no driver is at work any more."""
    first = seen.progress
    display.state(
        f"running since {text.took(max(time.time() - driver.started_at, 0))}, pid {driver.pid} on {driver.host}"
    )
    pause = LOOK_S if seen.run.mirror is None else FAR_LOOK_S
    while seen.driver is not None:
        display.show(seen.progress, seen.progress.now)
        time.sleep(pause)
        seen = look(path, first, time.monotonic())
    display.state("ended" if seen.run.info.status != "running" else "its driver ended without a word")


def _status(seen: Seen) -> str:
    status = seen.run.info.status
    return "interrupted" if status == "running" else status
