"""Memory of 10,000 single-turn rollouts that wait for their model over HTTP at once, through Ray.

The stub server is slow (--latency-ms); the memory (PSS) of driver and hosts is sampled until all calls are in flight.
Prints one JSON line: what they hold before, at the most, and the difference.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from pathlib import Path
from typing import Any

from benchmarks.cases import model_server, scratch, server_stats
from benchmarks.engine_case import role, tasks
from benchmarks.measure import emit, pss_mb, tree
from benchmarks.work import API_KEY, MODEL
from rollout_engine.config import HostSpec, ModelSpec
from rollout_engine.engine import RolloutEngine

LATENCY_MS = 20_000
SAMPLE_S = 0.5


def held_mb() -> float:
    """PSS of the driver and its hosts."""
    return pss_mb(process.pid for process in tree() if role(process.pid) != "ray")


async def most(until: asyncio.Task[None]) -> float:
    """The highest sample until a task is done."""
    highest = 0.0
    while not until.done():
        highest = max(highest, await asyncio.to_thread(held_mb))
        await asyncio.sleep(SAMPLE_S)
    await until
    return highest


async def measure(n: int, hosts: int, url: str, run_dir: Path) -> dict[str, Any]:
    model = ModelSpec(name="stub", kind="openai", model=MODEL, base_url=url)
    spec = HostSpec(slots=n // hosts, prefetch=0.0)
    engine = RolloutEngine([model], run_dir=run_dir, ray="local", hosts_per_node=hosts, host=spec)
    async with engine:
        await engine.finish(tasks(hosts, "warm-up"))
        before = held_mb()
        server_stats(url)
        highest = await most(asyncio.create_task(engine.finish(tasks(n, "task"))))
    in_flight = server_stats(url)["peak_in_flight"]
    return {
        "case": "in flight",
        "n": n,
        "hosts": hosts,
        "max_in_flight": in_flight,
        "before_mb": round(before, 1),
        "most_mb": round(highest, 1),
        "added_mb": round(highest - before, 1),
        "kb_per_rollout": round((highest - before) * 1024 / n, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", type=int, default=10_000, help="rollouts in flight")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--latency-ms", type=int, default=LATENCY_MS)
    args = parser.parse_args()
    os.environ["OPENAI_API_KEY"] = API_KEY
    with scratch("in-flight") as folder, model_server("--latency-ms", str(args.latency_ms)) as url:
        emit(asyncio.run(measure(args.n, args.hosts, url, folder / "run")))


if __name__ == "__main__":
    main()
