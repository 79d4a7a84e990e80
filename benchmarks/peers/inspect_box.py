"""Inspect's rollouts with one docker sandbox and one exec each; mock model, scored by the exec's exit code.

Runs in the environment `inspect` of envs.py. Settings: its `docker` sandbox from a compose file of the form that its
documentation shows (`init: true`, `network_mode: none`, `x-local: true` for a local image), `max_samples` and
`max_sandboxes` as asked, the rest as it is. It wants Docker Engine 24.0.6; with an older daemon that check alone is
skipped (it works, and the record says so). CPU is that of everything, see everything.py.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from benchmarks.cases import scratch
from benchmarks.measure import emit, result, versions
from benchmarks.peers.compose import docker_config
from benchmarks.peers.everything import Everything

COMPOSE = """services:
  default:
    image: pybox:latest
    x-local: true
    command: sleep infinity
    init: true
    network_mode: none
    stop_grace_period: 1s
"""
WARM_UP = 2


async def unchecked(version: str = "") -> None:
    """In the place of the check of the engine's version."""


def evaluate(n: int, in_flight: int, folder: Path) -> list[object]:
    """The scores of n samples."""
    from inspect_ai import Task, eval
    from inspect_ai.dataset import MemoryDataset, Sample
    from inspect_ai.scorer import Score, Target, accuracy, scorer
    from inspect_ai.solver import Generate, TaskState, solver
    from inspect_ai.util import sandbox
    from inspect_ai.util._sandbox.docker import prereqs

    prereqs.validate_docker_engine = unchecked

    @solver
    def runs_true():
        async def solve(state: TaskState, generate: Generate) -> TaskState:
            state.store.set("ok", (await sandbox().exec(["true"])).success)
            return state

        return solve

    @scorer(metrics=[accuracy()])
    def ok():
        async def score(state: TaskState, target: Target) -> Score:
            return Score(value="C" if state.store.get("ok") else "I")

        return score

    samples = [Sample(input=f"sample {index}", target="", id=index + 1) for index in range(n)]
    path = folder / "compose.yaml"
    path.write_text(COMPOSE)
    task = Task(dataset=MemoryDataset(samples), solver=runs_true(), scorer=ok(), sandbox=("docker", str(path)))
    (log,) = eval(
        task,
        model="mockllm/model",
        max_samples=in_flight,
        max_sandboxes=in_flight,
        display="none",
        log_dir=str(folder / "logs"),
    )
    return [score.value for sample in log.samples or () for score in (sample.scores or {}).values()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-n", type=int, default=20)
    parser.add_argument("--in-flight", type=int, default=4)
    args = parser.parse_args()
    with Everything(docker=True) as meter, scratch("inspect") as folder:
        os.environ |= {"XDG_DATA_HOME": str(folder / "data"), "XDG_CACHE_HOME": str(folder / "cache")}
        os.environ["DOCKER_CONFIG"] = str(docker_config())
        os.chdir(folder)
        for count in (WARM_UP, args.n):
            meter.start()
            scores = evaluate(count, args.in_flight, folder)
            meter.stop()
            if scores != ["C"] * count:
                raise SystemExit(f"{scores.count('C')} of {count} samples were right ({len(scores)} scores)")
    known = versions(["inspect-ai"])
    more = {"parts_ms": meter.parts_ms(args.n), "by": meter.by, "versions": known}
    emit(result("inspect, docker", args.n, args.in_flight, meter, **more))


if __name__ == "__main__":
    main()
