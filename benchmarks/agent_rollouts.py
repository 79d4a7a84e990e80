"""Our rollouts of an agent program: the tiny agent in a sandbox of its own each, its two calls by the proxy, verified.

    python -m benchmarks.agent_rollouts --url URL [--sandbox namespace|docker] [-n 1000] [--in-flight 16]

A rollout is a task of its own, k = 1: a sandbox without a network is made, the program runs in it, asks through the
rollout's proxy and leaves a file; code that reads that file through `env` judges it in a sandbox that the agent was
never in; a row with both turns is committed and synced. Every row is checked: score 1.0, two turns, exit code 0.

CPU is that of everything, see peers/everything.py; not counted are the model server, imports and a warm-up.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

import pyarrow.compute as pc

from benchmarks.cases import case_arguments, scratch
from benchmarks.measure import emit, result, versions
from benchmarks.peers.everything import Everything
from benchmarks.tiny_agent import ARGV, CALLS, FILE
from benchmarks.work import API_KEY, EXPECTED, MODEL, question
from rollout_engine.config import HostSpec, ModelSpec
from rollout_engine.engine import RolloutEngine
from rollout_engine.results import Run
from rollout_engine.specs import Task

IMAGE = "pybox"
VERIFY = f"""
def verify(env, final_answer=None, conversation=None):
    return float(env.read_file("{FILE}").strip() == "{EXPECTED}")
"""
OPTIONS = {
    "argv": [*ARGV, "{prompt}"],
    "prompt": "argument",
    "env": {"OPENAI_BASE_URL": "{url}/v1", "OPENAI_API_KEY": API_KEY, "OPENAI_MODEL": "{model}"},
}
"""`agent_options` of the agent `command`."""


def tasks(n: int, prefix: str, sandbox: str = "namespace") -> list[Task]:
    """The questions of the other cases, each to be answered into a file."""
    environment = {"image": IMAGE} if sandbox == "docker" else {}
    verifier = {"type": "code", "code": VERIFY}
    return [
        Task(task_id=f"{prefix}-{index}", prompt=question(index), environment=environment, verifier=verifier)
        for index in range(n)
    ]


def check(run: Run, n: int) -> None:
    """Exits unless there are n rows, all of them right."""
    rows = run.rollouts
    signs = (("score", 1.0), ("num_turns", CALLS), ("agent_exit_code", 0))
    right = sum(all(row[name] == value for name, value in signs) for row in rows.select(dict(signs)).to_pylist())
    if not rows.num_rows == right == n:
        said = pc.unique(rows["failure_message"]).to_pylist()[:3]
        raise SystemExit(f"{rows.num_rows} rows, {right} of them right, where {n} were due: {said}")


async def measure(
    url: str, sandbox: str, warm_up: Sequence[Task], asked: Sequence[Task], in_flight: int, meter: Everything, run: Path
) -> float:
    """Runs them all; returns the CPU seconds of this process, a part of what the meter has."""
    engine = RolloutEngine(
        [ModelSpec(name=MODEL, kind="openai", model=MODEL, base_url=url)], run_dir=run, k=1, ray="off",
        agent="command", agent_options=OPTIONS, sandbox=sandbox, host=HostSpec(slots=in_flight),
    )  # fmt: skip
    async with engine:
        await engine.finish(warm_up)
        meter.start()
        own = time.process_time()
        await engine.finish(asked)
        own = time.process_time() - own
        meter.stop()
        await engine.close()
        check(await asyncio.to_thread(engine.tables), len(warm_up) + len(asked))
    return own


def main() -> None:
    parser = case_arguments(__doc__)
    parser.add_argument("--sandbox", choices=("namespace", "docker"), default="namespace")
    parser.add_argument("--warm-up", type=int, default=8)
    args = parser.parse_args()
    made = [tasks(count, prefix, args.sandbox) for count, prefix in ((args.warm_up, "warm-up"), (args.n, "task"))]
    with Everything(docker=args.sandbox == "docker") as meter, scratch("agent") as folder:
        own = asyncio.run(measure(args.url, args.sandbox, *made, args.in_flight, meter, folder / "run"))
    more = {"parts_ms": meter.parts_ms(args.n), "by": meter.by, "own_ms": round(own / args.n * 1e3, 4)}
    emit(result(args.sandbox, args.n, args.in_flight, meter, **more, versions=versions(["rollout-engine"])))


if __name__ == "__main__":
    main()
