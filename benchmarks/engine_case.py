"""The work done by our engine: tasks through Ray into the run directory, committed and synced, scored by `match`.

The meter runs from the submission of the tasks until each of them has a row on the disk; the engine and its hosts are
up by then, and a warm-up has gone through them. `cpu_s` is that of the driver's process and of the hosts together.
Beside it: `ray_ms_per_rollout`, Ray's own processes (raylet, GCS, idle workers) in that time; `close_ms_per_rollout`,
the driver's CPU for the end of the run (final tables, Parquet files, leaving Ray), after the meter has stopped.
With --read, a consumer in the same process reads every row as a record. With --mock there is no HTTP: a scripted
model in the host's process gives each task's answer.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from benchmarks.cases import case_arguments, scratch
from benchmarks.measure import Meter, command, cpu_by_role, emit, peak_rss_mb, result, tree, versions
from benchmarks.work import ANSWER, API_KEY, EXPECTED, MODEL, PATTERN, WARM_UP, question
from rollout_engine.config import HostSpec, ModelSpec
from rollout_engine.engine import RolloutEngine
from rollout_engine.results import Run
from rollout_engine.specs import Task

HOST_TITLE = "ray::RolloutHost"
"""What Ray calls the process of a host actor."""
VERIFIER = {"type": "match", "pattern": PATTERN, "compare": "exact", "expected": EXPECTED}


def tasks(n: int, prefix: str) -> list[Task]:
    """The same n questions that the other cases ask."""
    return [
        Task(task_id=f"{prefix}-{index}", prompt=question(index), verifier=VERIFIER, solution=EXPECTED)
        for index in range(n)
    ]


def role(pid: int) -> str:
    """driver, host or ray."""
    if pid == os.getpid():
        return "driver"
    return "host" if command(pid).startswith(HOST_TITLE) else "ray"


async def work(engine: RolloutEngine, asked: Sequence[Task], *, read: bool) -> None:
    """Until every task has a committed row."""
    if not read:
        await engine.finish(asked)
        return
    async for _ in engine.rollouts(asked):
        pass


def check(run: Run, n: int) -> None:
    """Exits unless the measured round has n rows, each key once, all with score 1.0."""
    rows = run.rollouts.filter(pc.equal(run.rollouts["round"], 1))
    right = pc.sum(pc.equal(rows["score"], 1.0)).as_py()
    names = pc.count_distinct(rows["rollout_id"]).as_py()
    if not rows.num_rows == right == names == n:
        raise SystemExit(f"{rows.num_rows} rows of {names} rollouts, {right} with score 1.0, where {n} were due")


def model_spec(server_url: str | None) -> ModelSpec:
    """The stub server's model; without a server, one that always says the fixed answer."""
    if server_url is None:
        return ModelSpec(name="stub", kind="scripted", options={"skill": 0.0, "wrong": ANSWER})
    return ModelSpec(name="stub", kind="openai", model=MODEL, base_url=server_url)


async def measure_engine(
    n: int, in_flight: int, server_url: str | None, run_dir: Path, *, ray: str = "local", read: bool = False
) -> dict[str, Any]:
    """What n rollouts cost. `ray="off"` measures the same host within the driver's process."""
    model = model_spec(server_url)
    engine = RolloutEngine([model], run_dir=run_dir, k=1, ray=ray, host=HostSpec(slots=in_flight))
    async with engine:
        await work(engine, tasks(WARM_UP, "warm-up"), read=read)
        asked = tasks(n, "task")
        before = cpu_by_role(role)
        with Meter() as meter:
            await work(engine, asked, read=read)
        used = {name: cpu - before.get(name, 0.0) for name, cpu in cpu_by_role(role).items()}
        peak = peak_rss_mb(process.pid for process in tree() if role(process.pid) != "ray")
        closing = time.process_time()
        await engine.close()
        closing = time.process_time() - closing
        check(await asyncio.to_thread(engine.tables), n)
    driver, host = used["driver"], used.get("host", 0.0)
    meter.cpu_s = driver + host
    name = f"rollout_engine, ray={ray}" + (", read" if read else "")
    parts = {"driver": driver, "host": host, "ray": used.get("ray", 0.0), "close": closing}
    more = {f"{part}_ms_per_rollout": round(cpu / n * 1e3, 4) for part, cpu in parts.items()}
    packages = versions(["rollout-engine", "ray", "httpx-aiohttp", "uvloop", "pyarrow"])
    return {**result(name, n, in_flight, meter, **more, versions=packages), "max_rss_mb": round(peak, 1)}


def main() -> None:
    parser = case_arguments(__doc__)
    parser.add_argument("--ray", default="local", help="local, off, or an address")
    parser.add_argument("--read", action="store_true", help="read every row as a record")
    parser.add_argument("--mock", action="store_true", help="no HTTP: a scripted model in the host's process")
    args = parser.parse_args()
    url = None if args.mock else args.url
    os.environ["OPENAI_API_KEY"] = API_KEY
    with scratch("engine") as folder:
        measured = measure_engine(args.n, args.in_flight, url, folder / "run", ray=args.ray, read=args.read)
        emit(asyncio.run(measured))


if __name__ == "__main__":
    main()
