"""Folders of runs that nobody asked to keep. A killed driver cannot remove its own: the next such run does."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from rollout_engine.disk import node
from rollout_engine.errors import InputError, describe
from rollout_engine.store.epochs import machine_id, newest_epoch, process_start, read_epoch
from rollout_engine.store.layout import Layout

_PREFIX = "rollout-engine-"


def make_temporary() -> Path:
    """A new folder, which the caller removes, where the system keeps temporary ones. Those of the dead are removed.

    Raises InputError.
    """
    try:
        made = Path(tempfile.mkdtemp(prefix=_PREFIX))
    except OSError as error:
        raise InputError(
            f"the folder for a run that nobody keeps cannot be made on {node()}: {describe(error)}",
            where=tempfile.gettempdir(),
            fix="make room there, set TMPDIR to another disk, or name a run directory",
        ) from error
    for folder in made.parent.glob(f"{_PREFIX}*"):
        if folder != made and _abandoned(folder):
            shutil.rmtree(folder, ignore_errors=True)
    return made


def _abandoned(folder: Path) -> bool:
    """Whether its driver was killed on this machine. One that has ended by itself may still be read by its process."""
    epochs = Layout(folder).epochs
    try:
        newest = newest_epoch(epochs)
        record = read_epoch(epochs, newest) if newest else None
    except InputError:
        return False
    if record is None or record.released or not record.machine or record.machine != machine_id():
        return False
    return process_start(record.pid) != record.process_start
