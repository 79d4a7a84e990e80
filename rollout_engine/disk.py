"""A disk of this node that is full: told with the node, the place and what to do; no task's and no agent's fault."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rollout_engine.errors import NodeDiskFull, SandboxFull

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
MAKE_ROOM = "make room there"
ELSEWHERE = f"{MAKE_ROOM}, or set TMPDIR to a disk that has some"


def node() -> str:
    """This machine's name, for messages."""
    return os.uname().nodename


def is_full(error: BaseException | None) -> bool:
    """Whether an error says that a disk of the node is full, or its user's quota used up; a sandbox's own is not."""
    return isinstance(error, OSError) and error.errno in FULL and not isinstance(error, SandboxFull)


def full(error: OSError, place: str | os.PathLike[str], fix: str = MAKE_ROOM) -> NodeDiskFull:
    """`/var/tmp/x on node-a: No space left on device; make room there`."""
    return NodeDiskFull(f"{os.fspath(place)} on {node()}: {error.strerror or error}; {fix}")


@contextmanager
def on_disk(place: str | os.PathLike[str], fix: str = MAKE_ROOM) -> Iterator[None]:
    """A full disk inside becomes NodeDiskFull, which names the place."""
    try:
        yield
    except OSError as error:
        if is_full(error):
            raise full(error, place, fix) from error
        raise


@contextmanager
def on_some_disk() -> Iterator[None]:
    """The same where nobody has said which: the file that the error names, else where temporary files go."""
    try:
        yield
    except OSError as error:
        if is_full(error):
            place = Path(os.fsdecode(error.filename)).parent if error.filename else tempfile.gettempdir()
            raise full(error, place, ELSEWHERE) from error
        raise
