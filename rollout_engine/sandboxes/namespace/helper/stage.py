"""Copies of mounts that are in no mount table, which Linux can make since 6.15; before that, a place to do it at.

On an older kernel a mount must be in the launcher's own table while it is copied. What boxes write is there only
for that moment, so that new boxes do not inherit a table of all others; layers stay until they are dropped.
"""

from __future__ import annotations

import os

from rollout_engine.sandboxes.namespace.helper import syscalls as sys

_PLACES = ("/boot", "/media", "/mnt", "/srv")
"""Directories that no box is given, and that are there nearly everywhere."""


class Stage:
    """Copies mounts, with or without a place to put them at."""

    def __init__(self, *, pretend_old: bool) -> None:
        self.needed = pretend_old or not _copies_detached()
        self._count = 0
        self._place = ""
        if self.needed:
            self._place = next(place for place in _PLACES if os.path.isdir(place))
            sys.mount("stage", self._place, "tmpfs", sys.MS_NOSUID | sys.MS_NODEV, "size=1m,mode=700")

    def put(self, mount: int) -> str:
        """Puts a detached mount into the launcher's table, for good; returns where. No-op on a newer kernel."""
        if not self.needed:
            return ""
        self._count += 1
        path = f"{self._place}/{self._count}"
        os.mkdir(path)
        sys.attach(mount, path)
        return path

    def remove(self, path: str) -> None:
        if path:
            sys.umount(path)
            os.rmdir(path)

    def copy_once(self, mount: int) -> int:
        """A detached copy of a mount that stays detached itself; `mount` then names another copy of it."""
        if not self.needed:
            return sys.open_tree(mount)
        path = self.put(mount)
        try:
            spare = sys.open_tree(mount)
            copy = sys.open_tree(-100, path)
        finally:
            self.remove(path)
        os.dup2(spare, mount, inheritable=False)
        os.close(spare)
        return copy


def _copies_detached() -> bool:
    mount = sys.filesystem("tmpfs", {"size": "4k"}, (), 0)
    try:
        os.close(sys.open_tree(mount))
    except OSError:
        return False
    finally:
        os.close(mount)
    return True
