"""Our rollouts with one sandbox and one command each: `tool_loop` with a scripted model in the process, `match`.

    python -m benchmarks.peers.box_rollout --sandbox namespace|docker [-n 40] [--in-flight 4]

The model calls the shell once and then says that it is done; each rollout has a row, committed and synced. CPU is that
of everything, see everything.py. Docker's boxes use the image `pybox` without a network.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

import pyarrow.compute as pc

from benchmarks.cases import scratch
from benchmarks.measure import emit, result, versions
from benchmarks.peers.everything import Everything
from rollout_engine.config import HostSpec, ModelSpec
from rollout_engine.engine import RolloutEngine
from rollout_engine.models.acting import DONE
from rollout_engine.specs import Task

IMAGE = "pybox"
WARM_UP = 2


def tasks(n: int, prefix: str, sandbox: str) -> list[Task]:
    """Tasks that `true` solves."""
    return [
        Task(
            task_id=f"{prefix}-{index}",
            prompt="Run `true`, then say that you are done.",
            environment={"image": IMAGE} if sandbox == "docker" else {},
            verifier={"type": "match", "compare": "exact", "expected": DONE},
            solution={"script": "true"},
        )
        for index in range(n)
    ]


async def measure(sandbox: str, n: int, in_flight: int, meter: Everything, run_dir: Path) -> None:
    """n rollouts after a warm-up. Exits unless each of them called the shell and scored 1.0."""
    engine = RolloutEngine(
        [ModelSpec(name="m", kind="scripted")], run_dir=run_dir, k=1, ray="off", agent="tool_loop", sandbox=sandbox,
        host=HostSpec(slots=in_flight),
    )  # fmt: skip
    async with engine:
        await engine.finish(tasks(WARM_UP, "warm-up", sandbox))
        meter.start()
        await engine.finish(tasks(n, "task", sandbox))
        meter.stop()
        await engine.close()
        rows = (await asyncio.to_thread(engine.tables)).rollouts
    right = pc.sum(pc.and_(pc.equal(rows["score"], 1.0), pc.equal(rows["num_turns"], 2))).as_py()
    if not rows.num_rows == right == n + WARM_UP:
        said = pc.unique(rows["failure_message"]).to_pylist()[:3]
        raise SystemExit(f"{rows.num_rows} rows, {right} of them right, where {n + WARM_UP} were due: {said}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sandbox", choices=("namespace", "docker"), required=True)
    parser.add_argument("-n", type=int, default=40)
    parser.add_argument("--in-flight", type=int, default=4)
    args = parser.parse_args()
    with Everything(docker=args.sandbox == "docker") as meter, scratch("box") as folder:
        asyncio.run(measure(args.sandbox, args.n, args.in_flight, meter, folder / "run"))
    parts = meter.parts_ms(args.n)
    known = versions(["rollout-engine"])
    emit(result(args.sandbox, args.n, args.in_flight, meter, parts_ms=parts, by=meter.by, versions=known))


if __name__ == "__main__":
    main()
