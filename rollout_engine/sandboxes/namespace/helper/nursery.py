"""A fork of the launcher that does nothing but fork boxes, as children of the launcher.

A fork shares pages with its parent until either writes to them. The launcher writes to many between two boxes;
this process to hardly any, so that boxes keep sharing with it and with each other: a quarter of their memory.
"""

from __future__ import annotations

import errno
import gc
import os
import signal
import socket
import struct
from typing import NoReturn

from rollout_engine.sandboxes.namespace.helper import box, wire
from rollout_engine.sandboxes.namespace.helper import syscalls as sys

_CLONE_PARENT = 0x8000
_INT = struct.Struct("i")
"""All that is said to the nursery, and by it: every page that it writes to is one more that a box does not share."""
_ANCILLARY = socket.CMSG_SPACE(_INT.size)


class Nursery:
    """The launcher's side. Raises wire.Closed where the process is gone, which is the launcher's end too."""

    def __init__(self, lifeline: int, library: int, seccomp: bytes, serve: box.Serve) -> None:
        """Boxes keep the two descriptors: one ends with the launcher, one is of the standard library (-1: none)."""
        gc.collect()
        gc.freeze()
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if self.pid == 0:
            _serve(theirs, lifeline, library, seccomp, serve)
        theirs.close()

    def birth(self, flags: int) -> tuple[int, socket.socket]:
        """A new process in new namespaces, and the socket on which it waits to be told what it is."""
        go, come = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with come:
            socket.send_fds(self._sock, [_INT.pack(flags)], [come.fileno()])
        said = self._sock.recv(_INT.size)
        if not said:
            raise wire.Closed
        (pid,) = _INT.unpack(said)
        if pid < 0:
            go.close()
            raise OSError(-pid, f"clone: {os.strerror(-pid)}")
        return pid, go


def _serve(sock: socket.socket, lifeline: int, library: int, seccomp: bytes, serve: box.Serve) -> NoReturn:
    try:
        box.close_others({sock.fileno(), lifeline, library})
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # for boxes: this process has no children
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)  # the first process of a box gets no signal that it does not catch
        gc.disable()
        while True:
            asked, ancillary, _, _ = sock.recvmsg(_INT.size, _ANCILLARY, socket.MSG_CMSG_CLOEXEC)
            if not asked:
                break
            (come,) = _INT.unpack(ancillary[0][2])
            try:
                pid = sys.clone(_INT.unpack(asked)[0] | _CLONE_PARENT)
            except OSError as error:
                pid = -(error.errno or errno.EIO)
            if pid == 0:
                box.live(serve, come, lifeline, library, seccomp)
            sock.send(_INT.pack(pid))
            os.close(come)
    finally:
        os._exit(0)
