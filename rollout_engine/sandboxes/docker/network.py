"""A socket that listens on a container's own 127.0.0.1: opened inside its network namespace, served by the host."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
from pathlib import Path

from rollout_engine.errors import SandboxDied, SandboxError, SandboxUnavailable
from rollout_engine.sandboxes.base import Listener
from rollout_engine.sandboxes.docker.engine import Engine

LISTEN_S = 30.0
"""The helper that enters the namespace takes milliseconds; a machine that cannot start it in this time is stuck."""

_HELPER = """
import ctypes, os, socket, sys
pid, port, channel = sys.argv[1], int(sys.argv[2]), socket.socket(fileno=int(sys.argv[3]))
libc = ctypes.CDLL(None, use_errno=True)
with open(f"/proc/{pid}/ns/net") as namespace:
    if libc.setns(namespace.fileno(), 0x40000000):
        number = ctypes.get_errno()
        raise SystemExit(f"{number} setns: {os.strerror(number)}")
try:
    server = socket.create_server(("127.0.0.1", port), backlog=128)
except OSError as error:
    raise SystemExit(f"{error.errno} listen: {error.strerror}")
socket.send_fds(channel, [b"."], [server.fileno()])
"""
"""A process of its own: a namespace is entered by a thread, and no thread of the host's may be left in another one."""


async def listen(engine: Engine, container: str, port: int) -> Listener:
    """A listening socket of the container's. Needs root and a daemon of this machine.

    Raises SandboxUnavailable where that is not so, SandboxDied, and OSError where the port is taken.
    """
    found = await engine.ask("inspect", lambda api: api.inspect_container(container))
    pid = int(found["State"].get("Pid") or 0)
    if not pid:
        raise SandboxDied(f"docker: the container {container[:12]} does not run")
    opening = asyncio.ensure_future(asyncio.to_thread(_listen, str(found["Id"]), pid, port))
    try:
        sock = await asyncio.shield(opening)
    except asyncio.CancelledError:
        opening.add_done_callback(_forgo)  # a thread cannot be cancelled: what it opens is closed when it comes
        raise
    return Listener(sock, int(sock.getsockname()[1]))


def _forgo(opening: asyncio.Future[socket.socket]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()


def _listen(container: str, pid: int, port: int) -> socket.socket:
    _check_whose(container, pid)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        argv = [sys.executable, "-I", "-S", "-c", _HELPER, str(pid), str(port), str(theirs.fileno())]
        try:
            done = subprocess.run(argv, pass_fds=(theirs.fileno(),), capture_output=True, env={}, timeout=LISTEN_S)
        except subprocess.TimeoutExpired as error:
            raise SandboxError(f"docker: no listening socket within {LISTEN_S:g} s") from error
        if done.returncode:
            raise _failure(done.stderr.decode(errors="replace").strip())
        fds = socket.recv_fds(ours, 1, 1)[1]
    return socket.socket(fileno=fds[0])


def _check_whose(container: str, pid: int) -> None:
    """A daemon whose socket was led here from another machine names processes that are others, or nobody's, here."""
    for told in ("cgroup", "mountinfo"):  # the files that Docker mounts into a container lie in a folder of its name
        with contextlib.suppress(OSError):
            if container in Path(f"/proc/{pid}/{told}").read_text(errors="replace"):
                return
    raise SandboxUnavailable(
        f"docker: process {pid} is not the container's: the daemon counts processes that are not this machine's; "
        "run beside the daemon, or use the namespace sandbox"
    )


def _failure(said: str) -> Exception:
    number, _, text = said.rpartition("\n")[2].partition(" ")
    if text.startswith("listen: ") and number.isdigit():
        return OSError(int(number), text)
    if text.startswith("setns: "):
        return SandboxUnavailable(f"docker: a container's network can be entered by root only ({text})")
    return SandboxError(f"docker: no listening socket: {said[-500:]}")
