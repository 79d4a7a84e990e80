"""What of the namespace sandbox works on this host, and what to do about what does not."""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollout_engine.errors import SandboxError
from rollout_engine.sandboxes.base import SandboxSpec
from rollout_engine.sandboxes.namespace import seccomp
from rollout_engine.sandboxes.namespace.helper import syscalls
from rollout_engine.sandboxes.namespace.provider import NamespaceProvider
from rollout_engine.sandboxes.namespace.reaper import leftovers


@dataclass(frozen=True, slots=True)
class Capability:
    """One finding: `works`, what was seen, and what to do where it does not."""

    name: str
    works: bool
    found: str
    fix: str = ""


async def capabilities() -> list[Capability]:
    """Tries everything out with one sandbox. The first entry says whether the backend can be used at all."""
    provider = NamespaceProvider()
    try:
        facts = await provider.facts()
        await (await provider.open(SandboxSpec())).close()
    except SandboxError as error:
        return [Capability("namespace sandboxes", False, str(error), _why_not()), *_always()]
    finally:
        await provider.close()
    mode = _MODES[facts["mode"]]
    return [
        Capability("namespace sandboxes", True, mode[0], mode[1]),
        _limits(facts),
        *_ids(facts),
        *_always(),
        await asyncio.to_thread(_left),
    ]


_MODES = {
    "ranges": ("as root, with 65,536 host ids of its own per sandbox", ""),
    "shared": (
        "as root, all sandboxes with the same host ids, and the host's /usr read-only",
        "Linux 6.6 or later gives each sandbox ids of its own and a writable copy of /usr",
    ),
    "plain": (
        "as root without user namespaces: a sandbox's root is the host's root with few capabilities",
        "raise user.max_user_namespaces (sysctl) so that a sandbox's root is nobody on the host",
    ),
    "user": ("as an ordinary user, in user namespaces; the host's /usr is read-only", ""),
}


def _limits(facts: dict[str, Any]) -> Capability:
    missing = [name for name in ("memory", "pids", "cpu") if name not in facts["held"]]
    if not missing:
        return Capability("limits", True, "memory, processes and cpu by control groups, disk and inodes by tmpfs")
    found = (
        f"no control group for {', '.join(missing)}: memory by rlimit per process, processes by pid_max, cpu not at all"
    )
    fix = "run as root, or in a cgroup that is delegated to this user (systemd: Delegate=yes)"
    return Capability("limits", False, found, fix)


def _ids(facts: dict[str, Any]) -> list[Capability]:
    if facts["mode"] != "user":
        return []
    several = facts["ids"] > 1
    found = f"{facts['ids']} id(s) in a sandbox"
    fix = "install uidmap (newuidmap, newgidmap) and give this user 65,536 ids in /etc/subuid and /etc/subgid"
    return [Capability("other users in a sandbox", several, found, "" if several else fix)]


def _always() -> list[Capability]:
    filtered = seccomp.program() is not None
    python = os.path.exists("/usr/bin/python3")
    return [
        Capability(
            "system call filter",
            filtered,
            "compiled by libseccomp" if filtered else "absent: sandboxes reach more of the kernel",
            "" if filtered else "pip install pyseccomp, and the system's libseccomp2",
        ),
        Capability(
            "python in sandboxes without an image",
            python,
            "/usr/bin/python3" if python else "none: only the host's /usr is visible there",
            "" if python else "install the distribution's python3, or give the task an image",
        ),
    ]


def _left() -> Capability:
    left = leftovers()
    found = f"{len(left)} control groups of dead launchers" if left else "nothing"
    return Capability("leftovers", not left, found, "the next start of a launcher removes them" if left else "")


def _why_not() -> str:
    """The usual reasons, most likely first."""
    if not syscalls.KNOWN_MACHINE:
        return "only x86_64 and aarch64 are supported; use the docker sandbox"
    if _read("/proc/sys/user/max_user_namespaces") == "0":
        return "sysctl user.max_user_namespaces=15000"
    if _read("/proc/sys/kernel/unprivileged_userns_clone") == "0" and os.geteuid() != 0:
        return "sysctl kernel.unprivileged_userns_clone=1, or run as root"
    if _read("/proc/sys/kernel/apparmor_restrict_unprivileged_userns") == "1" and os.geteuid() != 0:
        return "sysctl kernel.apparmor_restrict_unprivileged_userns=0, or run as root"
    if Path("/.dockerenv").exists() or Path("/run/.containerenv").exists():
        return "in a container: start it with --privileged, or with SYS_ADMIN and an unmasked /proc"
    return "Linux 5.12 or later as root, 6.6 or later as an ordinary user; else use the docker sandbox"


def _read(path: str) -> str:
    with contextlib.suppress(OSError):
        return Path(path).read_text().strip()
    return ""
