"""Compiles the supervisor and hands it to the daemon as a read-only volume."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import io
import logging
import os
import platform
import shutil
import subprocess
import tarfile
import tempfile
import threading
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from docker import APIClient
from docker.errors import DockerException, NotFound
from docker.types import Mount
from requests.exceptions import RequestException

from rollout_engine.sandboxes.docker.engine import Engine
from rollout_engine.sandboxes.docker.owner import OWNER

log = logging.getLogger(__name__)

FOLDER = "/.rollout-engine"
PROGRAM = f"{FOLDER}/supervisor"
_SOURCES = Path(__file__).with_name("supervisor")
_COMPILE_S = 60.0
_REMOVE_S = 5


_volumes: dict[tuple[int, str], str] = {}
"""Of this process, by its id (a fork has none) and the daemon's."""
_filling = threading.Lock()


async def supply(engine: Engine, info: Mapping[str, Any], image: str, labels: Mapping[str, str]) -> str | None:
    """The volume's name; None where there is no compiler here, or the daemon's machine is of another kind.

    One serves all providers of this process; it goes at the process's end, or, should that be sudden, to the reaper.
    What it takes to make it is labelled as the asking provider's, and goes with that at the latest.
    """
    program = await asyncio.to_thread(compiled) if _fits(info) else None
    if program is None:
        return None
    return await engine.ask(
        "supply", lambda api: _shared(api, engine.host, str(info.get("ID")), program, image, labels)
    )


async def can_supply(info: Mapping[str, Any]) -> bool:
    """Whether `supply` has a program for this daemon's machine."""
    return _fits(info) and await asyncio.to_thread(compiled) is not None


def _fits(info: Mapping[str, Any]) -> bool:
    return info.get("Architecture") == platform.machine()


def _shared(api: APIClient, host: str, daemon: str, program: bytes, image: str, labels: Mapping[str, str]) -> str:
    with _filling:
        key = os.getpid(), daemon
        if key not in _volumes or not _is_there(api, _volumes[key], _of_all(labels)):
            name = f"rollout-supervisor-{uuid.uuid4().hex[:16]}"
            atexit.register(_remove, host, key[0], name)  # the daemon may go while it is made
            _fill(api, name, program, image, labels)
            _volumes[key] = name
        return _volumes[key]


def _of_all(labels: Mapping[str, str]) -> dict[str, str]:
    """Of a provider's labels, what its process's other providers have, too."""
    return {OWNER: labels[OWNER]}


def _is_there(api: APIClient, volume: str, labels: Mapping[str, str]) -> bool:
    """One that was removed meanwhile may be there again, made by the daemon, and empty: without the labels."""
    try:
        return bool(api.inspect_volume(volume)["Labels"] == labels)
    except NotFound:
        return False


def _remove(host: str, process: int, volume: str) -> None:
    """One that is still used is left to the reaper."""
    if process != os.getpid():
        return
    with contextlib.suppress(DockerException, RequestException, OSError):
        api = APIClient(base_url=host, timeout=_REMOVE_S)
        try:
            api.remove_volume(volume)
        finally:
            api.close()


@functools.cache
def compiled() -> bytes | None:
    """The static program, made once per process."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "supervisor")
        order = [compiler, "-static", "-Os", "-s", "-o", str(target), *map(str, sorted(_SOURCES.glob("*.c")))]
        done = subprocess.run(order, capture_output=True, timeout=_COMPILE_S, check=False)
        if done.returncode != 0:
            log.info("docker: the supervisor cannot be compiled here: %s", done.stderr.decode(errors="replace")[-500:])
            return None
        return target.read_bytes()


def _fill(api: APIClient, name: str, program: bytes, image: str, labels: Mapping[str, str]) -> None:
    """A volume can be written only through a container that has it; this one never runs."""
    api.create_volume(name, labels=_of_all(labels))
    host = api.create_host_config(mounts=[Mount(FOLDER, name)], network_mode="none")
    helper = api.create_container(image, [PROGRAM], labels=dict(labels), host_config=host)["Id"]
    try:
        api.put_archive(helper, FOLDER, _tar(program))
    finally:
        api.remove_container(helper, force=True)


def _tar(program: bytes) -> bytes:
    spool = io.BytesIO()
    with tarfile.open(fileobj=spool, mode="w") as tar:
        entry = tarfile.TarInfo("supervisor")
        entry.size, entry.mode = len(program), 0o555
        tar.addfile(entry, io.BytesIO(program))
    return spool.getvalue()
