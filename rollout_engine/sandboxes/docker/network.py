"""A socket that listens on a container's own 127.0.0.1: opened inside its network namespace, served by the host."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys

from rollout_engine.errors import SandboxDied, SandboxError, SandboxUnavailable
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


async def listen(engine: Engine, container: str, port: int) -> socket.socket:
    """A listening socket of the container's. Needs root and a daemon on this machine.

    Raises SandboxUnavailable where that is not so, SandboxDied, and OSError where the port is taken.
    """
    if not engine.is_local:
        raise SandboxUnavailable("docker: the network of a container on another machine cannot be entered")
    found = await engine.ask("inspect", lambda api: api.inspect_container(container))
    pid = int(found["State"].get("Pid") or 0)
    if not pid:
        raise SandboxDied(f"docker: the container {container[:12]} does not run")
    return await asyncio.to_thread(_listen, pid, port)


def _listen(pid: int, port: int) -> socket.socket:
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


def _failure(said: str) -> Exception:
    number, _, text = said.rpartition("\n")[2].partition(" ")
    if text.startswith("listen: ") and number.isdigit():
        return OSError(int(number), text)
    if text.startswith("setns: "):
        return SandboxUnavailable(f"docker: a container's network can be entered by root only ({text})")
    return SandboxError(f"docker: no listening socket: {said[-500:]}")
