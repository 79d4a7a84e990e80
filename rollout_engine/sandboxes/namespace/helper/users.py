"""Who a command runs as: names looked up in the box's own passwd and group files, which its agent may have written."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from typing import NamedTuple

from rollout_engine.sandboxes.namespace.helper import syscalls as sys

_MAX_BYTES = 2**18


class User(NamedTuple):
    """Credentials, and the home directory."""

    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str


class UnknownUser(Exception):
    """The name is in no passwd file, or its id is not mapped in this box."""


ROOT = User(0, 0, (), "/root")


def find(name: str | None, count: int) -> User:
    """`name`, `uid` or `uid:gid`; None is root. `count` is how many ids the box has."""
    if name is None or name in ("", "root", "0"):
        return ROOT
    user, _, group = name.partition(":")
    rows = [row for row in _rows("/etc/passwd", 7) if user in (row[0], row[2])]
    try:
        uid = int(rows[0][2]) if rows else int(user)
        gid = int(rows[0][3]) if rows else uid
        if group:
            gid = next((int(row[2]) for row in _rows("/etc/group", 4) if row[0] == group), -1)
            gid = int(group) if gid < 0 else gid
        groups = tuple(int(row[2]) for row in _rows("/etc/group", 4) if rows and rows[0][0] in row[3].split(","))
    except ValueError:
        raise UnknownUser(f"there is no user {name!r} in the sandbox") from None
    if not all(0 <= number < count for number in (uid, gid, *groups)):
        raise UnknownUser(f"user {name!r}: this sandbox has no ids above {count - 1}")
    return User(uid, gid, groups[:64], rows[0][5] if rows else "/")


def _rows(path: str, columns: int) -> list[list[str]]:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return []
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return []
        text = os.read(fd, _MAX_BYTES).decode(errors="replace")
    finally:
        os.close(fd)
    return [row for line in text.splitlines() if len(row := line.split(":")) >= columns]


@contextlib.contextmanager
def acting_as(user: User) -> Iterator[None]:
    """Opens and makes files as the user would, without a process of its own."""
    if user.uid == 0:
        yield
        return
    os.setegid(user.gid)
    os.seteuid(user.uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        die_with_parent()


def die_with_parent() -> None:
    """The kernel forgets this wish, and hides the process anew, whenever credentials change."""
    sys.prctl(sys.PR_SET_PDEATHSIG, 9)
    sys.prctl(sys.PR_SET_DUMPABLE, 0)
