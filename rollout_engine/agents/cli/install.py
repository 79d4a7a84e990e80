"""Installs an agent program once per node: into a directory by its package's name, whoever asks first; others wait."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import hashlib
import os
import re
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from rollout_engine.agents.cli.program import Package
from rollout_engine.disk import full, is_full
from rollout_engine.errors import AgentError, AgentUnavailable
from rollout_engine.sandboxes.process import Program as Process

LOCK_PAUSE_S = 0.2
FULL_BYTES = 2**20
"""With less than this free on its disk, that is why a program could not be installed."""
_OUTPUT_BYTES = 64 * 1024
_TEMPORARY = "installing."


class Installer:
    """One package on one node. Its callers share one installation; one that is cancelled does not end it for others."""

    def __init__(self, package: Package, cache: str | None, limit_s: float) -> None:
        """`cache`: where installations are kept; None: in /var/tmp. `limit_s`: waiting for others included."""
        self._package, self._limit_s = package, limit_s
        self.place = (Path(cache) if cache is not None else _default_cache()) / _name(package)
        """Where it is once it is installed."""
        self._task: asyncio.Task[str] | None = None

    async def directory(self) -> str:
        """Where it is installed. Raises AgentUnavailable, AgentError, NodeDiskFull."""
        task = self._task
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = self._task = asyncio.create_task(self._install(), name="install an agent program")
        return await asyncio.shield(task)

    async def _install(self) -> str:
        place = self.place
        try:
            async with asyncio.timeout(self._limit_s):
                await self._ensure(place)
        except TimeoutError as error:
            raise AgentError(f"{place.name} was not installed within {self._limit_s:g} s") from error
        except OSError as error:
            if is_full(error):
                raise full(error, place.parent) from error
            raise AgentUnavailable(f"{place.name} cannot be installed below {place.parent}: {error}") from error
        await asyncio.to_thread(check_directory, str(place), self._package)
        return str(place)

    async def _ensure(self, place: Path) -> None:
        if await asyncio.to_thread(_is_there, place):
            return
        async with _locked(place.parent / f".{place.name}.lock"):
            temporary = await asyncio.to_thread(_fresh, place)
            if temporary is None:
                return
            try:
                await _run(_command(self._package, temporary), self._package, temporary)
                await asyncio.to_thread(temporary.rename, place)
            finally:
                await asyncio.to_thread(shutil.rmtree, temporary, ignore_errors=True)


def _is_there(place: Path) -> bool:
    """Whether it is installed; makes the cache. Only we may have written there: every rollout runs what lies in it."""
    cache = place.parent
    cache.mkdir(parents=True, exist_ok=True)
    info = cache.stat()
    if info.st_uid != os.geteuid() or info.st_mode & 0o022:
        raise AgentUnavailable(f"{cache} must belong to this user, and be writable for nobody else")
    return place.is_dir()


def _fresh(place: Path) -> Path | None:
    """A directory to install into; None where another process has just done it. Only for who holds the lock."""
    if place.is_dir():
        return None
    for left in place.parent.glob(f"{_TEMPORARY}{place.name}.*"):
        shutil.rmtree(left, ignore_errors=True)
    temporary = Path(tempfile.mkdtemp(prefix=f"{_TEMPORARY}{place.name}.", dir=place.parent))
    temporary.chmod(0o755)
    return temporary


def _default_cache() -> Path:
    return Path(f"/var/tmp/rollout-engine-{os.geteuid()}/agents")


def _name(package: Package) -> str:
    digest = hashlib.sha256("\0".join((package.manager, *package.names)).encode()).hexdigest()[:8]
    return f"{re.sub(r'[^A-Za-z0-9._-]+', '-', package.names[0]).strip('-')}-{digest}"


def _command(package: Package, place: Path) -> list[str]:
    # No package's own scripts are run on the host.
    if package.manager == "npm":
        quiet = ("--ignore-scripts", "--no-audit", "--no-fund", "--no-save", "--loglevel=error")
        return ["npm", "install", "--prefix", str(place), *quiet, *package.names]
    quiet = ("--quiet", "--disable-pip-version-check", "--no-input", "--only-binary", ":all:")
    return [sys.executable, "-m", "pip", "install", "--target", str(place), *quiet, *package.names]


async def _run(argv: list[str], package: Package, place: Path) -> None:
    """Raises AgentUnavailable where the installing program is not there, AgentError where it fails."""
    what = " ".join(package.names)
    if shutil.which(argv[0]) is None:
        raise AgentUnavailable(f"{what}: there is no {argv[0]} on this node; install it, or give a `directory`")
    keep = ("PATH", "HOME", "LANG", "TMPDIR", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "SSL_CERT_FILE")
    prefixes = ("npm_config_", "PIP_", "NODE_EXTRA_CA")
    env = {name: value for name, value in os.environ.items() if name.upper() in keep or name.startswith(prefixes)}
    process = Process(argv, cwd="/", env=env, max_output_bytes=_OUTPUT_BYTES)
    try:
        await asyncio.wait({process.exited})  # a cancelled wait must not cancel what it waits for
    finally:
        await process.end()
        process.stdout.finish()
        process.stderr.finish()
        process.release()
    if process.exit_code:
        if shutil.disk_usage(place).free < FULL_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(place))
        said = (process.stderr.value() or process.stdout.value())[-1000:].decode(errors="replace").strip()
        raise AgentError(f"{what} cannot be installed: {argv[0]} ended with {process.exit_code}: {said}")


def check_directory(directory: str, package: Package | None) -> None:
    """Raises AgentUnavailable where an installation is not there, or not for this machine."""
    if not os.path.isdir(directory):
        raise AgentUnavailable(f"there is no directory {directory} with the agent program on this node")
    if package is None:
        return
    program = package.program()
    machine = os.uname().machine
    if program is None:
        raise AgentUnavailable(f"{package.names[0]} is not made for {machine}")
    if not os.path.isfile(os.path.join(directory, program)):
        raise AgentUnavailable(f"{directory} holds no {program}: the program is missing, or of another machine")


@contextlib.asynccontextmanager
async def _locked(path: Path) -> AsyncIterator[None]:
    """Held by one process of the node at a time; it ends with its holder."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                await asyncio.sleep(LOCK_PAUSE_S)
        yield
    finally:
        os.close(fd)
