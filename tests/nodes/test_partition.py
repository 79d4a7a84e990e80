"""A node behind a partition that lasts longer than its host's lease, and is healed while the run still goes on.

One test: .venv/bin/pytest tests/nodes/test_partition.py (root)
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rollout_engine.config import HostSpec
from tests.helpers import make_config, scripted
from tests.nodes.namespaces import HEALTH_S, namespaced_nodes
from tests.ray.rays import ROOT, alive, blocking_until
from tests.ray.rows import essence_of, undisturbed

pytestmark = [pytest.mark.ray, pytest.mark.root]

LEASE_S = 8.0
GRACE_S = 20.0
"""What a loaded machine may add to each limit."""
TASKS, K, SLOTS = 60, 10, 10
"""600 rollouts of 1.2 s, 30 at once: 24 s."""


@pytest.fixture(autouse=True)
def _as_root() -> None:
    if os.geteuid() != 0 or subprocess.run(["ip", "netns", "list"], capture_output=True).returncode:
        if os.environ.get("ROLLOUT_REQUIRE") == "1":
            raise RuntimeError("network namespaces need root and iproute2")
        pytest.skip("network namespaces need root and iproute2")


def environment_of(folder: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    token = folder / "token"
    token.write_text(secrets.token_hex(16))
    return {**kept, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token), "ROLLOUT_TEST_TRAIL": str(folder)}


def trail(folder: Path) -> list[tuple[float, str, str]]:
    """(when, node, rollout) of everything that any host did, those behind the partition among them."""
    lines = [line.split() for path in folder.glob("trail-*") for line in path.read_text().splitlines()]
    return sorted((float(at), node, rollout) for at, node, rollout in lines)


def test_a_partition_longer_than_the_lease_costs_time_and_doubles_only_what_was_in_flight_there(
    tmp_path: Path,
) -> None:
    models = [scripted(skill=0.5, latency_ms=1200)]
    config = make_config(
        *models, ray="auto", k=K, seed=3, agent="tests.nodes.agents:Trails", host={"slots": SLOTS, "lease_s": LEASE_S}
    )
    run_dir, trails = tmp_path / "run", tmp_path / "trails"
    trails.mkdir()
    orders = {"config": config.model_dump(mode="json", exclude_defaults=True), "tasks": TASKS, "run_dir": str(run_dir)}
    with namespaced_nodes(environment_of(trails)) as (network, nodes):
        driver = subprocess.Popen(
            network.inside(0, sys.executable, "-m", "tests.ray.drive", json.dumps(orders)),
            cwd=ROOT,
            env={**nodes.environment, "RAY_ADDRESS": nodes.address},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            blocking_until(lambda: len(trail(trails)) >= 90 or driver.poll() is not None, "rollouts run", 180)
            (zombie,) = nodes.hosts_on(2)
            behind_it = (trails / f"trail-{zombie}").read_text().split()[1]  # the node's id
            network.cut(2)
            cut_at = time.time()
            blocking_until(lambda: not alive([zombie]), "the host behind the partition ends", LEASE_S + 2 * GRACE_S)
            gone_after = time.time() - cut_at
            network.heal(2)
            output, _ = driver.communicate(timeout=240)
        finally:
            driver.kill()
            driver.wait()
        assert driver.returncode == 0, output
        hosts = [pid for number in range(3) for pid in nodes.hosts_on(number)]
        blocking_until(lambda: not alive(hosts), "no host is left")
    calm = config.model_copy(update={"host": HostSpec(slots=TASKS * K)})  # all at once: it takes a second
    assert essence_of(run_dir) == asyncio.run(undisturbed(calm, TASKS))
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    # On a machine that is very busy, another host may miss its lease, too.
    lost = next(event for event in events if event["kind"] == "host_lost" and event["node"] == behind_it)
    recovered = next(event for event in events if event["kind"] == "recovered" and event["node"] == behind_it)
    noticed_s = lost["at"] - cut_at
    did = trail(trails)
    behind = {rollout for _, node, rollout in did if node == lost["node"]}
    doubled = len(behind & {rollout for _, node, rollout in did if node != lost["node"]})
    last = max((at for at, node, _ in did if node == lost["node"]), default=cut_at) - cut_at
    print(
        f"cut off for {gone_after:.1f} s; the driver was told after {noticed_s:.1f} s (health checks: {HEALTH_S:g} s), "
        f"{recovered['rollouts']} rollouts taken up {recovered['seconds']:.1f} s later; the host behind it started its "
        f"last rollout at {last:.1f} s and was gone at {gone_after:.1f} s (lease: {LEASE_S:g} s); {doubled} ran twice"
    )
    assert noticed_s < HEALTH_S + GRACE_S
    assert gone_after < LEASE_S + GRACE_S
    assert noticed_s + recovered["seconds"] < HEALTH_S + LEASE_S + GRACE_S
    assert 0 < doubled <= lost["rollouts"] <= 1.5 * SLOTS
