"""A temporary folder that its process holds by a lock: what a killed one leaves, the next that makes one removes."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_LOCK = "lock"


class HeldFolder:
    """Nobody else of this machine may enter it. Lives until `remove`, or until its process ends."""

    def __init__(self, prefix: str) -> None:
        """Makes it, and removes those of this prefix that nobody holds any more. Blocks. Raises OSError."""
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        self._lock, new = -1, self.path / f"{_LOCK}.new"
        try:
            self._lock = os.open(new, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            new.rename(self.path / _LOCK)  # nobody finds it there before it is held
        except OSError:
            self.remove()
            raise
        for other in self.path.parent.glob(f"{prefix}*"):
            if other != self.path:
                _remove_left(other)

    def remove(self) -> None:
        """With all that is in it. Safe to call twice."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _remove_left(folder: Path) -> None:
    """Removes a folder of this user's whose process is gone, and with it its lock."""
    try:
        if folder.stat(follow_symlinks=False).st_uid != os.geteuid():
            return
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return
    else:
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)
