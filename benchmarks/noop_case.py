"""No-op rollouts through Ray: what planning, granting, running, committing and syncing cost when nothing else does.

A scripted model in the host's own process answers after `--latency-ms`; single_turn, `match`, 10 attempts a task.
Prints one JSON line: CPU of driver and hosts per rollout, and with --watch the driver's memory as the run goes on.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.cases import scratch
from benchmarks.engine_case import role
from benchmarks.measure import Meter, cpu_by_role, emit, pss_mb, result, tree
from rollout_engine.config import HostSpec, ModelSpec
from rollout_engine.engine import RolloutEngine
from rollout_engine.specs import Task

K = 10
WATCH_S = 0.5


def tasks(count: int, prefix: str) -> Iterator[Task]:
    verifier = {"type": "match", "compare": "exact", "expected": "yes"}
    for number in range(count):
        yield Task(task_id=f"{prefix}-{number}", prompt=f"Say yes ({number}).", verifier=verifier, solution="yes")


async def watch(engine: RolloutEngine, samples: list[tuple[int, float]]) -> None:
    """(rollouts done, MB of the driver's process) until cancelled."""
    while True:
        samples.append((engine.progress.done, pss_mb([os.getpid()])))
        await asyncio.sleep(WATCH_S)


async def measure(
    n: int, hosts: int, in_flight: int, latency_ms: float, run_dir: Path, watched: bool
) -> dict[str, Any]:
    model = ModelSpec(name="noop", kind="scripted", options={"skill": 0.5, "latency_ms": latency_ms})
    slots = HostSpec(slots=in_flight // hosts)
    engine = RolloutEngine([model], run_dir=run_dir, k=K, ray="local", sandbox="none", hosts_per_node=hosts, host=slots)
    samples: list[tuple[int, float]] = []
    async with engine:
        await engine.finish(tasks(in_flight // K, "warm-up"))
        before = cpu_by_role(role)
        watcher = asyncio.create_task(watch(engine, samples)) if watched else None
        with Meter() as meter:
            await engine.finish(tasks(n // K, "task"))
        used = {name: cpu - before.get(name, 0.0) for name, cpu in cpu_by_role(role).items()}
        if watcher is not None:
            watcher.cancel()
        hosts_mb = pss_mb(process.pid for process in tree() if role(process.pid) == "host")
    meter.cpu_s = used["driver"] + used["host"]
    parts = {f"{part}_us_per_rollout": round(used[part] / n * 1e6, 1) for part in ("driver", "host", "ray")}
    return {**result("no-op", n, in_flight, meter, hosts=hosts, hosts_mb=hosts_mb, **parts), "driver_mb": thin(samples)}


def thin(samples: list[tuple[int, float]], keep: int = 24) -> list[tuple[int, float]]:
    """Evenly spaced samples, the last one among them."""
    step = max(len(samples) // keep, 1)
    return [(done, round(mb, 1)) for done, mb in samples[::-1][::step][::-1]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", type=int, default=100_000, help="rollouts")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--in-flight", type=int, default=10_000)
    parser.add_argument("--latency-ms", type=float, default=1000.0)
    parser.add_argument("--watch", action="store_true", help="sample the driver's memory")
    args = parser.parse_args()
    with scratch("noop") as folder:
        emit(asyncio.run(measure(args.n, args.hosts, args.in_flight, args.latency_ms, folder / "run", args.watch)))


if __name__ == "__main__":
    main()
