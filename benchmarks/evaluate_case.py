"""How long `evaluate()` takes for many generated tasks at once: 100 tasks, k = 4, m = 2, one shell turn each.

    python -m benchmarks.evaluate_case [--tasks 100] [-k 4] [--pure]

Every task goes through the static check, a dry run in an untouched box and one with its solution, and then k attempts
by a strong and a weak model, each in a `namespace` box of its own: one call of the shell, then the final text. The
models are scripted ones behind an HTTP server on the same cores. The verifier is code that reads the file which the
model left, by a fresh Python in a fresh box; with --pure it is a function of the final answer, which the warm verifier
judges. Checked: every task is valid and every rollout has a score.

Measured are wall time, from the first call to the last result, and the CPU of all but the model server (see
`tool_rollouts.py`). Not counted: imports, the start of the launcher, one task as warm-up.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.cases import scratch
from benchmarks.control_group import metered
from rollout_engine.config import HostSpec, ModelSpec
from rollout_engine.engine import RolloutEngine
from rollout_engine.evaluation import Evaluation
from rollout_engine.models.server_process import ServerProcess

BOUND_S = 60.0
SKILLS = {"strong": 0.8, "weak": 0.4}
READS = """
def verify(env, final_answer=None, conversation=None):
    return float(env.exists("answer.txt") and env.read_file("answer.txt").split() == ["{n}"])
"""
PURE = """
def verify(final_answer=None, conversation=None):
    said = [m.get("content") or "" for m in conversation if m.get("role") == "tool"]
    return float(any(text.split()[:1] == ["{n}"] for text in said))
"""


def generated(name: str, n: int, *, pure: bool) -> dict[str, Any]:
    """What a generator of tasks hands over."""
    return {
        "task_id": name,
        "prompt": f"Write into `answer.txt` how many whole numbers there are from 1 to {n}, and show it.",
        "verifier_code": (PURE if pure else READS).format(n=n),
        "environment": {},
        "solution": None if pure else {"script": script(n)},
    }


def script(n: int) -> str:
    return f"seq {n} | wc -l | tee answer.txt"


async def evaluate(engine: RolloutEngine, task: Mapping[str, Any]) -> Evaluation:
    fields = dict(task)
    return await engine.evaluate(fields.pop("prompt"), fields.pop("verifier_code"), **fields)


def check(found: list[Evaluation], k: int) -> str:
    """How it went; exits unless every task is valid and every rollout has a score."""
    scores = {name: [score for one in found for score in one.scores[name]] for name in SKILLS}
    wrong = Counter(reason for one in found for reason in one.reasons)
    wrong.update(kind for one in found for kind in one.failures)
    if wrong or any(len(all_of) != len(found) * k or None in all_of for all_of in scores.values()):
        raise SystemExit(f"not every task is valid and scored: {wrong.most_common(3)}")
    means = ", ".join(f"{name} {sum(all_of) / len(all_of):.3f}" for name, all_of in scores.items())
    return f"mean scores: {means}; mean reward {sum(one.reward or 0.0 for one in found) / len(found):.3f}"


async def measure(args: argparse.Namespace, models: list[ModelSpec], run_dir: Path) -> None:
    """Evaluates all tasks at once; prints what it took."""
    engine = RolloutEngine(
        models, run_dir=run_dir, k=args.k, ray="off", agent="tool_loop", sandbox="namespace",
        host=HostSpec(slots=args.in_flight),
    )  # fmt: skip
    with metered() as meter:
        async with engine:
            await evaluate(engine, generated("warm-up", 3, pure=args.pure))
            load, used, started = os.getloadavg()[0], meter.read(), time.perf_counter()
            asked = [generated(f"task-{index}", 10 + index, pure=args.pure) for index in range(args.tasks)]
            found = await asyncio.gather(*(evaluate(engine, task) for task in asked))
            wall, cpu = time.perf_counter() - started, meter.read() - used
    rollouts = args.tasks * args.k * len(models)
    said = check(found, args.k)
    kind = "pure code" if args.pure else "code that reads env"
    cost = f"{cpu / rollouts:.1f} ms CPU a rollout, the dry runs in it"
    print(f"{args.tasks} tasks, {rollouts} rollouts, {kind}: {wall:.1f} s ({rollouts / wall:.1f}/s), {cost}")
    print(f"{os.cpu_count()} cores, load before {load:.1f}; {said}")
    bound = BOUND_S * rollouts / 800
    print(f"to reach: under {bound:.0f} s for {rollouts} rollouts: {'reached' if wall < bound else 'MISSED'}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=100)
    parser.add_argument("-k", type=int, default=4)
    parser.add_argument("--in-flight", type=int, default=16)
    parser.add_argument("--pure", action="store_true", help="verifier code that reads the conversation alone")
    args = parser.parse_args()
    acting = {name: ModelSpec(name=name, kind="scripted", options={"skill": skill}) for name, skill in SKILLS.items()}
    known = {"warm-up": 3, **{f"task-{index}": 10 + index for index in range(args.tasks)}}
    solutions = {name: {"script": script(n)} for name, n in known.items()}
    with ServerProcess(acting, solutions=solutions) as server, scratch("evaluate") as folder:
        models = [
            ModelSpec(name=name, kind="openai", model=name, base_url=server.url, seed_header=True) for name in SKILLS
        ]
        asyncio.run(measure(args, models, folder / "run"))


if __name__ == "__main__":
    main()
