"""Whose files and processes a box's are on the host: the mapping of its user namespace.

ranges   as root: a range of 65,536 ids of its own per box; layers are mounted with mapped ids
shared   as root, where a file system cannot map ids: one range for all boxes
user     as an ordinary user, in a user namespace of the launcher's: its own id, and its subordinate ids
plain    as root on a kernel without user namespaces: the host's root with few capabilities
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterator
from typing import NamedTuple

from rollout_engine.sandboxes.namespace.helper import syscalls as sys

RANGE = 65_536
_FIRST, _SLOTS = 4_096, 28_000
"""Above the subordinate ids of a host's own users, below 2^31 (some programs take an id for signed)."""


class Identity(NamedTuple):
    """`size` ids; `base` is what the box's id 0 is to the launcher; None: there is no user namespace."""

    mode: str
    base: int | None
    size: int
    idmap: bool

    @property
    def owner(self) -> int:
        """The id, as the launcher sees it, that owns what box root owns on an unmapped mount."""
        return 0 if self.idmap else self.base or 0


class Identities:
    """Hands out an identity per box and takes it back when the box has ended."""

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self._free: Iterator[int] = iter(())
        self._returned: list[int] = []
        self.count = count_ids() if mode == "user" else RANGE
        if mode == "ranges":
            start = int.from_bytes(os.urandom(4), "little") % _SLOTS
            self._free = iter([*range(start, _SLOTS), *range(start)])

    def take(self) -> Identity:
        if self.mode == "ranges":
            slot = self._returned.pop() if self._returned else next(self._free)
            return Identity(self.mode, (_FIRST + slot) * RANGE, RANGE, idmap=True)
        if self.mode == "shared":
            return Identity(self.mode, _FIRST * RANGE, RANGE, idmap=False)
        return Identity(self.mode, None if self.mode == "plain" else 0, self.count, idmap=False)

    def sample(self) -> Identity:
        """An identity such as boxes get, for layers that all of them share."""
        identity = self.take()
        self.give_back(identity)
        return identity

    def give_back(self, identity: Identity) -> None:
        if identity.mode == "ranges" and identity.base is not None:
            self._returned.append(identity.base // RANGE - _FIRST)


def count_ids() -> int:
    """How many ids the launcher's own user namespace maps."""
    with open("/proc/self/uid_map") as file:
        return min(RANGE, sum(int(line.split()[2]) for line in file))


def write_maps(pid: int, identity: Identity) -> None:
    """Maps the ids of a box's user namespace, which its process waits for."""
    if identity.base is None:
        return
    line = f"0 {identity.base} {identity.size}"
    if identity.mode == "user" and identity.size == 1:
        _write(f"/proc/{pid}/setgroups", "deny")
    _write(f"/proc/{pid}/gid_map", line)
    _write(f"/proc/{pid}/uid_map", line)


def become_user_root() -> None:
    """As an ordinary user: makes the launcher root of a user namespace, with subordinate ids where it has any."""
    uid, gid = os.getuid(), os.getgid()
    sys.prctl(sys.PR_SET_DUMPABLE, 1)
    ready, wrote = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        _map_parent(os.getppid(), uid, gid, ready[0], wrote[1])
    sys.unshare(sys.CLONE_NEWUSER)
    os.write(ready[1], b".")
    os.close(wrote[1])
    mapped = os.read(wrote[0], 1)
    os.waitpid(child, 0)
    if not mapped:
        _write("/proc/self/setgroups", "deny")
        _write("/proc/self/gid_map", f"0 {gid} 1")
        _write("/proc/self/uid_map", f"0 {uid} 1")
    for fd in (*ready, wrote[0]):
        os.close(fd)
    if mapped:
        os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)


def _map_parent(parent: int, uid: int, gid: int, ready: int, done: int) -> None:
    """In a child that stayed outside: maps subordinate ids by newuidmap, and says so if that worked."""
    try:
        os.read(ready, 1)
        first_uid, first_gid = _subordinate("/etc/subuid", uid), _subordinate("/etc/subgid", uid)
        if first_uid and first_gid:
            for tool, own, first in (("newgidmap", gid, first_gid), ("newuidmap", uid, first_uid)):
                line = [tool, str(parent), "0", str(own), "1", "1", str(first), str(RANGE - 1)]
                if os.waitpid(os.posix_spawn(f"/usr/bin/{tool}", line, {}), 0)[1]:
                    os._exit(1)
            os.write(done, b".")
    finally:
        os._exit(0)


def _subordinate(path: str, uid: int) -> int | None:
    """The first id of a range of at least 65,535 that the file grants to the user."""
    try:
        names = {str(uid), pwd.getpwuid(uid).pw_name}
    except KeyError:
        names = {str(uid)}
    try:
        with open(path) as file:
            rows = [line.strip().split(":") for line in file]
    except OSError:
        return None
    return next((int(r[1]) for r in rows if len(r) == 3 and r[0] in names and int(r[2]) >= RANGE - 1), None)


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)
