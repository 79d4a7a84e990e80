"""Puts a new set of Parquet tables in the place of the old one, so that a kill at any moment leaves one whole set.

A set is made in a directory of its own. Renaming that directory to `ready` is the moment from which the new set is
the one that counts: readers look there first, and whoever comes next finishes moving it to its final place.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rollout_engine.store.files import sync_directory, writing
from rollout_engine.store.layout import Layout

TABLES = ("rollouts", "turns")


def _ready(layout: Layout) -> Path:
    return layout.staging / "ready"


@contextmanager
def new_set(layout: Layout) -> Iterator[Path]:
    """A fresh directory for a new set: `rollouts/`, `turns/`, and the manifest, which the caller fills and syncs.

    It takes the old set's place when the block ends without an error. Raises RunError.
    """
    with writing(layout.staging):
        finish(layout)
        shutil.rmtree(layout.staging, ignore_errors=True)
        making = layout.staging / f"new-{os.getpid()}"
        for name in TABLES:
            (making / name).mkdir(parents=True)
        try:
            yield making
            for directory in (*(making / name for name in TABLES), making):
                sync_directory(directory)
            making.rename(_ready(layout))
            sync_directory(layout.staging)
            finish(layout)
        except BaseException:
            shutil.rmtree(making, ignore_errors=True)
            with suppress(OSError):
                layout.staging.rmdir()
            raise


def finish(layout: Layout) -> None:
    """Moves a set that is ready to its final place; safe to be killed in. Raises OSError."""
    ready = _ready(layout)
    if not ready.exists():
        return
    for name in TABLES:
        if (ready / name).exists():
            old = layout.staging / f"old-{name}"
            shutil.rmtree(old, ignore_errors=True)
            with suppress(FileNotFoundError):
                (layout.root / name).rename(old)
            (ready / name).rename(layout.root / name)
    with suppress(FileNotFoundError):
        (ready / layout.compacted.name).replace(layout.compacted)
    sync_directory(layout.root)
    shutil.rmtree(layout.staging)


def locate(layout: Layout, name: str) -> Path:
    """Where a table, or the manifest, of the set that counts lies now. Another process may move it a moment later."""
    ready = _ready(layout) / name
    return ready if ready.exists() else layout.root / name
