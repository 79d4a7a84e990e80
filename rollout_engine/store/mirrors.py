"""Which folders of this machine are mirrors of runs on object stores: by URI, by path, and for messages."""

from __future__ import annotations

import atexit
import os
import tempfile
from pathlib import Path

from rollout_engine.errors import InputError, describe
from rollout_engine.store.mirror import Mirror
from rollout_engine.store.objects import is_remote, open_objects

_mirrors: dict[Path, Mirror] = {}


def attach(uri: str) -> Mirror:
    """This process's mirror of a URI; a new one is empty. Raises InputError where the URI is none of a store."""
    objects = open_objects(uri)
    for mirror in _mirrors.values():
        if mirror.uri == objects.uri:
            return mirror
    try:
        mirror = Mirror(objects)
    except OSError as error:
        raise InputError(
            f"the folder for its working copy cannot be made: {describe(error)}",
            where=tempfile.gettempdir(),
            fix="set TMPDIR to a disk with room for the run",
        ) from error
    if not _mirrors:
        atexit.register(detach_all)
    _mirrors[mirror.root] = mirror
    return mirror


def detach(path: Path) -> None:
    """Removes the mirror whose folder this is, if it is one."""
    if (mirror := _mirrors.pop(path, None)) is not None:
        mirror.remove()


def detach_all() -> None:
    """Removes all mirrors of this process."""
    for path in list(_mirrors):
        detach(path)


def mirror_of(path: Path) -> Mirror | None:
    """The mirror that a path lies in."""
    if not _mirrors:
        return None
    return next((_mirrors[root] for root in (path, *path.parents) if root in _mirrors), None)


def local_root(path: str | os.PathLike[str]) -> Path:
    """Where a run lies on this machine: its directory, or the mirror of its URI."""
    # A Path has made one slash of two.
    if is_remote(path):
        return attach(str(path)).root
    return Path(os.path.abspath(path))  # hosts have another working directory


def named(path: Path) -> str:
    """What a person is told: the object's URI for a file of a mirror, else the path."""
    mirror = mirror_of(path)
    if mirror is None:
        return str(path)
    return f"{mirror.uri}/{mirror.key_of(path)}" if path != mirror.root else mirror.uri


def publish(path: Path) -> None:
    """Sends a file of a run that is on an object store; for any other it has been written by now. Raises OSError."""
    if (mirror := mirror_of(path)) is not None:
        mirror.publish(path)
