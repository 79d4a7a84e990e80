"""By which way programs in a container reach their host: decided from what is known of the daemon and this process."""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from rollout_engine.sandboxes.docker.hijack import Address

Way: TypeAlias = Literal["setns", "socket"]
"""A listening socket that is opened inside the container's network namespace; or a Unix socket of this host that is
mounted into the container, to which a forwarder there leads the port."""

_CREDENTIALS = struct.Struct("iII")
_SYS_PTRACE, _SYS_ADMIN = 1 << 19, 1 << 21
_PROBE_S = 10.0


@dataclass(frozen=True, slots=True)
class Facts:
    """What the way depends on."""

    local: bool
    """The daemon listens on a Unix socket, so it may share this machine's files."""
    seen: bool
    """The process behind that socket is one of this process's pid namespace."""
    privileged: bool
    """This process may enter another's network namespace, also one of a rootless daemon."""
    supervised: bool
    """The supervisor's program, which is the forwarder too, can be made for the daemon's machine."""


@dataclass(frozen=True, slots=True)
class Reach:
    """`way` None: there is none. `why` says what spoke against `setns`, or against both."""

    way: Way | None
    why: str = ""


FIX = "use the namespace sandbox for agent programs, or run as root beside the daemon"
NO_DAEMON = Reach(None, "the daemon cannot be reached")
ELSEWHERE = "the daemon is on another machine, where no socket of this one can be mounted"
NO_COMPILER = "the forwarder cannot be compiled (install gcc and libc6-dev)"


def reach(facts: Facts, wanted: Way | None = None) -> Reach:
    """The way to take; `wanted` leaves no choice."""
    if not facts.local:
        return Reach(None, ELSEWHERE)
    against = _against_setns(facts)
    if wanted != "socket" and not against:
        return Reach("setns")
    if wanted == "setns":
        return Reach(None, against)
    if not facts.supervised:
        return Reach(None, f"{against}, and {NO_COMPILER}" if against else NO_COMPILER)
    return Reach("socket", against)


def _against_setns(facts: Facts) -> str:
    if not facts.privileged:
        return "entering a container's network takes root"
    return "" if facts.seen else "the daemon's processes are not seen from here"


def facts_of(address: Address, supervised: bool) -> Facts:
    """Blocks for as long as the daemon's socket takes to be connected."""
    return Facts(
        local=address.path is not None,
        seen=address.path is not None and _peer(address.path) > 0,
        privileged=_is_privileged(),
        supervised=supervised,
    )


def _peer(path: str) -> int:
    """The process that listens on a Unix socket; 0 for one of another pid namespace, or of nobody."""
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(_PROBE_S)
            probe.connect(path)
            found = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            return int(_CREDENTIALS.unpack(found)[0])
    except OSError:
        return 0


def _is_privileged() -> bool:
    """To open the namespace of a process that is not dumpable, and to enter it."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return os.geteuid() == 0
    [held] = [int(line.split()[1], 16) for line in status.splitlines() if line.startswith("CapEff:")]
    return held & _SYS_PTRACE != 0 and held & _SYS_ADMIN != 0
