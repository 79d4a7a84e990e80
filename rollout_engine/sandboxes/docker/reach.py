"""By which way programs in a container reach their host: decided from what is known of the daemon and this process."""

from __future__ import annotations

import os
import socket
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from rollout_engine.sandboxes.docker.hijack import Address

Way: TypeAlias = Literal["setns", "socket", "stream"]
"""The best first: a listening socket that is opened inside the container's network namespace; a Unix socket of this
host that is mounted into the container, to which a forwarder there leads the port; a forwarder that carries its
connections over its own input and output, which the Engine API leads here."""

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
    """`way` None: there is none. `why` says what spoke against the better ones, or against all."""

    way: Way | None
    why: str = ""


FIX = "use the namespace sandbox for agent programs, or run as root beside the daemon"
NO_DAEMON = Reach(None, "the daemon cannot be reached")
ELSEWHERE = "the daemon is on another machine"
NO_COMPILER = "no forwarder can be compiled here for the daemon's machine (install gcc and libc6-dev)"


def reach(facts: Facts, wanted: Way | None = None) -> Reach:
    """The way to take; `wanted` leaves no choice."""
    against: dict[Way, str] = {
        "setns": _against_setns(facts),
        "socket": _against_socket(facts),
        "stream": "" if facts.supervised else NO_COMPILER,
    }
    tried: list[Way] = [wanted] if wanted is not None else list(against)
    found = next((way for way in tried if not against[way]), None)
    better = tried if found is None else tried[: tried.index(found)]
    return Reach(found, ", and ".join(dict.fromkeys(against[way] for way in better)))


def _against_setns(facts: Facts) -> str:
    if not facts.local:
        return ELSEWHERE
    if not facts.privileged:
        return "entering a container's network takes root"
    return "" if facts.seen else "the daemon's processes are not seen from here"


def _against_socket(facts: Facts) -> str:
    if not facts.local:
        return ELSEWHERE
    return "" if facts.supervised else NO_COMPILER


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
