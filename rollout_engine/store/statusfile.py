"""status.json on the disk: the only two places that know that it is a file."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from rollout_engine.errors import InputError, describe
from rollout_engine.store.files import write_atomic
from rollout_engine.store.layout import Layout


def write_status(run_dir: Path, data: bytes) -> None:
    """Replaces it, readable by its owner alone. Raises OSError; a lost status is no loss, so nothing is synced."""
    write_atomic(Layout(run_dir).status, data, sync=False, mode=0o600)


def read_status(run_dir: Path, max_bytes: int) -> bytes | None:
    """At most `max_bytes` + 1 bytes of it; None where there is none. Raises InputError.

    What is no plain file (a link to a device, a pipe that nobody writes to) is not read.
    """
    path = Layout(run_dir).status
    try:
        with open(path, "rb", buffering=0, opener=_open) as file:
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return file.read(max_bytes + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InputError(f"cannot be read: {describe(error)}", where=str(path)) from error
    raise InputError("is no plain file: no driver wrote it", where=str(path), fix="remove it")


def _open(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW)
