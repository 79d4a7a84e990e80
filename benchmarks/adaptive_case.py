"""How near `max_concurrency = "auto"` comes to a limit that a server hides, and what the search costs.

    python -m benchmarks.adaptive_case [--seconds 40] [--hosts 1 3] [--only TEXT] [--json FILE]

For each shape of limit a model server (200 ms a call) runs as a process of its own and answers 429 above it; n
single-turn rollouts, as many as the limit takes in the given seconds, run on in-process hosts. The server's counters
are read every half second. Steady state is from the end of the warm-up to 2 s before the last answer: `throughput` is
the answers per second there as a part of those of a run that was told the limit (just before, on the same machine in
the same state), `of limit` as a part of what the limit allows on a machine that costs no time, `refused` the part of
calls that got a 429. `in use` is the mean number of calls in flight at the server, as a part of the limit where that is
one of calls at once: what calls cost before and after the server is missing from it. Every rollout must have its row,
and none may have failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.measure import machine, table
from rollout_engine.config import HostSpec, ModelSpec
from rollout_engine.engine import RolloutEngine
from rollout_engine.models.server_limits import ServerLimits
from rollout_engine.models.server_process import ServerProcess
from rollout_engine.specs import Task

LATENCY_MS = 200
WARM_UP_S = 20.0
TOLD_S = 12.0
"""Length of the run that is told the limit; its first quarter is not counted."""
SAMPLE_S = 0.5
TAIL_S = 2.0


class Shape(NamedTuple):
    """A hidden limit, and the calls per second that it allows."""

    name: str
    limits: ServerLimits
    full: float
    told: dict[str, Any]
    """The same limit as a client is told it."""
    latency_ms: float = LATENCY_MS


def shapes() -> list[Shape]:
    """Every shape with the Retry-After that such servers give, and without."""
    found = []
    at_once, rate = {"max_concurrency": 16}, {"max_concurrency": None, "requests_per_minute": 60 * 60.0}
    for form in ("seconds", "none"):
        told = "" if form == "seconds" else ", no Retry-After"
        found += [
            Shape(f"16 at once{told}", ServerLimits(concurrency=16, retry_after=form), 80.0, at_once),
            Shape(f"60 a second{told}", ServerLimits(per_second=60, burst=20, retry_after=form), 60.0, rate),
            Shape(f"300 in any 5 s{told}", ServerLimits(per_window=300, window_s=5, retry_after=form), 60.0, rate),
        ]
    dated = ServerLimits(per_second=60, burst=60, retry_after="date")
    found.append(Shape("60 a second, Retry-After a date", dated, 60.0, rate))
    found.append(Shape("16 at full speed, then slower", ServerLimits(slots=16), 80.0, at_once))
    return found


class Sample(NamedTuple):
    """The server's counters at a moment."""

    at: float
    answered: int
    refused: int
    in_flight_s: float
    """Seconds of calls in flight, added up over them."""


async def measure(shape: Shape, hosts: int, seconds: float, warm_up_s: float = WARM_UP_S) -> dict[str, Any]:
    """A run that is told the limit, and one that finds it out."""
    told, _ = await run(shape, hosts, TOLD_S, shape.told)
    found, ended = await run(shape, hosts, seconds, {"max_concurrency": "auto"})
    known = judged(told, TOLD_S / 4)
    of_limit = known["per_s"]
    steady = judged(found, warm_up_s)
    at_once = shape.limits.concurrency
    return {
        "limit": shape.name,
        "hosts": hosts,
        "throughput": steady["per_s"] / of_limit,
        "of limit": steady["per_s"] / shape.full,
        "told, of limit": of_limit / shape.full,
        "in use": None if at_once is None else steady["in_flight"] / at_once,
        "told, in use": None if at_once is None else known["in_flight"] / at_once,
        "refused_%": steady["refused_%"],
        "refused_before_%": steady["refused_before_%"],
        "steady_s": steady["steady_s"],
        **ended,
    }


async def run(shape: Shape, hosts: int, seconds: float, model: dict[str, Any]) -> tuple[list[Sample], dict[str, Any]]:
    """The server's counters over time, and how the rollouts ended."""
    n, name = int(shape.full * seconds), "m"
    verifier = {"type": "match", "expected": "1"}
    tasks = [Task(task_id=f"t{i}", prompt="?", verifier=verifier, solution="1") for i in range(n)]
    served = {name: ModelSpec(name=name, kind="scripted", options={"latency_ms": shape.latency_ms})}
    solutions = {task.task_id: "1" for task in tasks}
    samples: list[Sample] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        ServerProcess(served, solutions=solutions, limits=shape.limits) as server,
    ):
        at_it = {"name": name, "kind": "openai", "model": name, "base_url": server.url, "seed_header": True}
        host = HostSpec(slots=max(16, 192 // hosts))
        models = [ModelSpec.model_validate({**at_it, **model})]
        async with RolloutEngine(
            models, run_dir=Path(folder) / "run", ray="off", sandbox="none", hosts_per_node=hosts, host=host
        ) as engine:
            work = asyncio.create_task(engine.finish(tasks))
            while not work.done():
                stats = await asyncio.to_thread(server.stats)
                samples.append(Sample(time.monotonic(), stats["answered"], stats["busy"], stats["in_flight_s"]))
                await asyncio.wait({work}, timeout=SAMPLE_S)
            await work
            limits = dict(engine.progress.limits)
            await engine.close()
            rows = engine.tables().rollouts
    failed = sum(each is not None for each in rows["failure_type"].to_pylist())
    retries = sum(rows["retries"].to_pylist())
    return samples, {
        "planned": n,
        "rows": rows.num_rows,
        "failed": failed,
        "retries": retries,
        "found": limits.get(name, ""),
    }


def judged(samples: Sequence[Sample], warm_up_s: float) -> dict[str, float]:
    """Throughput and refusals of the steady part, and of the part before it."""
    begin, end = samples[0].at + warm_up_s, samples[-1].at - TAIL_S
    steady = [sample for sample in samples if begin <= sample.at <= end]
    first, last = steady[0], steady[-1]
    answered, refused = last.answered - first.answered, last.refused - first.refused
    return {
        "per_s": answered / (last.at - first.at),
        "in_flight": (last.in_flight_s - first.in_flight_s) / (last.at - first.at),
        "refused_%": 100 * refused / max(1, refused + answered),
        "refused_before_%": 100 * first.refused / max(1, first.refused + first.answered),
        "steady_s": last.at - first.at,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=40.0, help="length of a run at the limit")
    parser.add_argument("--hosts", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--only", default="", help="shapes whose name contains this")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = []
    for shape in shapes():
        for hosts in args.hosts:
            if args.only in shape.name:
                found.append(asyncio.run(measure(shape, hosts, args.seconds)))
                print(json.dumps(found[-1]), flush=True)
    print(table(found))
    print(json.dumps(machine(("rollout-engine", "aiohttp", "httpx"))))
    if args.json is not None:
        args.json.write_text(json.dumps({"machine": machine(), "cases": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
