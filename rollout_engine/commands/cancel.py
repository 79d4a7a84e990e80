"""`rollout cancel`: asks a run's driver, on whatever machine, to stop; ends the run itself where the driver is gone."""

from __future__ import annotations

import getpass
import socket
import time
from pathlib import Path

from rollout_engine.abandoned import cancel_abandoned
from rollout_engine.commands import text
from rollout_engine.commands.console import OK, SOME_FAILED, say
from rollout_engine.commands.report import shown_path
from rollout_engine.errors import InputError
from rollout_engine.store import EpochRecord, RunDir, open_run
from rollout_engine.store.epochs import ask_cancel, newest_epoch, read_epoch

POLL_S = 0.5


def cancel(path: Path, wait_s: float) -> int:
    """Returns the exit code: OK once no driver is at work, SOME_FAILED where it still was after `wait_s`.

    Raises InputError where the path is no run.
    """
    run = open_run(path)
    driver = run.driver()
    if driver is None:
        return _without_driver(run)
    ask_cancel(run.layout.epochs, driver.epoch, f"{_user()}@{socket.gethostname()}")
    say(f"asked pid {driver.pid} on {driver.host} to cancel {shown_path(run.path)}; each of its rollouts gets its row")
    ends = time.monotonic() + wait_s
    while _same(run, driver):
        if time.monotonic() >= ends:
            say(
                f"it is still at work after {wait_s:g} s; it hears of this at its next heartbeat "
                f"({driver.heartbeat_s:g} s), and then ends what runs"
            )
            return SOME_FAILED
        time.sleep(POLL_S)
    return _told(path, driver)


def _same(run: RunDir, driver: EpochRecord) -> bool:
    now = run.driver()
    return now is not None and now.epoch == driver.epoch


def _told(path: Path, driver: EpochRecord) -> int:
    """It has ended: in good order, or it died meanwhile."""
    run = open_run(path)
    record = read_epoch(run.layout.epochs, driver.epoch)
    if record is not None and not record.released:
        return _without_driver(run)
    say(f"cancelled; `rollout show {shown_path(path)}` shows what there is, `rollout resume --failed` goes on with it")
    return OK


def _without_driver(run: RunDir) -> int:
    """Nothing runs: a host without its driver ends all that it has when its lease does."""
    newest = newest_epoch(run.layout.epochs)
    last = read_epoch(run.layout.epochs, newest) if newest else None
    if last is not None and last.released and run.info.status != "running":
        say(f"no driver is at work on it: the run is {run.info.status}")
        return OK
    gone = "it never started" if last is None else f"pid {last.pid} on {last.host} ended without a word"
    say(f"no driver is at work on it ({gone}); what its hosts still run ends with their leases")
    try:
        rows = cancel_abandoned(run)
    except InputError as error:
        raise InputError(f"somebody goes on with it just now: {error.message}", error.where, error.fix) from error
    say(f"{text.plural(rows, 'cancelled row')} written, for what was planned and had none; tasks that had not been "
        f"planned yet are left to `rollout resume {shown_path(run.path)}`")  # fmt: skip
    return OK


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's uid that has no name
        return "somebody"
