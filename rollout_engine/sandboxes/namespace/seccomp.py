"""The system call filter of boxes, compiled once by libseccomp where the package pyseccomp is installed."""

from __future__ import annotations

import errno
import functools
import os
import tempfile
from typing import Any

from rollout_engine.sandboxes.namespace.helper import syscalls as sys

_DENIED = """
acct add_key adjtimex bpf clock_adjtime clock_settime create_module delete_module fanotify_init finit_module fsconfig
fsmount fsopen fspick get_kernel_syms init_module io_uring_enter io_uring_register io_uring_setup ioperm iopl kcmp
kexec_file_load kexec_load keyctl lookup_dcookie mbind migrate_pages mount mount_setattr move_mount move_pages
name_to_handle_at nfsservctl open_by_handle_at open_tree perf_event_open personality pidfd_getfd pivot_root
process_madvise process_vm_readv process_vm_writev ptrace query_module quotactl quotactl_fd reboot request_key
set_mempolicy setdomainname sethostname setns settimeofday stime swapoff swapon sysfs _sysctl syslog umount umount2
unshare uselib userfaultfd ustat vhangup vm86 vm86old
"""
_NEW = (
    sys.CLONE_NEWNS | sys.CLONE_NEWCGROUP | sys.CLONE_NEWUTS | sys.CLONE_NEWIPC | sys.CLONE_NEWUSER | sys.CLONE_NEWPID
    | sys.CLONE_NEWNET
)  # fmt: skip
_PR_SET_PDEATHSIG, _SIGKILL = 1, 9
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C


@functools.cache
def program(*, ends_with_parent: bool = False) -> bytes | None:
    """The filter as the kernel takes it; None where it cannot be made here (see `rollout doctor`).

    `ends_with_parent`: whoever asked to be killed with its parent cannot take that back.
    """
    try:
        import pyseccomp  # type: ignore[import-untyped, unused-ignore]
    except (ImportError, RuntimeError, OSError):
        return None
    rules = _build(pyseccomp)
    if ends_with_parent:
        wish, kill = pyseccomp.Arg(0, pyseccomp.EQ, _PR_SET_PDEATHSIG), pyseccomp.Arg(1, pyseccomp.NE, _SIGKILL)
        _deny(pyseccomp, rules, errno.EPERM, "prctl", wish, kill)
    return _export(rules)


def _build(lib: Any) -> Any:
    rules = lib.SyscallFilter(lib.ALLOW)
    for name in _DENIED.split():
        _deny(lib, rules, errno.EPERM, name)
    _deny(lib, rules, errno.ENOSYS, "clone3")  # its flags are out of reach; libc then takes clone
    for flag in (bit for bit in (1 << n for n in range(32)) if bit & _NEW):
        _deny(lib, rules, errno.EPERM, "clone", lib.Arg(0, lib.MASKED_EQ, flag, flag))
    for request in (_TIOCSTI, _TIOCLINUX):
        _deny(lib, rules, errno.EPERM, "ioctl", lib.Arg(1, lib.MASKED_EQ, 0xFFFFFFFF, request))
    return rules


def _deny(lib: Any, rules: Any, number: int, name: str, *args: Any) -> None:
    try:
        rules.add_rule(lib.ERRNO(number), name, *args)
    except (ValueError, OSError, RuntimeError):
        return  # a call that this architecture or library does not know


def _export(rules: Any) -> bytes:
    with tempfile.TemporaryFile() as file:
        rules.export_bpf(file)
        file.seek(0, os.SEEK_SET)
        return file.read()
