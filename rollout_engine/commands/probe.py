"""Tries what the namespace sandbox does: new namespaces, a private tmpfs, an overlay. Run alone, by `rollout doctor`.

Standard library only, and not imported by anything: what it does to its own process cannot be undone.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import tempfile

NEWNS, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
BOX = NEWNS | NEWUTS | NEWIPC | NEWPID | NEWNET
PRIVATE = 0x40000 | 0x4000  # MS_PRIVATE | MS_REC

libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def mount(source: str, target: str, kind: str | None, flags: int = 0, data: str = "") -> None:
    name = kind.encode() if kind else None
    check(libc.mount(source.encode(), target.encode(), name, flags, data.encode()), f"mount {kind or target}")


def enter() -> str:
    """New namespaces, with a user namespace where that is possible."""
    user, group = os.getuid(), os.getgid()
    try:
        check(libc.unshare(NEWUSER | BOX), "unshare with a user namespace")
        with open("/proc/self/setgroups", "w") as file:
            file.write("deny")
        for name, number in (("uid_map", user), ("gid_map", group)):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(f"0 {number} 1")
    except OSError:
        if user != 0:
            raise
        check(libc.unshare(BOX), "unshare as root")
        return "as root, without user namespaces"
    return "with user namespaces"


def overlay(scratch: str) -> None:
    """An overlay on a tmpfs, seen by this process alone."""
    mount("none", "/", None, PRIVATE)
    mount("tmpfs", scratch, "tmpfs")
    paths = [os.path.join(scratch, name) for name in ("lower", "upper", "work", "merged")]
    for path in paths:
        os.mkdir(path)
    lower, upper, work, merged = paths
    mount("overlay", merged, "overlay", 0, f"lowerdir={lower},upperdir={upper},workdir={work}")


def main() -> int:
    scratch = tempfile.mkdtemp(prefix="rollout-doctor-")
    # The mounts are this process's own: its parent removes the empty directory when they are gone.
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BrokenPipeError):
            os._exit(probe(scratch))
        os._exit(1)
    _, status = os.waitpid(child, 0)
    os.rmdir(scratch)
    return os.waitstatus_to_exitcode(status)


def probe(scratch: str) -> int:
    try:
        how = enter()
        overlay(scratch)
    except OSError as error:
        print(f"not possible: {error.strerror}", flush=True)
        return 1
    print(f"mount, pid, network, ipc and uts can be made {how}; tmpfs and overlay mount", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
