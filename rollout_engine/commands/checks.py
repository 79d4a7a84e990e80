"""What this machine can do, found out by trying: each check is one line with ok, warn or fail and what to do."""

from __future__ import annotations

import asyncio
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from rollout_engine.commands import text
from rollout_engine.machine import CGROUP, DESCRIPTORS_BASE, DESCRIPTORS_PER_ROLLOUT, cpu_share, number_in

if TYPE_CHECKING:
    from rollout_engine.sandboxes.docker.hijack import Address

Level: TypeAlias = Literal["ok", "warn", "fail"]

PROBE_S = 10.0
"""No check but that of sandboxes and of Ray takes longer than this."""
SANDBOX_S = 60.0
"""Making the one sandbox that is tried."""
WANTED_SLOTS = 256
"""Rollouts at once that a host has by default."""
LOW_DISK, NO_DISK = 10 * 2**30, 2**30
LOW_MEMORY = 2 * 2**30
PACKAGES = ("pydantic", "pyarrow", "numpy", "httpx", "httpx-aiohttp", "aiohttp", "typer", "rich", "uvloop")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    area: str
    level: Level
    found: str
    fix: str = ""


def python() -> Iterator[Finding]:
    found = f"{platform.python_version()} at {sys.executable}"
    yield Finding("python", "ok", found)
    missing = [package for package in PACKAGES if _version(package) is None]
    names = ", ".join(f"{package} {_version(package)}" for package in PACKAGES if package not in missing)
    engine = f"rollout-engine {_version('rollout-engine') or 'from its source tree'}"
    if missing:
        yield Finding("packages", "fail", f"{', '.join(missing)} not installed", "pip install rollout-engine")
    else:
        yield Finding("packages", "ok", f"{engine}, {names}")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def machine() -> Iterator[Finding]:
    cores, share = len(os.sched_getaffinity(0)), cpu_share()
    limit = f", a cgroup allows {share:g} of them" if share is not None and share < cores else ""
    yield Finding("cores", "ok", f"{cores} of {os.cpu_count()}{limit}")
    memory = _meminfo()
    total, free = memory.get("MemTotal", 0), memory.get("MemAvailable", 0)
    allowed = number_in(CGROUP / "memory.max") or number_in(CGROUP / "memory/memory.limit_in_bytes")
    limit = f", a cgroup allows {text.size(allowed)}" if allowed is not None and allowed < total else ""
    found = f"{text.size(free)} free of {text.size(total)}{limit}"
    low = min(free, allowed or free) < LOW_MEMORY
    yield Finding("memory", "warn" if low else "ok", found, "lower host.slots (--slots)" if low else "")
    yield from _descriptors()
    yield from _disk(Path.cwd())


def _meminfo() -> dict[str, int]:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}


def _descriptors() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    fits = max((hard - DESCRIPTORS_BASE) // DESCRIPTORS_PER_ROLLOUT, 0)
    found = f"soft {soft:,}, hard {hard:,}: room for {fits:,} rollouts at once"
    enough = fits >= WANTED_SLOTS
    needed = DESCRIPTORS_BASE + DESCRIPTORS_PER_ROLLOUT * WANTED_SLOTS
    fix = f"raise the hard limit (ulimit -Hn {needed}, LimitNOFILE), or lower host.slots (--slots)"
    yield Finding("descriptors", "ok" if enough else "fail", found, "" if enough else fix)


def _disk(directory: Path) -> Iterator[Finding]:
    free = shutil.disk_usage(directory).free
    found = f"{text.size(free)} free in {directory}"
    if not os.access(directory, os.W_OK):
        yield Finding("disk", "fail", f"{directory} cannot be written", "change to a directory of yours, or use -o")
    elif free < LOW_DISK:
        level: Level = "fail" if free < NO_DISK else "warn"
        yield Finding("disk", level, found, "free some space, or put runs elsewhere with -o")
    else:
        yield Finding("disk", "ok", found)


def ray() -> Iterator[Finding]:
    try:
        # In a process of its own: it takes seconds, and a broken installation may do more than raise.
        done = _python(["-c", "import ray; print(ray.__version__)"], seconds=6 * PROBE_S)
    except subprocess.TimeoutExpired:
        yield Finding("ray", "fail", "import ray does not return", "reinstall it, or use --ray off")
        return
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        yield Finding("ray", "fail", f"cannot be imported: {last}", "pip install 'ray[default]', or use --ray off")
        return
    yield Finding("ray", "ok", f"{done.stdout.strip()} can be imported")
    yield from _ray_address(os.environ.get("RAY_ADDRESS"))
    yield from _shared_memory()


def _ray_address(address: str | None) -> Iterator[Finding]:
    if not address:
        yield Finding("ray cluster", "ok", "RAY_ADDRESS is not set: --ray auto starts a local Ray")
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if address.startswith("ray://"):
        yield Finding("ray cluster", "fail", f"{address} is a Ray Client address", "use HOST:PORT of the GCS (6379)")
    elif not port.isdigit():
        yield Finding("ray cluster", "ok", f"RAY_ADDRESS is {address!r}: Ray resolves it")
    elif (reason := _unreachable(host, int(port))) is not None:
        yield Finding("ray cluster", "fail", f"{address}: {reason}", "unset RAY_ADDRESS, or use --ray local")
    else:
        yield Finding("ray cluster", "ok", f"{address} takes connections; {_ray_auth()}")


def _ray_auth() -> str:
    mode = os.environ.get("RAY_AUTH_MODE")
    token = os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")
    known = bool(token) or (Path.home() / ".ray" / "auth_token").is_file()
    return f"RAY_AUTH_MODE is {mode or 'not set'}, {'a' if known else 'no'} token is there"


def _unreachable(host: str, port: int) -> str | None:
    try:
        socket.create_connection((host, port), timeout=PROBE_S).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


def _shared_memory() -> Iterator[Finding]:
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError:
        yield Finding("shared memory", "warn", "/dev/shm is not there", "mount a tmpfs there: Ray wants it")
        return
    low = free < 2**28
    fix = "give the container more (docker run --shm-size=1g)" if low else ""
    yield Finding("shared memory", "warn" if low else "ok", f"{text.size(free)} free in /dev/shm", fix)


def docker() -> Iterator[Finding]:
    from rollout_engine.sandboxes.docker.engine import address_of, named_host, probe

    where = named_host()
    try:
        address = address_of(where)
        probe(address)  # the SDK's own message hides the reason in three others
        import docker as sdk

        client = sdk.from_env(timeout=int(PROBE_S))
        try:
            about, info = client.version(), client.info()
        finally:
            client.close()
    # The SDK raises errors of its own, of requests, and plain OSErrors: whichever it is, there is no Docker.
    except Exception as error:
        fix = "start the daemon or set DOCKER_HOST; only the docker sandbox needs it"
        yield Finding("docker", "warn", f"no daemon at {where}: {text.one_line(str(error), 90)}", fix)
        return
    yield Finding("docker", "ok", f"Engine {about.get('Version')} (API {about.get('ApiVersion')}) at {where}")
    yield _docker_listener(address, info)


def _docker_listener(address: Address, info: Mapping[str, Any]) -> Finding:
    """How agent programs in containers without a network reach their proxy."""
    from rollout_engine.sandboxes.docker.doctor import reach_of
    from rollout_engine.sandboxes.docker.reach import FIX

    found = asyncio.run(reach_of(address, info))
    if found.way is None:
        return Finding("agents", "warn", f"containers without a network do not reach their proxy: {found.why}", FIX)
    how = {"socket": "a mounted socket and a forwarder: ", "stream": "a forwarder's stream: "}.get(found.way, "setns")
    return Finding("agents", "ok", f"containers without a network reach their proxy ({how}{found.why})")


def namespaces() -> Iterator[Finding]:
    """Tried with a sandbox as a run makes them: its mode, what holds its limits, its system call filter."""
    if sys.platform != "linux":
        yield Finding("namespaces", "warn", f"{sys.platform} has none", "use the docker sandbox")
        return
    from rollout_engine.sandboxes.namespace import capabilities

    try:
        found = asyncio.run(asyncio.wait_for(capabilities(), SANDBOX_S))
    except TimeoutError:
        yield Finding("namespaces", "fail", "making a sandbox does not return", "use the docker sandbox")
        return
    for each in found:
        level: Level = "ok" if each.works and not each.fix else "warn"
        yield Finding("namespaces", level, f"{each.name}: {each.found}", each.fix)
    if found[0].works:
        yield Finding("agents", "ok", "boxes reach their proxy on a socket of their own 127.0.0.1")


def cgroups() -> Iterator[Finding]:
    wanted = ("memory", "cpu", "pids")
    try:
        controllers = (CGROUP / "cgroup.controllers").read_text().split()
        kind, writable = "v2", os.access(CGROUP / "cgroup.subtree_control", os.W_OK)
    except OSError:
        controllers = [name for name in wanted if (CGROUP / name).is_dir()]
        kind, writable = "v1", bool(controllers) and all(os.access(CGROUP / name, os.W_OK) for name in controllers)
    missing = [name for name in wanted if name not in controllers]
    if not controllers:
        yield Finding("cgroups", "warn", "none are mounted", "limits fall back to rlimits; see limits_enforced in rows")
        return
    state = "writable" if writable else "read-only"
    found = f"{kind} with {', '.join(name for name in wanted if name in controllers)} ({state})"
    good = writable and not missing
    lacks = f"{', '.join(missing)} missing; " if missing else ""
    fix = "" if good else f"{lacks}delegate a writable cgroup; until then limits fall back to rlimits"
    yield Finding("cgroups", "ok" if good else "warn", found, fix)


def api_keys(wanted: Sequence[str] = ()) -> Iterator[Finding]:
    """Which key variables are set. Their values are never looked at further, and never shown."""
    present = sorted(name for name, value in os.environ.items() if name.endswith("_API_KEY") and value)
    for name in wanted:
        is_set = bool(os.environ.get(name))
        yield Finding("api keys", "ok" if is_set else "fail", f"{name} is {'set' if is_set else 'not set'}",
                      "" if is_set else f"export {name}=...")  # fmt: skip
    others = [name for name in present if name not in wanted]
    if others:
        yield Finding("api keys", "ok", f"set: {', '.join(others)}")
    elif not wanted:
        fix = "export OPENAI_API_KEY=..., or name another variable with -m NAME.api_key_env=VARIABLE"
        yield Finding("api keys", "warn", "no *_API_KEY variable is set", fix)


def _python(arguments: Sequence[str], seconds: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=seconds,
        stdin=subprocess.DEVNULL,
        check=False,
    )


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (python, machine, ray, docker, namespaces, cgroups)
"""In the order in which they are shown; `api_keys` comes last."""
