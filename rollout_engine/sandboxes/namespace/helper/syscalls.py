"""The few system calls that the standard library does not offer, with errors as OSError."""

from __future__ import annotations

import ctypes
import os
import signal
import struct

_libc = ctypes.CDLL(None, use_errno=True)
# Looked up once: every box would pay for it, in time and in pages that it no longer shares.
_fork = ctypes.PyDLL(None, use_errno=True).syscall
_after_fork = ctypes.pythonapi.PyOS_AfterFork_Child
_syscall, _mount, _prctl, _umount2 = _libc.syscall, _libc.mount, _libc.prctl, _libc.umount2
_ARM = os.uname().machine == "aarch64"
KNOWN_MACHINE = os.uname().machine in ("x86_64", "aarch64")

_CLONE = 220 if _ARM else 56
_PIVOT_ROOT = 41 if _ARM else 155
_CAPSET = 91 if _ARM else 126
_SOCKET, _IOCTL = (198, 29) if _ARM else (41, 16)
_OPEN_TREE, _MOVE_MOUNT, _FSOPEN, _FSCONFIG, _FSMOUNT, _OPENAT2, _MOUNT_SETATTR = 428, 429, 430, 431, 432, 437, 442

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 32, 4096, 16384, 1 << 18
MNT_DETACH = 2

MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV, MOUNT_ATTR_NOEXEC, MOUNT_ATTR_IDMAP = 1, 2, 4, 8, 0x100000

RESOLVE_NO_XDEV, RESOLVE_NO_MAGICLINKS, RESOLVE_NO_SYMLINKS, RESOLVE_BENEATH, RESOLVE_IN_ROOT = 1, 2, 4, 8, 16

CAP_CHOWN, CAP_DAC_OVERRIDE, CAP_FOWNER, CAP_FSETID, CAP_KILL = 0, 1, 3, 4, 5
CAP_SETGID, CAP_SETUID, CAP_SETPCAP, CAP_NET_BIND_SERVICE, CAP_SYS_ADMIN = 6, 7, 8, 10, 21

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP = 1, 4, 22
PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 24, 38, 47, 4

_AF_INET, _SOCK_DGRAM, _SIOCSIFFLAGS = 2, 0o2000002, 0x8914
_LO_UP = struct.pack("16sh14x", b"lo", 0x1 | 0x40)
"""A request that names the interface `lo`, and sets it up and running."""

_AT_EMPTY_PATH, _AT_RECURSIVE = 0x1000, 0x8000
_OPEN_TREE_CLONE = 1
_FSOPEN_CLOEXEC, _FSMOUNT_CLOEXEC = 1, 1
_FSCONFIG_SET_FLAG, _FSCONFIG_SET_STRING, _FSCONFIG_CREATE = 0, 1, 6
_MOVE_MOUNT_F_EMPTY_PATH, _MOVE_MOUNT_T_SYMLINKS = 4, 0x10


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def _call(what: str, number: int, *args: object) -> int:
    wide = [ctypes.c_long(arg) if isinstance(arg, int) else arg for arg in args]
    return _check(int(_syscall(ctypes.c_long(number), *wide)), what)


def clone(flags: int) -> int:
    """fork() into new namespaces: the child (0) starts in them, pid 1 where CLONE_NEWPID is among the flags.

    Only for a process with one thread. One fork where unshare would take two, and a fresh user namespace
    whose mapping the parent can still write.
    """
    pid = _check(int(_fork(_CLONE, flags | int(signal.SIGCHLD), 0, 0, 0, 0)), "clone")
    if pid == 0:
        _after_fork()
    return pid


def unshare(flags: int) -> None:
    _check(_libc.unshare(flags), "unshare")


def setns(fd: int, kind: int) -> None:
    _check(_libc.setns(fd, kind), "setns")


def loopback_up() -> None:
    """Brings 127.0.0.1 up in a network namespace that has nothing else.

    Not by the module `socket`: a new box would write to many pages that it shares until then.
    """
    fd = _call("socket", _SOCKET, _AF_INET, _SOCK_DGRAM, 0)
    _call("ioctl", _IOCTL, fd, _SIOCSIFFLAGS, _LO_UP)
    os.close(fd)


def prctl(option: int, arg: int = 0, arg3: int = 0) -> None:
    _check(
        _prctl(option, ctypes.c_ulong(arg), ctypes.c_ulong(arg3), ctypes.c_ulong(0), ctypes.c_ulong(0)),
        f"prctl {option}",
    )


def bound_capabilities(kept: tuple[int, ...]) -> None:
    """Drops all others from the bounding set: no program started later can have them."""
    call, option, last = _prctl, ctypes.c_int(PR_CAPBSET_DROP), 64
    for cap in range(last):
        if cap not in kept and call(option, cap, 0, 0, 0) < 0:
            break


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    data = options.encode() if options else None
    _check(
        _mount(os.fsencode(source), os.fsencode(target), kind.encode(), ctypes.c_ulong(flags), data),
        f"mount {kind} on {target}",
    )


def umount(target: str, flags: int = MNT_DETACH) -> None:
    _check(_umount2(os.fsencode(target), flags), f"umount {target}")


def pivot_root(new: str, old: str) -> None:
    _call("pivot_root", _PIVOT_ROOT, os.fsencode(new), os.fsencode(old))


def filesystem(kind: str, options: dict[str, str], flags: tuple[str, ...], attributes: int) -> int:
    """A detached mount of a new file system; it is in no mount table and ends with its descriptor."""
    context = _call(f"fsopen {kind}", _FSOPEN, kind.encode(), _FSOPEN_CLOEXEC)
    try:
        for key, value in options.items():
            _call(f"{kind} {key}", _FSCONFIG, context, _FSCONFIG_SET_STRING, key.encode(), value.encode(), 0)
        for flag in flags:
            _call(f"{kind} {flag}", _FSCONFIG, context, _FSCONFIG_SET_FLAG, flag.encode(), None, 0)
        _call(f"{kind} create", _FSCONFIG, context, _FSCONFIG_CREATE, None, None, 0)
        return _call(f"fsmount {kind}", _FSMOUNT, context, _FSMOUNT_CLOEXEC, attributes)
    finally:
        os.close(context)


def open_tree(fd: int, path: str = "", *, recursive: bool = False) -> int:
    """A detached copy of the mount at a path below `fd` (or of `fd` itself), with that path as its root."""
    flags = _OPEN_TREE_CLONE | os.O_CLOEXEC | (_AT_RECURSIVE if recursive else 0) | (0 if path else _AT_EMPTY_PATH)
    return _call(f"open_tree {path or fd}", _OPEN_TREE, fd, os.fsencode(path), flags)


class _MountAttr(ctypes.Structure):
    _fields_ = (
        ("set", ctypes.c_uint64),
        ("clear", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns", ctypes.c_uint64),
    )


def set_mount(fd: int, attributes: int, userns: int | None = None, *, recursive: bool = False) -> None:
    """Sets attributes on a detached mount; with `userns`, its files are owned as that namespace maps them."""
    idmap = MOUNT_ATTR_IDMAP if userns is not None else 0
    attr = _MountAttr(attributes | idmap, 0, 0, userns or 0)
    flags = _AT_EMPTY_PATH | (_AT_RECURSIVE if recursive else 0)
    _call("mount_setattr", _MOUNT_SETATTR, fd, b"", flags, ctypes.byref(attr), ctypes.sizeof(attr))


def attach(fd: int, target: str) -> None:
    """Puts a detached mount at a path."""
    flags = _MOVE_MOUNT_F_EMPTY_PATH | _MOVE_MOUNT_T_SYMLINKS
    _call(f"move_mount to {target}", _MOVE_MOUNT, fd, b"", -100, os.fsencode(target), flags)


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


def open_inside(root: int, path: str, flags: int, resolve: int = RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS) -> int:
    """Opens a path as if `root` were the root of everything: no link and no `..` leads out of it."""
    how = _OpenHow(flags | os.O_CLOEXEC, 0, resolve)
    number = _syscall(
        ctypes.c_long(_OPENAT2),
        ctypes.c_long(root),
        os.fsencode(path),
        ctypes.byref(how),
        ctypes.c_long(ctypes.sizeof(how)),
    )
    return _check(int(number), path)


def capabilities(caps: tuple[int, ...]) -> tuple[ctypes.Array[ctypes.c_uint32], ctypes.Array[ctypes.c_uint32]]:
    """These, effective and permitted, and none of them inheritable, as `capset` takes them."""
    mask = sum(1 << cap for cap in caps)
    low, high = mask & 0xFFFFFFFF, mask >> 32
    return (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)(low, low, 0, high, high, 0)


def capset(wanted: tuple[ctypes.Array[ctypes.c_uint32], ctypes.Array[ctypes.c_uint32]]) -> None:
    """Keeps these capabilities and no others."""
    _call("capset", _CAPSET, *wanted)


class _SockFilters(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filters", ctypes.c_char_p))


def load_seccomp(program: bytes) -> None:
    """Installs a compiled filter for this process and all that come from it. Needs no_new_privs."""
    filters = _SockFilters(len(program) // 8, program)
    _check(_prctl(PR_SET_SECCOMP, ctypes.c_ulong(2), ctypes.byref(filters), 0, 0), "seccomp")


def rename_process(name: str) -> None:
    """Overwrites the command line, which boxes inherit and show, and which tells paths of the host."""
    with open("/proc/self/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    if 0 < end - start < 2**20:
        ctypes.memset(start, 0, end - start)
        ctypes.memmove(start, name.encode(), min(len(name), end - start - 1))
