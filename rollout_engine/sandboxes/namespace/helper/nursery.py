"""A fork of the launcher that does nothing but fork boxes, as children of the launcher.

A fork shares pages with its parent until either writes to them. The launcher writes to many between two boxes;
this process to hardly any, so that boxes keep sharing with it and with each other: a quarter of their memory.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
from typing import NoReturn

from rollout_engine.sandboxes.namespace.helper import box, wire
from rollout_engine.sandboxes.namespace.helper import syscalls as sys

_CLONE_PARENT = 0x8000


class Nursery:
    """The launcher's side. Raises wire.Closed where the process is gone, which is the launcher's end too."""

    def __init__(self, lifeline: int, seccomp: bytes, serve: box.Serve) -> None:
        gc.collect()
        gc.freeze()
        self._sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if self.pid == 0:
            _serve(theirs, lifeline, seccomp, serve)
        theirs.close()

    def birth(self, flags: int) -> tuple[int, socket.socket]:
        """A new process in new namespaces, and the socket on which it waits to be told what it is."""
        go, come = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with come:
            wire.send(self._sock, {"flags": flags}, b"", (come.fileno(),))
        said = wire.receive_wait(self._sock).header
        if "errno" in said:
            go.close()
            raise OSError(said["errno"], f"clone: {os.strerror(said['errno'])}")
        return said["pid"], go


def _serve(sock: socket.socket, lifeline: int, seccomp: bytes, serve: box.Serve) -> NoReturn:
    try:
        box.close_others({sock.fileno(), lifeline})
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)  # the first process of a box gets no signal that it does not catch
        gc.disable()
        while True:
            message = wire.receive_wait(sock)
            try:
                pid = sys.clone(message.header["flags"] | _CLONE_PARENT)
            except OSError as error:
                wire.send(sock, {"errno": error.errno})
            else:
                if pid == 0:
                    box.live(serve, message.fds[0], lifeline, seccomp)
                wire.send(sock, {"pid": pid})
            message.drop()
    finally:
        os._exit(0)
