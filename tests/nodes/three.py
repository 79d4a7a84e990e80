"""Three Ray nodes on one machine: which host runs where, and how to take one away."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from actors.auth import reread_ray_config
from tests.ray.rays import SHORT, alive, blocking_until, command, descendants

NODES = 3
AUTH = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_ADDRESS", "TMPDIR")
FAST = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 10,
}
"""A node that does not answer is given up after some 15 s, not 40; faster, and a loaded machine loses nodes."""


class ThreeNodes:
    """A head and two more, below `folder`. This process is connected to the head."""

    def __init__(self, folder: Path) -> None:
        import ray
        from ray.cluster_utils import Cluster

        self._cluster = Cluster(
            initialize_head=True,
            head_node_args={
                "num_cpus": 2,
                "object_store_memory": 80 * 2**20,
                "include_dashboard": False,
                "temp_dir": str(folder),
                "_system_config": FAST,
            },
        )
        self.folder = folder
        self.head: Any = self._cluster.head_node
        self.others: list[Any] = []
        self.address: str = self._cluster.address
        ray.init(address=self.address, log_to_driver=False, logging_level=logging.ERROR)
        self.restore()

    def add(self) -> Any:
        """One more node; returns once Ray counts on it."""
        node = self._cluster.add_node(num_cpus=2, object_store_memory=80 * 2**20)
        self.others.append(node)
        return node

    def remove(self, node: Any) -> None:
        """As if it was switched off: its raylet is killed at once."""
        self.others.remove(node)
        below = descendants(raylet(node))
        self._cluster.remove_node(node, allow_graceful=False)
        # What Ray leaves of a killed node (its agents) ends by itself, after a minute.
        blocking_until(lambda: not [pid for pid in alive(below) if "RolloutHost" in command(pid)], "its hosts end")

    def restore(self) -> None:
        """Three nodes again, none of them being drained."""
        for node in list(self.others):
            if not alive([raylet(node)]) or node.node_id in draining():
                self.remove(node)
        while len(self.others) < NODES - 1:
            self.add()
        blocking_until(lambda: len(nodes_alive()) == NODES, "three nodes are alive", 60)

    def shutdown(self) -> None:
        import ray

        ray.shutdown()
        self._cluster.shutdown()  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def three_nodes(absent: Callable[[Exception], None], folder: Path | None = None) -> Iterator[ThreeNodes]:
    """Three nodes with a token and temporary folders of their own; `absent` may raise what is better than Ray's error.

    TMPDIR is `folder/tmp` meanwhile, so that what is found there at the end is of these nodes and of nobody else.
    """
    folder = folder or Path(tempfile.mkdtemp(prefix="ray-test-", dir=SHORT))
    token = folder / "token"
    token.write_text(secrets.token_hex(16))
    before = {name: os.environ.pop(name, None) for name in AUTH}
    (folder / "tmp/ray").mkdir(parents=True)
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "TMPDIR": str(folder / "tmp")}
    tempfile.tempdir = None
    try:
        reread_ray_config()  # something in this process may have imported Ray before the token was there
        try:
            nodes = ThreeNodes(folder)
        except Exception as error:
            absent(error)
            raise
        try:
            yield nodes
        finally:
            nodes.shutdown()
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        tempfile.tempdir = None
        shutil.rmtree(folder, ignore_errors=True)


def raylet(node: Any) -> int:
    """The process that a node stands and falls with."""
    return int(node.all_processes["raylet"][0].process.pid)


def kill_raylet(node: Any) -> None:
    """Returns once it is dead: `restore` asks for that."""
    os.kill(raylet(node), signal.SIGKILL)
    blocking_until(lambda: not alive([raylet(node)]), "a killed raylet is dead")


def nodes_alive() -> set[str]:
    import ray

    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}  # type: ignore[no-untyped-call]


def draining() -> dict[str, int]:
    from ray._private.state import state

    found: dict[str, int] = state.get_draining_nodes()
    return found


def host_pids() -> dict[str, int]:
    """node id -> process of its live host actor."""
    import ray._private.state as state

    actors = [each for each in state.actors().values() if each["ActorClassName"] == "RolloutHost"]
    return {each["Address"]["NodeID"]: each["Pid"] for each in actors if each["State"] == "ALIVE"}
