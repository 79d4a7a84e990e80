"""A second node for the shared Ray, whose processes see what a test gives them: other code, limits, another clock."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.ray.rays import SharedRay, alive, blocking_until, command, descendants

RAY = Path(sys.executable).with_name("ray")


@contextlib.contextmanager
def another_node(
    shared_ray: SharedRay,
    path: Path,
    environment: Mapping[str, str] | None = None,
    through: Sequence[str] = (),
) -> Iterator[str]:
    """Its processes find `path` first, and are started `through` a command; gives its id."""
    import ray

    known = {node["NodeID"] for node in ray.nodes()}
    everything = {**shared_ray.environment(), "RAY_AUTH_MODE": "token", "PYTHONPATH": str(path), **(environment or {})}
    small = ["--num-cpus=1", f"--object-store-memory={80 * 2**20}", "--include-log-monitor=False"]
    log = (path / "log").open("w")
    node = subprocess.Popen(
        [
            *through,
            RAY,
            "start",
            f"--address={shared_ray.address}",
            "--block",
            *small,
        ],
        env=everything,
        cwd=path,
        stdout=log,
        stderr=log,
    )

    def new() -> str:
        assert node.poll() is None, (path / "log").read_text()
        alive_now = {each["NodeID"] for each in ray.nodes() if each["Alive"]}
        return next(iter(alive_now - known), "")

    try:
        node_id = blocking_until(new, "the node has joined", 120)
        yield node_id
    finally:
        below = [node.pid, *descendants(node.pid)]
        for raylet in (pid for pid in below if command(pid).split(" ")[0].endswith("/raylet")):
            with contextlib.suppress(ProcessLookupError):
                os.kill(raylet, signal.SIGTERM)  # it says goodbye, so that nobody waits for its heartbeat
            blocking_until(lambda gone=raylet: not alive([gone]), "the raylet has ended")
        for pid in below:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        node.wait()
        log.close()
        blocking_until(lambda: not new_alive(known), "the node has left", 120)
        blocking_until(lambda: not alive(below), "its processes have ended")


def new_alive(known: set[str]) -> set[str]:
    import ray

    return {each["NodeID"] for each in ray.nodes() if each["Alive"]} - known
