"""How a run grows with its hosts: 1 s rollouts on 1 to 8 host actors, and the driver's CPU with 1 to 32 hosts.

    python -m benchmarks.hosts_case [--scaling-only | --driver-only]

Scaling: real host actors, `SLOTS` rollouts of one second at once on each; the rate, as a part of so many times the
rate of one host. Driver: the same rollouts a second spread over ever more hosts; so that 32 fit on a small machine,
they live in two actors, each reached by its own Ray calls as a host of its own would be, and what is measured is the
driver's process alone. Prints one table each.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.cases import scratch
from benchmarks.measure import machine, own_cpu_seconds, table
from rollout_engine import openrun
from rollout_engine.clusters import HostHandle, LocalHandle, MakePlan
from rollout_engine.config import HostSpec, ModelSpec, RunConfig
from rollout_engine.engine import RolloutEngine
from rollout_engine.exchange import Reply, Request
from rollout_engine.host import Host
from rollout_engine.hostplan import HostPlan
from rollout_engine.placement import Node
from rollout_engine.probe import Probe
from rollout_engine.specs import Task
from rollout_engine.waiting import Waiting

LATENCY_S = 1.0
SLOTS = 50
SCALING_HOSTS = (1, 2, 4, 8)
SCALING_TO_KEEP = 0.9
ROUNDS = 12
"""Rollouts that each slot sees, one after the other."""
IN_FLIGHT = 2048
DRIVER_HOSTS = (1, 4, 32)
DRIVER_TO_KEEP = 1.3
PACKS = 2
POLL_S = 0.05


def tasks(n: int, name: str) -> list[Task]:
    return [
        Task(
            task_id=f"{name}-{number}", prompt="Say yes.", verifier={"type": "match", "expected": "yes"}, solution="yes"
        )
        for number in range(n)
    ]


def config(slots: int, hosts: int, latency: str, prefetch: float) -> RunConfig:
    options = {"skill": 1.0, "latency_ms": LATENCY_S * 1000, "latency_dist": latency}
    return RunConfig(
        models=(ModelSpec(name="m", kind="scripted", options=options),),
        sandbox="none",
        ray="local",
        hosts_per_node=hosts,
        host=HostSpec(slots=slots, prefetch=prefetch),
    )


async def measure(settings: RunConfig, rollouts: int, warm_up: int, run_dir: Path) -> tuple[float, float]:
    """(rollouts a second of a whole run, CPU seconds of this process for each in its middle) on hosts that are warm.

    The middle is from a quarter to three quarters: a run's tail is a few late rollouts, and heartbeats.
    """
    async with RolloutEngine(config=settings, run_dir=run_dir) as engine:
        await engine.finish(tasks(warm_up, "warm-up"))
        began = time.perf_counter()
        work = asyncio.create_task(engine.finish(tasks(rollouts, "task")))
        marks = [await reached(engine, warm_up + rollouts * quarter // 4) for quarter in (1, 3)]
        await work
        (cpu, done), (cpu_later, done_later) = marks
        return rollouts / (time.perf_counter() - began), (cpu_later - cpu) / (done_later - done)


async def reached(engine: RolloutEngine, done: int) -> tuple[float, int]:
    """(CPU seconds of this process so far, committed rollouts), once there are so many."""
    while engine.progress.done < done:
        await asyncio.sleep(POLL_S)
    return own_cpu_seconds(), engine.progress.done


async def scaling(folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for hosts in SCALING_HOSTS:
        n = hosts * SLOTS * ROUNDS
        rate, _ = await measure(config(SLOTS, hosts, "fixed", 0.5), n, hosts * SLOTS, folder / f"scaling-{hosts}")
        linear = rate / (rows[0]["rollouts/s"] * hosts) if rows else 1.0
        rows.append(
            {"hosts": hosts, "in flight": hosts * SLOTS, "rollouts/s": rate, "of linear": linear, "to keep to": ""}
        )
    rows[-1]["to keep to"] = f">= {SCALING_TO_KEEP}"
    return rows


async def driver(folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    with_packs = PackCluster()
    openrun.make_cluster = lambda config: with_packs  # type: ignore[assignment]
    for hosts in DRIVER_HOSTS:
        with_packs.hosts = hosts
        n = IN_FLIGHT * ROUNDS
        # Spread over time: rollouts that all end together would make a single host's batches look cheap. Many hosts
        # are asked every second or two, so they hold as much work in advance.
        settings = config(IN_FLIGHT // hosts, 1, "exponential", 1.0)
        rate, cpu = await measure(settings, n, IN_FLIGHT, folder / f"driver-{hosts}")
        us = cpu * 1e6
        ratio = us / rows[0]["driver us a rollout"] if rows else 1.0
        rows.append(
            {
                "hosts": hosts,
                "rollouts/s": rate,
                "driver us a rollout": us,
                "times one host": ratio,
                "to keep to": "",
            }
        )
    rows[-1]["to keep to"] = f"<= {DRIVER_TO_KEEP}"
    return rows


class Pack:
    """An actor that holds several hosts."""

    def __init__(self) -> None:
        self._handles: dict[str, LocalHandle] = {}

    async def open(self, plan: HostPlan, keys: Mapping[str, str]) -> None:
        host = Host(plan, keys)
        await host.open()
        self._handles[plan.host_id] = LocalHandle(host)

    async def exchange(self, host_id: str, request: Request) -> Reply:
        return await self._handles[host_id].exchange(request)

    async def nudge(self, host_id: str) -> None:
        self._handles[host_id].nudge()

    async def stop(self, host_id: str) -> None:
        await self._handles.pop(host_id).stop()


class PackedHandle:
    """A host in an actor that holds several."""

    def __init__(self, host_id: str, node_id: str, pack: Any, plan: HostPlan) -> None:
        self.host_id, self.node_id, self._pack, self._name = host_id, node_id, pack, plan.host_id

    async def exchange(self, request: Request) -> Reply:
        reply: Reply = await self._pack.exchange.remote(self._name, request)
        return reply

    def nudge(self) -> None:
        self._pack.nudge.remote(self._name)

    async def probe(self, body: bytes) -> Probe:
        raise NotImplementedError

    async def waiting_for(self, limit: int = 0) -> list[Waiting]:
        return []

    async def stop(self) -> None:
        await self._pack.stop.remote(self._name)

    def kill(self) -> None:
        return None


class PackCluster:
    """`hosts` nodes with a host each, in PACKS actors of a local Ray that stays up from one run to the next."""

    def __init__(self) -> None:
        import ray

        self.hosts = 1
        # From the main thread: Ray's processes end with the thread that started them.
        ray.init(address="local", include_dashboard=False, log_to_driver=False)
        pack = ray.remote(num_cpus=0, max_concurrency=256)(Pack)
        self._packs = [pack.remote() for _ in range(PACKS)]

    async def open(self, make_plan: MakePlan, keys: Mapping[str, str]) -> None:
        self._make_plan, self._keys = make_plan, dict(keys)

    async def nodes(self) -> Sequence[Node]:
        return [Node(f"node-{number}") for number in range(self.hosts)]

    async def start(self, node_id: str) -> HostHandle:
        number = int(node_id.rpartition("-")[2])
        plan = self._make_plan(f"host-{number}", node_id)
        pack = self._packs[number % len(self._packs)]
        await pack.open.remote(plan, self._keys)
        return PackedHandle(f"host-{number}", node_id, pack, plan)

    def exporter(self) -> None:
        return None

    async def close(self) -> None:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--scaling-only", action="store_true")
    parser.add_argument("--driver-only", action="store_true")
    args = parser.parse_args()
    with scratch("hosts") as folder:
        if not args.driver_only:
            print(table(asyncio.run(scaling(folder))), flush=True)
        if not args.scaling_only:
            print(table(asyncio.run(driver(folder))), flush=True)
    print(machine(["rollout-engine", "ray"]))


if __name__ == "__main__":
    main()
