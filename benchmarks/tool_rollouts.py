"""What a rollout with tools costs: three turns over HTTP, two shell commands in a box, verified by code in a fresh box.

    python -m benchmarks.tool_rollouts [--tasks 40] [-k 4] [--rounds 3] [--in-flight 16]

Each rollout has a `namespace` box of its own with limits on; a scripted model behind an HTTP server calls the shell
twice and then says that it is done; the task's verifier code (a function of `env`) reads the file that is left, by a
fresh Python in a box that the agent never had. Every score is checked to be 1.0.

Counted is all CPU but the model server's: the engine, the launcher, boxes, commands, verifiers, killed children, and
the rows' way to the disk, by a control group of its own (cpuacct, or cpu.stat); where there is none by /proc/stat,
which also counts strangers and the server. Not counted: imports, the start of the launcher, one warm-up round.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from collections.abc import Iterable
from pathlib import Path

import pyarrow.compute as pc

from benchmarks.cases import scratch
from benchmarks.control_group import Meter, metered
from benchmarks.sandbox_namespace import best
from rollout_engine.config import HostSpec, ModelSpec
from rollout_engine.engine import RolloutEngine
from rollout_engine.models.server_process import ServerProcess
from rollout_engine.results import Run
from rollout_engine.sandboxes.base import SandboxSpec
from rollout_engine.sandboxes.namespace import NamespaceProvider
from rollout_engine.specs import Task

BOUND_MS = 40.0
VERIFY = """
def verify(env, final_answer=None, conversation=None):
    return float(env.read_file("answer.txt").split() == ["{n}"] and final_answer == "Done.")
"""
WARM_UP = 8


def task(name: str, n: int) -> Task:
    """Count to n into a file, then count its lines."""
    return Task(
        task_id=name,
        prompt=f"Write into `answer.txt` how many whole numbers there are from 1 to {n}.",
        environment={},
        verifier={"type": "code", "code": VERIFY.format(n=n)},
        solution={"script": f"seq {n} > numbers.txt\nwc -l < numbers.txt > answer.txt"},
    )


def tasks(prefix: str, n: int) -> list[Task]:
    return [task(f"{prefix}-{index}", 10 + index) for index in range(n)]


async def measure(meter: Meter, engine: RolloutEngine, asked: Iterable[Task], rollouts: int) -> dict[str, float]:
    """CPU and wall time of the rollouts of one round, each with a row on the disk at its end."""
    started, used, own = time.perf_counter(), meter.read(), time.process_time()
    await engine.finish(asked)
    wall, own = time.perf_counter() - started, time.process_time() - own
    return {"cpu_ms": (meter.read() - used) / rollouts, "own_ms": own * 1e3 / rollouts, "rate": rollouts / wall}


def check(run: Run, rollouts: int) -> None:
    """Exits unless every rollout took three turns and scored 1.0."""
    rows = run.rollouts
    right = pc.sum(pc.and_(pc.equal(rows["score"], 1.0), pc.equal(rows["num_turns"], 3))).as_py()
    if rows.num_rows != rollouts or right != rollouts:
        said = pc.unique(rows["failure_message"]).to_pylist()[:3]
        raise SystemExit(f"{rows.num_rows} rows, {right} of them right, where {rollouts} were due: {said}")


async def measure_all(args: argparse.Namespace, model: ModelSpec, known: list[list[Task]], run_dir: Path) -> None:
    """Every round through one engine; prints what it cost."""
    engine = RolloutEngine(
        [model], run_dir=run_dir, k=args.k, ray="off", agent="tool_loop", sandbox="namespace",
        host=HostSpec(slots=args.in_flight),
    )  # fmt: skip
    warm_up, *rounds = known
    results = []
    with metered() as meter:
        print(f"cpu by {'a control group' if meter.by != '/proc/stat' else '/proc/stat'}")
        async with engine:
            await engine.finish(warm_up)
            for asked in rounds:
                load = os.getloadavg()[0]
                results.append(await measure(meter, engine, asked, len(asked) * args.k))
                said = "{cpu_ms:7.2f} ms CPU a rollout ({own_ms:.2f} of them the engine's own process), {rate:.1f}/s"
                print(f"{said.format(**results[-1])}, load {load:.1f}", flush=True)
            await engine.close()
            run = await asyncio.to_thread(engine.tables)
        await yardstick(meter)
    check(run, sum(map(len, known)) * args.k)
    report([result["cpu_ms"] for result in results])
    phases = {name: pc.mean(run.rollouts[name]).as_py() * 1e3 for name in ("start_s", "agent_s", "verify_s", "close_s")}
    print("mean wall ms of a rollout:", ", ".join(f"{name[:-2]} {value:.0f}" for name, value in phases.items()))


async def yardstick(meter: Meter) -> None:
    """What the machine makes of known work at this moment: a box with one command, and a Python in a box."""
    provider = NamespaceProvider()
    box = await provider.open(SandboxSpec())

    async def life() -> None:
        other = await provider.open(SandboxSpec())
        await other.exec(["true"])
        await other.close()

    async def python() -> None:
        await box.exec(["python3", "-I", "-S", "-c", "pass"])

    (bare, _), (start, _) = await best(meter, 2, 20, life), await best(meter, 2, 20, python)
    print(f"beside it, one at a time: create, exec true, destroy {bare:.2f} ms; a bare Python in a box {start:.2f} ms")
    await provider.close()


def report(costs: list[float]) -> None:
    """The median against the bound."""
    middle = statistics.median(costs)
    verdict = "reached" if middle <= BOUND_MS else "MISSED"
    print(f"median {middle:.2f} ms ({min(costs):.2f}-{max(costs):.2f}), to reach: at most {BOUND_MS:.0f} ms: {verdict}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=40)
    parser.add_argument("-k", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--in-flight", type=int, default=16)
    args = parser.parse_args()
    known = [tasks("warm-up", WARM_UP), *(tasks(f"round-{r}", args.tasks) for r in range(args.rounds))]
    solutions = {task.task_id: task.solution for asked in known for task in asked if task.solution is not None}
    acting = ModelSpec(name="m", kind="scripted", options={"turns": 2})
    with ServerProcess({"m": acting}, solutions=solutions) as server, scratch("tools") as folder:
        model = ModelSpec(name="m", kind="openai", model="m", base_url=server.url, seed_header=True)
        asyncio.run(measure_all(args, model, known, folder / "run"))


if __name__ == "__main__":
    main()
