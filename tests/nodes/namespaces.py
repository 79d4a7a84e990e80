"""Three Ray nodes, each in a network namespace of its own with a bridge between them, so that a link can be cut.

Root only. Nothing of the machine's own network is touched: the bridge is in a namespace, too.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.ray.rays import ROOT, SHORT, alive, blocking_until, descendants

RAY = Path(sys.executable).with_name("ray")
HEALTH = {
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "5",
}
HEALTH_S = 0.5 + 5 * (0.5 + 1.0)
"""By then the head has given up a node that does not answer."""
NODES = 3
PORT = 6399


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


class Network:
    """Namespaces PREFIX0, PREFIX1, ... with addresses 10.219.77.1, .2, ... on one bridge."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._bridge = f"{prefix}sw"

    def up(self) -> None:
        ip("netns", "add", self._bridge)
        ip("-n", self._bridge, "link", "add", "br0", "type", "bridge")
        ip("-n", self._bridge, "link", "set", "br0", "up")
        for number in range(NODES):
            space, port = f"{self._prefix}{number}", f"p{number}"
            ip("netns", "add", space)
            ip("link", "add", "eth0", "netns", space, "type", "veth", "peer", "name", port, "netns", self._bridge)
            ip("-n", self._bridge, "link", "set", port, "master", "br0", "up")
            ip("-n", space, "addr", "add", f"{self.address(number)}/24", "dev", "eth0")
            ip("-n", space, "link", "set", "eth0", "up")
            ip("-n", space, "link", "set", "lo", "up")

    def down(self) -> None:
        for name in (self._bridge, *(f"{self._prefix}{number}" for number in range(NODES))):
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "del", name)

    def address(self, number: int) -> str:
        return f"10.219.77.{number + 1}"

    def inside(self, number: int, *argv: str) -> list[str]:
        return ["ip", "netns", "exec", f"{self._prefix}{number}", *argv]

    def cut(self, number: int) -> None:
        ip("-n", self._bridge, "link", "set", f"p{number}", "down")

    def heal(self, number: int) -> None:
        ip("-n", self._bridge, "link", "set", f"p{number}", "up")


class Nodes:
    """`ray start` in each namespace; the first is the head."""

    def __init__(self, network: Network, folder: Path, environment: Mapping[str, str]) -> None:
        self._network, self._folder = network, folder
        self.environment = {**environment, **HEALTH}
        self.processes: list[subprocess.Popen[bytes]] = []
        self.address = f"{network.address(0)}:{PORT}"

    def start(self) -> None:
        for number in range(NODES):
            where = ["--head", f"--port={PORT}", "--include-dashboard=false"] if not number else []
            where += [] if not number else [f"--address={self.address}"]
            small = ["--num-cpus=2", f"--object-store-memory={80 * 2**20}", f"--temp-dir={self._folder / str(number)}"]
            argv = [str(RAY), "start", "--block", f"--node-ip-address={self._network.address(number)}", *where, *small]
            with (self._folder / f"log-{number}").open("w") as log:
                self.processes.append(
                    subprocess.Popen(
                        self._network.inside(number, *argv), env=self.environment, stdout=log, stderr=log, cwd=ROOT
                    )
                )
            blocking_until(lambda number=number: self._started(number), f"node {number} has started", 180)

    def _started(self, number: int) -> bool:
        log = (self._folder / f"log-{number}").read_text()
        assert self.processes[number].poll() is None, log
        return "Ray runtime started" in log

    def hosts_on(self, number: int) -> list[int]:
        from tests.ray.rays import command

        return [pid for pid in descendants(self.processes[number].pid) if "RolloutHost" in command(pid)]

    def stop(self) -> None:
        below = [pid for process in self.processes for pid in (process.pid, *descendants(process.pid))]
        for pid in below:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.processes:
            process.wait()
        blocking_until(lambda: not alive(below), "the nodes have ended")


@contextlib.contextmanager
def namespaced_nodes(environment: Mapping[str, str]) -> Iterator[tuple[Network, Nodes]]:
    """Three nodes that are up; nothing of them is left at the end."""
    network = Network(f"rx{os.getpid() % 10000}")
    with tempfile.TemporaryDirectory(prefix="rn-", dir=SHORT, ignore_cleanup_errors=True) as folder:
        nodes = Nodes(network, Path(folder), environment)
        try:
            network.up()
            nodes.start()
            yield network, nodes
        finally:
            nodes.stop()
            network.down()
