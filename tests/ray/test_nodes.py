"""A node on which our package is another one, or is missing, is named before anything starts."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollout_engine.version import VERSION
from tests.ray.rays import ROOT, SharedRay, alive, blocking_until, command, descendants

pytestmark = pytest.mark.ray

DRIVER = """
import asyncio
from rollout_engine import RolloutEngine
from rollout_engine.errors import InputError

async def main():
    async with RolloutEngine([{"name": "m", "kind": "scripted"}], sandbox="none"):
        print("open")

try:
    asyncio.run(main())
except InputError as error:
    print("InputError:", error)
"""


@contextlib.contextmanager
def another_node(shared_ray: SharedRay, path: Path) -> Iterator[str]:
    """A second node whose processes find `path` first; gives its id."""
    import ray

    known = {node["NodeID"] for node in ray.nodes()}
    environment = {**shared_ray.environment(), "RAY_AUTH_MODE": "token", "PYTHONPATH": str(path)}
    small = ["--num-cpus=1", f"--object-store-memory={80 * 2**20}", "--include-log-monitor=False"]
    log = (path / "log").open("w")
    node = subprocess.Popen(
        [Path(sys.executable).with_name("ray"), "start", f"--address={shared_ray.address}", "--block", *small],
        env=environment,
        cwd=path,
        stdout=log,
        stderr=log,
    )

    def new() -> str:
        assert node.poll() is None, (path / "log").read_text()
        alive_now = {each["NodeID"] for each in ray.nodes() if each["Alive"]}
        return next(iter(alive_now - known), "")

    try:
        node_id = blocking_until(new, "the node has joined", 60)
        yield node_id
    finally:
        below = [node.pid, *descendants(node.pid)]
        for raylet in (pid for pid in below if command(pid).split(" ")[0].endswith("/raylet")):
            os.kill(raylet, signal.SIGTERM)  # it says goodbye, so that nobody waits for its heartbeat
            blocking_until(lambda gone=raylet: not alive([gone]), "the raylet has ended", 20)
        for pid in below:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        node.wait()
        log.close()
        blocking_until(lambda: not new_alive(known), "the node has left", 60)
        blocking_until(lambda: not alive(below), "its processes have ended", 30)


def new_alive(known: set[str]) -> set[str]:
    import ray

    return {each["NodeID"] for each in ray.nodes() if each["Alive"]} - known


def run_from(folder: Path, shared_ray: SharedRay) -> str:
    """What a driver says that starts elsewhere: from our own folder, Ray would send that along."""
    (folder / "driver.py").write_text(DRIVER)
    environment = shared_ray.environment(RAY_ADDRESS=shared_ray.address)
    done = subprocess.run(
        [sys.executable, "driver.py"], cwd=folder, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_node_with_another_version_is_named(shared_ray: SharedRay, tmp_path: Path) -> None:
    for package in ("rollout_engine", "actors"):
        shutil.copytree(ROOT / package, tmp_path / "node" / package, ignore=shutil.ignore_patterns("__pycache__"))
    version = tmp_path / "node/rollout_engine/version.py"
    version.write_text(version.read_text().replace(VERSION, "0.0.1"))
    with another_node(shared_ray, tmp_path / "node") as node_id:
        output = run_from(tmp_path, shared_ray)
    assert output.startswith(f"InputError: ray: node {node_id[:12]} has rollout-engine 0.0.1, the driver has {VERSION}")
    assert f"install rollout-engine=={VERSION} on every node" in output
    assert not shared_ray.host_pids()


def test_a_node_with_somebody_else_s_actors_is_named(shared_ray: SharedRay, tmp_path: Path) -> None:
    """The name is a common one; without ours, the node is as one without our package."""
    (tmp_path / "node/actors").mkdir(parents=True)
    for name in ("__init__", "host"):
        (tmp_path / f"node/actors/{name}.py").touch()
    with another_node(shared_ray, tmp_path / "node") as node_id:
        output = run_from(tmp_path, shared_ray)
    assert output.startswith(f"InputError: ray: no host came up on node {node_id[:12]}")
    assert "actors.host" in output
    assert f"install rollout-engine=={VERSION} on every node" in output
    assert not shared_ray.host_pids()
