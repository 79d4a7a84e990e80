"""Unpacks an archive from standard input into a directory that it makes its root first: no name leads out of it.

A process of its own, started as `python -I -S -c ... main(target, owner)` by the engine.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import sys as python
import tarfile

from rollout_engine.sandboxes.namespace.helper import syscalls as sys

_MODULES = (bz2, gzip, lzma)
"""tarfile imports these when it needs them, which would be too late."""


def main(target: str, owner: int) -> None:
    """`owner` is what id 0 of the archive becomes; -1: everything belongs to the caller."""
    stream = python.stdin.buffer
    _lock_in(target)
    os.umask(0)
    trusted = {"filter": "fully_trusted"} if hasattr(tarfile, "data_filter") else {}
    with tarfile.open(fileobj=stream, mode="r|*") as archive:
        for member in archive:
            member.name = member.name.lstrip("/")
            if not member.name or member.ischr() or member.isblk() or member.isfifo():
                continue
            member.uname = member.gname = ""
            if owner < 0:
                member.uid, member.gid = os.getuid(), os.getgid()
                member.mode |= 0o700 if member.isdir() else 0o400
            else:
                member.uid, member.gid = member.uid + owner, member.gid + owner
            archive.extract(member, "/", numeric_owner=True, **trusted)  # type: ignore[arg-type]


def _lock_in(target: str) -> None:
    if os.geteuid() != 0:
        uid, gid = os.getuid(), os.getgid()
        sys.unshare(sys.CLONE_NEWUSER)
        for path, text in (("setgroups", "deny"), ("gid_map", f"{gid} {gid} 1"), ("uid_map", f"{uid} {uid} 1")):
            with open(f"/proc/self/{path}", "w") as file:
                file.write(text)
    os.chroot(target)
    os.chdir("/")
