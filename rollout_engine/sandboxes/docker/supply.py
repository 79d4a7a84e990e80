"""Compiles the supervisor and hands it to the daemon as a read-only volume."""

from __future__ import annotations

import asyncio
import functools
import io
import logging
import platform
import shutil
import subprocess
import tarfile
import tempfile
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from docker import APIClient
from docker.types import Mount

from rollout_engine.sandboxes.docker.engine import Engine

log = logging.getLogger(__name__)

FOLDER = "/.rollout-engine"
PROGRAM = f"{FOLDER}/supervisor"
_SOURCE = Path(__file__).with_name("supervisor.c")
_COMPILE_S = 60.0


async def supply(engine: Engine, info: Mapping[str, Any], image: str, labels: Mapping[str, str]) -> str | None:
    """The volume's name; None where there is no compiler here, or the daemon's machine is of another kind."""
    if info.get("Architecture") != platform.machine():
        return None
    program = await asyncio.to_thread(compiled)
    if program is None:
        return None
    return await engine.ask("supply", lambda api: _fill(api, program, image, labels))


@functools.cache
def compiled() -> bytes | None:
    """The static program, made once per process."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "supervisor")
        order = [compiler, "-static", "-Os", "-s", "-o", str(target), str(_SOURCE)]
        done = subprocess.run(order, capture_output=True, timeout=_COMPILE_S, check=False)
        if done.returncode != 0:
            log.info("docker: the supervisor cannot be compiled here: %s", done.stderr.decode(errors="replace")[-500:])
            return None
        return target.read_bytes()


def _fill(api: APIClient, program: bytes, image: str, labels: Mapping[str, str]) -> str:
    """A volume can be written only through a container that has it; this one never runs."""
    name = f"rollout-supervisor-{uuid.uuid4().hex[:16]}"
    api.create_volume(name, labels=dict(labels))
    host = api.create_host_config(mounts=[Mount(FOLDER, name)], network_mode="none")
    helper = api.create_container(image, [PROGRAM], labels=dict(labels), host_config=host)["Id"]
    try:
        api.put_archive(helper, FOLDER, _tar(program))
    finally:
        api.remove_container(helper, force=True)
    return name


def _tar(program: bytes) -> bytes:
    spool = io.BytesIO()
    with tarfile.open(fileobj=spool, mode="w") as tar:
        entry = tarfile.TarInfo("supervisor")
        entry.size, entry.mode = len(program), 0o555
        tar.addfile(entry, io.BytesIO(program))
    return spool.getvalue()
